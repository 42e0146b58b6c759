# SPDX-License-Identifier: Apache-2.0
"""Configurations to judge: each recipe with its required keys, and the switches that its checks are about.

A seed stands for one configuration. Many are sparse: a key that a recipe asks with a default is often left out.
"""

from random import Random
from typing import Any, NamedTuple

RECIPES = (
    "full_finetune_distributed", "full_finetune_single_device", "lora_finetune_distributed",
    "lora_finetune_single_device", "qat_distributed", "qat_lora_finetune_distributed", "qat_single_device",
    "full_dpo_distributed", "lora_dpo_distributed", "lora_dpo_single_device", "ppo_full_finetune_single_device",
    "knowledge_distillation_single_device", "knowledge_distillation_distributed",
)  # fmt: skip
WEIGHTS = (6, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2)
CHECKPOINTER = {
    "_component_": "torchtune.training.FullModelHFCheckpointer",
    "checkpoint_dir": "/tmp/model",
    "checkpoint_files": ["a.safetensors"],
    "output_dir": "${output_dir}",
    "model_type": "LLAMA3",
}
MODEL = {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}
ADAPTED = {
    "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
}
REQUIRED: dict[str, Any] = {
    "output_dir": "/tmp/out",
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "/tmp/t.model"},
    "checkpointer": CHECKPOINTER,
    "resume_from_checkpoint": False,
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "seed": None,
    "shuffle": True,
    "epochs": 1,
    "max_steps_per_epoch": None,
    "batch_size": 2,
    "lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "metric_logger": {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}",
    },
    "log_every_n_steps": 1,
    "log_level": "INFO",
    "dtype": "bf16",
    "save_adapter_weights_only": False,
}
OF_PPO: dict[str, Any] = {
    **dict.fromkeys(("policy_model", "reward_and_value_model"), MODEL),
    **dict.fromkeys(
        ("ref_policy_checkpointer", "value_checkpointer", "reward_checkpointer", "ref_checkpointer"),
        CHECKPOINTER,
    ),
    **dict.fromkeys(("forward_batch_size", "ppo_epochs", "ppo_batch_size"), 4),
    **dict.fromkeys(
        ("gamma", "lmbda", "value_coeff", "value_clip_range", "kl_coeff", "epsilon", "temperature"), 0.5
    ),
    **dict.fromkeys(("whiten_rewards", "penalise_no_eos", "enable_kv_cache"), False),
    "num_steps": 64,
    "batch_size": 4,
    "max_generated_tokens": 8,
    "min_response_length": 2,
    "reward_penalty": -3,
    "stop_token_ids": [128001],
    "top_k": None,
}
OF_DISTILLATION: dict[str, Any] = {
    "teacher_model": MODEL,
    "teacher_checkpointer": CHECKPOINTER,
    "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
    "kd_ratio": 0.5,
}
OPTIMIZERS = (
    "torch.optim.AdamW",
    "torch.optim.AdamW",
    "bitsandbytes.optim.PagedAdamW8bit",
    "torchao.optim.CPUOffloadOptimizer",
)
COMPILE: tuple[Any, ...] = (
    False,
    False,
    True,
    {"model": True},
    {"optimizer_step": True},
    {"model": True, "loss": False, "optimizer_step": False},
)
ABSENT = object()


class Asked(NamedTuple):
    """A configuration, the recipe that gets it, and how many processes there are."""

    recipe: str
    config: dict[str, Any]
    world: int


def drawn(seed: int) -> Asked:
    """Return the configuration of a seed."""
    random = Random(seed)
    recipe = random.choices(RECIPES, WEIGHTS)[0]
    config = {**REQUIRED, **_of(recipe), **_switches(random), "optimizer": _optimizer(random)}
    world = 1
    if recipe.endswith("_distributed"):
        sizes, world = _sizes(random)
        config |= sizes
    if random.random() < 0.3:
        items = list(config.items())
        random.shuffle(items)
        config = dict(items)
    return Asked(recipe, config, world)


def _of(recipe: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"model": ADAPTED if "lora" in recipe or "distillation" in recipe else MODEL}
    if recipe.startswith("ppo"):
        extra = OF_PPO
    if "distillation" in recipe:
        extra |= OF_DISTILLATION
    if "dpo" in recipe:
        extra["ref_checkpointer"] = CHECKPOINTER
    if recipe.startswith("qat"):
        extra["quantizer"] = {
            "_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
        }
    return extra


def _switches(random: Random) -> dict[str, Any]:
    choices: dict[str, tuple[Any, ...]] = {
        "enable_activation_checkpointing": (True, True, False),
        "enable_activation_offloading": (True, False, ABSENT),
        "activation_offloading_use_streams": (ABSENT, ABSENT, True, False),
        "fsdp_cpu_offload": (True, False, ABSENT),
        "optimizer_in_bwd": (True, False, False),
        "clip_grad_norm": (ABSENT, None, 1.0, 1),
        "gradient_accumulation_steps": (1, 1, 4),
        "compile": COMPILE,
        "device": ("cuda", "cuda", "cuda", "cuda", "cpu", "xpu", "npu"),
    }
    drawn_values = {name: random.choice(values) for name, values in choices.items()}
    return {name: value for name, value in drawn_values.items() if value is not ABSENT}


def _optimizer(random: Random) -> dict[str, Any]:
    fused = random.choice((ABSENT, True, False))
    section: dict[str, Any] = {"_component_": random.choice(OPTIMIZERS), "lr": 2e-5}
    return section if fused is ABSENT else {**section, "fused": fused}


def _sizes(random: Random) -> tuple[dict[str, Any], int]:
    """Return sizes of the parallel groups and processes that they divide."""
    tensor = random.choice((1, 1, 2, 4))
    context = random.choice((1, 1, 1, 2))
    shard, replicas = random.choice((-1, -1, 1, 2)), random.choice((1, 1, 2))
    left = random.choice((1, 1, 2)) if shard == -1 else shard
    sizes: dict[str, Any] = {}
    if tensor > 1 or random.random() < 0.2:
        sizes |= {"tensor_parallel_dim": tensor}
    if tensor > 1:
        sizes |= {"tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}}
    for name, size, default in (
        ("context_parallel_dim", context, 1),
        ("data_parallel_shard_dim", shard, -1),
        ("data_parallel_replicate_dim", replicas, 1),
    ):
        if size != default or random.random() < 0.2:
            sizes[name] = size
    return sizes, tensor * context * left * replicas
