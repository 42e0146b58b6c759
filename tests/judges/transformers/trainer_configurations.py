# SPDX-License-Identifier: Apache-2.0
"""Configurations of a Trainer as people write them, mostly few keys, with the slips that the rules are about."""

from typing import Any

from hypothesis import strategies as st

WORDS = [
    ["full_shard"], ["full_shard", "auto_wrap"], ["full_shard", "auto_wrap", "offload"], ["offload"], ["hybrid_shard"],
    ["shard_grad_op"], ["shard_grad_op", "offload"], ["no_shard"], ["full_shard", "shard_grad_op"],
    ["full_shard", "offload_optimizer"], ["FULL_SHARD"], ["true"],
]  # fmt: skip
FSDP_CONFIG: dict[str, list[Any]] = {
    "version": [1, 2, 2],
    "cpu_offload": [True, False],
    "fsdp_offload_params": [True],
    "reshard_after_forward": [True, False, "full_shard", "true", "shard_grad_op"],
    "state_dict_type": ["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT", "sharded_state_dict"],
    "auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "transformer_based_wrap"],
    "fsdp_activation_checkpointing": [True, False],
    "cpu_ram_efficient_loading": [True, False, "true"],
    "sync_module_states": [True, False, "false"],
    "forward_prefetch": [True, False],
    "backward_prefetch": ["BACKWARD_PRE", "backward_post", "NO_PREFETCH", "pre"],
    "use_orig_params": [True, False],
    "min_num_params": [0, 2000],
    "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
    "limit_all_gathers": [True],
}
ZERO: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3, 3],
    "offload_optimizer": [{"device": "cpu", "pin_memory": True}, {"device": "none"}],
}
DEEPSPEED: dict[str, list[Any]] = {
    "gradient_accumulation_steps": ["auto", 1, 4],
    "train_micro_batch_size_per_gpu": ["auto", 8, 2],
    "gradient_clipping": ["auto", 1.0, 0.5],
    "optimizer": [
        {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "weight_decay": "auto"}},
        {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
    ],
}
ARGUMENTS: dict[str, list[Any]] = {
    "gradient_checkpointing": [True, True, False],
    "gradient_checkpointing_kwargs": [{"use_reentrant": False}, {"use_reentrant": True}],
    "per_device_train_batch_size": [1, 2, 8],
    "gradient_accumulation_steps": [1, 4],
    "max_grad_norm": [1.0, 0.5],
    "learning_rate": [1e-4, 1e-5],
    "weight_decay": [0.0, 0.1],
    "optim": ["adamw_torch", "adamw_torch_fused", "paged_adamw_8bit", "cpu_adam", "adamw_apex_fused"],
    "auto_find_batch_size": [True, False],
    "save_only_model": [True, False],
    "load_best_model_at_end": [True, False],
    "eval_strategy": ["no", "steps", "epoch", "step"],
    "save_strategy": ["no", "steps", "epoch", "best", "never"],
    "eval_steps": [100, 200],
    "save_steps": [100, 300],
    "bf16": [True, False],
    "fp16": [True, False],
    "bf16_full_eval": [True],
    "fp16_full_eval": [True],
    "dataloader_num_workers": [0, 2],
    "dataloader_prefetch_factor": [2],
    "torch_empty_cache_steps": [0, 4],
    "warmup_steps": [0, 10, -1],
    "logging_steps": [0, 1, 10],
    "lr_scheduler_type": ["linear", "cosine", "reduce_lr_on_plateau"],
}
RECENT = {"activation_checkpointing": [True, False], "activation_checkpointing_kwargs": [{"offload": True}]}
GONE = {
    "overwrite_output_dir": [True],
    "warmup_ratio": [0.1],
    "group_by_length": [True],
    "evaluation_strategy": ["no"],
}
OF_TRL = {"max_length": [1024], "activation_offloading": [True], "max_seq_length": [1024]}


def some(of: dict[str, list[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Return a few keys of `of`, each with one of its values; few are likelier than many."""
    return st.lists(st.sampled_from(sorted(of)), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: st.sampled_from(of[name]) for name in names})
    )


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Return a request for `trainer_process`: a class, its arguments, and whether a launcher is there."""
    kind = draw(st.sampled_from(["TrainingArguments", "TrainingArguments", "SFTConfig", "GRPOConfig"]))
    arguments = draw(some(ARGUMENTS, 6))
    if draw(st.booleans()):
        arguments["fsdp"] = draw(st.sampled_from([True, True, False, None, *map(" ".join, WORDS)]))
    if draw(st.booleans()):
        arguments["fsdp_config"] = draw(some(FSDP_CONFIG, 5))
    if draw(st.integers(0, 2)) == 0:
        zero = {"stage": 2, **draw(some(ZERO, 2))}
        arguments["deepspeed"] = {"zero_optimization": zero, **draw(some(DEEPSPEED, 2))}
    if draw(st.integers(0, 7)) == 0:
        arguments |= draw(some({**RECENT, **GONE, **(OF_TRL if kind != "TrainingArguments" else {})}, 1))
    return {"class": kind, "arguments": arguments, "distributed": draw(st.integers(0, 5)) > 0}
