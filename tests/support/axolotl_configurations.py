# SPDX-License-Identifier: Apache-2.0
"""Axolotl configurations for hypothesis: the offload keys, and every key that decides about them.

Each is a plain mapping as Axolotl reads it from YAML. Values are valid or wrong on purpose; keys that only make
a configuration complete (datasets, batch size) are the same in all of them.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

COMPLETE: dict[str, Any] = {
    "base_model": "Qwen/Qwen3-8B",
    "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
    "learning_rate": 0.00001,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "sequence_len": 512,
}

SWITCH = st.booleans()

ADAPTERS = st.sampled_from(
    [
        {},
        {},
        {"adapter": "lora"},
        {"adapter": "lora", "load_in_8bit": True},
        {"adapter": "lora", "load_in_4bit": False},
        {"adapter": "qlora", "load_in_4bit": True},
    ]
)

TRAINERS = st.sampled_from(
    [{}] * 8
    + [{"rl": name} for name in ("dpo", "ipo", "orpo", "simpo")]
    + [
        {"rl": "kto", "remove_unused_columns": False},
        {"rl": "ebft", "ebft": {"mode": "structured"}},
        {"rl": "ebft", "ebft": {"mode": "strided"}},
        {"rl": "ebft", "ebft": {"mode": "strided"}, "attn_implementation": "flex_attention"},
        {"rl": "ebft", "ebft": {"mode": "strided"}, "flex_attention": True},
        {"reward_model": True},
    ]
)

FSDP_CONFIG = st.fixed_dictionaries(
    {},
    optional={
        "offload_params": SWITCH,
        "fsdp_offload_params": SWITCH,
        "cpu_offload_pin_memory": SWITCH,
        "cpu_ram_efficient_loading": SWITCH,
        "fsdp_cpu_ram_efficient_loading": SWITCH,
        "activation_checkpointing": SWITCH,
        "fsdp_version": st.sampled_from([1, 2]),
        "reshard_after_forward": SWITCH,
        "use_orig_params": SWITCH,
        "fsdp_sync_module_states": SWITCH,
        "limit_all_gathers": SWITCH,
        "sharding_strategy": st.just("FULL_SHARD"),
        "fsdp_forward_prefetch": SWITCH,
    },
).filter(
    lambda section: (
        not {"offload_params", "fsdp_offload_params"} <= section.keys()
        and not {"cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading"} <= section.keys()
    )
)

DEEPSPEED = st.sampled_from(
    ["deepspeed_configs/zero1.json", "deepspeed_configs/zero3_bf16.json", {"zero_optimization": {"stage": 3}}]
)

SHARDING = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"deepspeed": DEEPSPEED}, optional={"fsdp": st.just(["full_shard"])}),
    st.fixed_dictionaries(
        {"fsdp_config": FSDP_CONFIG},
        optional={
            "fsdp_version": st.sampled_from([None, 1, 2]),
            "deepspeed": DEEPSPEED,
            "fsdp": st.just(["full_shard"]),
        },
    ),
)

SELECTIVE = st.one_of(
    SWITCH,
    st.fixed_dictionaries(
        {},
        optional={
            "save": st.lists(
                st.sampled_from(["attention", "aten::mm", "mm", "addmm", "aten", "exp"]), max_size=3
            ),
            "offload": SWITCH,
            "save_matmul_min_k": st.sampled_from([None, 4096]),
            "save_modules": st.lists(
                st.sampled_from(
                    ["o_proj", "self_attn.q_proj", "*_proj", "layers.0", "model", "lm_head", "mlp", ""]
                ),
                max_size=2,
            ),
        },
    ),
)

OPTIMIZERS = st.sampled_from(
    [
        "adamw_torch", "adamw_torch_8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit",
        "muon", "muon_8bit", "flash_adamw", "flash_lion", "q_galore_adamw8bit", "polora",
    ]
)  # fmt: skip

OFFLOADING = st.fixed_dictionaries(
    {},
    optional={
        "gradient_checkpointing": st.sampled_from(
            [True, True, True, False, "offload", "offload_disk", "unsloth"]
        ),
        "gradient_checkpointing_kwargs": st.fixed_dictionaries({"use_reentrant": SWITCH}),
        "activation_offloading": st.sampled_from([True, False, "legacy", "disk", "hidden_states"]),
        "selective_checkpointing": SELECTIVE,
        "layer_offloading": SWITCH,
        "ple_cpu_offload": SWITCH,
        "relora_cpu_offload": SWITCH,
        "unfrozen_parameters": st.just(["^lm_head.weight$"]),
        "torch_compile": SWITCH,
        "model_quantization_config": st.just("Mxfp4Config"),
        "optimizer": OPTIMIZERS,
    },
)

# Keys that decide about loading, kernels and parallelism: seldom set, so it is not drawn with the rest.
BESIDE = st.fixed_dictionaries(
    {},
    optional={
        "qlora_sharded_model_loading": st.sampled_from([None, True, False]),
        "nf4_backend": st.sampled_from(["bitsandbytes", "torchao"]),
        "tensor_parallel_size": st.sampled_from([1, 2]),
        "context_parallel_size": st.sampled_from([1, 2]),
        "dp_replicate_size": st.sampled_from([1, 2]),
        "lora_mlp_kernel": SWITCH,
        "lora_qkv_kernel": SWITCH,
        "lora_o_kernel": SWITCH,
        "lora_embedding_kernel": SWITCH,
        "trust_remote_code": SWITCH,
        "peft_use_dora": SWITCH,
        "peft_init_lora_weights": st.sampled_from([True, "gaussian", "olora"]),
        "lora_fp32_gradients": SWITCH,
        "fp32_norms": SWITCH,
        "torch_compile_regional": SWITCH,
        "ring_attn_func": st.just("varlen_llama3"),
        "heads_k_stride": st.just(1),
        "base_model": st.just("tiiuae/falcon-7b"),
    },
)
BESIDE_SELDOM = st.one_of(st.just({}), st.just({}), BESIDE)

# The backend is always there: `auto` depends on the installed packages.
EXPERTS = st.sampled_from(
    [{}] * 4
    + [
        {"expert_parallel_size": size, "expert_parallel_backend": backend}
        for size, backend in ((1, "torch"), (2, "torch"), (2, "torch"), (2, "deep_ep"))
    ]
)

RELORA = st.sampled_from([{}, {}, {}, {"relora": True, "jagged_restart_steps": 10, "adapter": "lora"}])

# As people write them: a few lines, empty values left from an example, and sections with one key.
SPARSE = {
    "adapter": [None, "lora", "qlora"],
    "load_in_4bit": [True, False],
    "load_in_8bit": [True, False],
    "gradient_checkpointing": [None, True, False, "offload"],
    "gradient_checkpointing_kwargs": [None, {}, {"use_reentrant": False}, {"use_reentrant": True}],
    "activation_offloading": [None, True, "legacy", "disk", "hidden_states"],
    "selective_checkpointing": [None, True, {"save": ["attention", "mm"]}, {"offload": True}],
    "layer_offloading": [None, True],
    "ple_cpu_offload": [None, True],
    "fsdp": [None, [], ["full_shard", "auto_wrap"]],
    "fsdp_version": [None, 1, 2],
    "fsdp_config": [
        None,
        {},
        {"offload_params": True},
        {"fsdp_offload_params": True, "fsdp_sharding_strategy": "FULL_SHARD"},
        {"fsdp_version": 2, "offload_params": True, "cpu_offload_pin_memory": False},
        {"version": 2, "cpu_ram_efficient_loading": True},
        {"limit_all_gathers": True, "sync_module_states": True, "use_orig_params": True},
        {"reshard_after_forward": True, "activation_checkpointing": True},
    ],
    "deepspeed": [None, "deepspeed_configs/zero1.json", "deepspeed_configs/zero3_bf16.json"],
    "optimizer": ["adamw_torch_fused", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "muon"],
    "rl": [None, "dpo", "kto", "orpo"],
    "unfrozen_parameters": [None, [], ["^lm_head.weight$"]],
    "relora": [None, True],
    "torch_compile": [None, True, False],
    "flash_attention": [None, True],
    "sample_packing": [True, False],
    "tensor_parallel_size": [None, 1, 2],
    "context_parallel_size": [None, 1, 2],
    "lora_mlp_kernel": [None, True, False],
    "qlora_sharded_model_loading": [None, True, False],
    "model_quantization_config": [None, "Mxfp4Config"],
    "bf16": [None, True, "auto"],
    "tf32": [True],
}


@st.composite
def sparse(draw: st.DrawFn) -> dict[str, Any]:
    """Draw one to six lines beside the common ones."""
    names = draw(st.lists(st.sampled_from(sorted(SPARSE)), unique=True, min_size=1, max_size=6))
    return {**COMPLETE, **{name: draw(st.sampled_from(SPARSE[name])) for name in names}}


def configurations() -> SearchStrategy[dict[str, Any]]:
    """Draw a whole configuration: a sparse one, or each part on its own, so that every pair of keys meets."""
    parts = st.tuples(OFFLOADING, RELORA, ADAPTERS, TRAINERS, SHARDING, BESIDE_SELDOM, EXPERTS)
    return st.one_of(
        sparse(),
        parts.map(
            lambda drawn: {**COMPLETE, **{key: value for part in drawn for key, value in part.items()}}
        ),
    )
