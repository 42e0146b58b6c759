# SPDX-License-Identifier: Apache-2.0
"""Launches to judge: a configuration file, a DeepSpeed file beside it, options of the launcher, an environment.

A seed stands for one launch. Most values are good, and most files are sparse, as people write them. Every launch says
how many processes it starts, because the launcher asks for that first.
"""

import json
from random import Random
from typing import Any, NamedTuple

import yaml

FILE, DEEPSPEED_FILE = "accelerate.yaml", "zero.json"
TRUTHS: list[object] = [True, True, False, False, "true", "false", "True", "no", "yes", 1, 0]
BAD_TRUTHS: list[object] = ["cpu", "maybe", None, "", 2]
DEVICES: list[object] = ["cpu", "none", "nvme", "CPU", None, "cpu", "none", "disk"]

FSDP: dict[str, list[object]] = {
    "fsdp_version": [1, 2, 2, "1", "2", 1, 2, 2],
    "fsdp_offload_params": TRUTHS,
    "fsdp_sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", 1, 2, "hybrid_shard", "NO_SHARD", "3"],
    "fsdp_reshard_after_forward": [True, False, True, "true", "FULL_SHARD", "SHARD_GRAD_OP"],
    "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", None, "no_wrap"],
    "fsdp_min_num_params": [2000, 100000000, "100"],
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "Qwen2DecoderLayer,Other", None],
    "fsdp_backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", None, 1, "backward_pre"],
    "fsdp_state_dict_type": [
        "SHARDED_STATE_DICT",
        "FULL_STATE_DICT",
        "LOCAL_STATE_DICT",
        3,
        "full_state_dict",
    ],
    "fsdp_forward_prefetch": TRUTHS,
    "fsdp_use_orig_params": TRUTHS,
    "fsdp_cpu_ram_efficient_loading": TRUTHS,
    "fsdp_sync_module_states": [True, True, True, *TRUTHS],
    "fsdp_activation_checkpointing": TRUTHS,
    "fsdp_activation_checkpointing_offload": [True, False],
}
BAD_FSDP: dict[str, list[object]] = {
    "fsdp_version": [3, 0, "two", None],
    "fsdp_offload_params": BAD_TRUTHS,
    "fsdp_sharding_strategy": ["ZERO3", 9, None],
    "fsdp_reshard_after_forward": ["ZERO3", None],
    "fsdp_auto_wrap_policy": ["TRANSFORMER", "auto"],
    "fsdp_min_num_params": ["1e8", "many"],
    "fsdp_backward_prefetch": ["PRE", 7],
    "fsdp_state_dict_type": ["SHARDED", 8],
    "fsdp_forward_prefetch": BAD_TRUTHS,
    "fsdp_use_orig_params": BAD_TRUTHS,
    "fsdp_cpu_ram_efficient_loading": BAD_TRUTHS,
    "fsdp_sync_module_states": BAD_TRUTHS,
    "fsdp_activation_checkpointing": BAD_TRUTHS,
}
DEEPSPEED: dict[str, list[object]] = {
    "zero_stage": [0, 1, 2, 3, 2, 3, "3", None],
    "offload_optimizer_device": DEVICES,
    "offload_param_device": DEVICES,
    "offload_optimizer_nvme_path": ["/local_nvme"],
    "offload_param_nvme_path": ["/local_nvme"],
    "gradient_accumulation_steps": [1, 4, "auto"],
    "gradient_clipping": [1.0, "auto", 0.5, None],
    "zero3_init_flag": TRUTHS,
    "zero3_save_16bit_model": TRUTHS,
    "deepspeed_multinode_launcher": ["standard"],
}
BAD_DEEPSPEED: dict[str, list[object]] = {
    "zero_stage": ["three", 2.5],
    "gradient_clipping": ["often"],
    "zero3_init_flag": ["maybe"],
}
MEGATRON: dict[str, list[object]] = {
    "megatron_lm_tp_degree": [1, 2],
    "megatron_lm_optimizer_cpu_offload": [True, False, "true", None],
    "megatron_lm_use_precision_aware_optimizer": [True, False],
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": [True, False],
}
BAD_MEGATRON: dict[str, list[object]] = {"megatron_lm_optimizer_cpu_offload": ["cpu"]}
SECTIONS = {
    "fsdp_config": (FSDP, BAD_FSDP),
    "deepspeed_config": (DEEPSPEED, BAD_DEEPSPEED),
    "megatron_lm_config": (MEGATRON, BAD_MEGATRON),
}
OF_TYPE = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
TYPES = ["FSDP"] * 5 + ["DEEPSPEED"] * 4 + ["MEGATRON_LM", "MULTI_GPU", "NO"]
UNKNOWN = {
    "fsdp_config": [
        "fsdp_offload_parameters",
        "fsdp_cpu_offload",
        "fsdp_cpu_offload_pin_memory",
        "cpu_offload",
    ],
    "deepspeed_config": ["offload_optimizer", "zero_optimization", "offload_optimizer_pin_memory"],
    "megatron_lm_config": ["optimizer_cpu_offload", "megatron_lm_optimizer_offload_fraction"],
}
TOP: dict[str, list[object]] = {
    "compute_environment": ["LOCAL_MACHINE"],
    "mixed_precision": ["bf16", "bf16", "no", "fp16", "BF16"],
    "machine_rank": [0],
    "num_machines": [1],
    "main_training_function": ["main"],
    "same_network": [True],
    "rdzv_backend": ["static"],
    "use_cpu": [False],
    "debug": [False],
    "downcast_bf16": ["no"],
    "gpu_ids": ["all"],
    "tpu_env": [[]],
}
BAD_TOP: dict[str, list[object]] = {
    "mixed_precision": [False, "fp32", "float16"],
    "distributed_type": ["fsdp", "DDP", "FSDP2"],
    "fsdp_configs": [{}],
    "zero_stage": [3],
    "offload": [True],
}
ENVIRONMENT = {
    "FSDP_OFFLOAD_PARAMS": ["true", "false"],
    "FSDP_VERSION": ["2"],
    "FSDP_STATE_DICT_TYPE": ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"],
    "FSDP_AUTO_WRAP_POLICY": ["NO_WRAP"],
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ["3", "1"],
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ["cpu", "none"],
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ["cpu"],
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": ["/local_nvme"],
}
FLAGS = ["--use_fsdp", "--use_deepspeed", "--use_megatron_lm", "--multi_gpu", "--cpu"]


class Launch(NamedTuple):
    """A user's input: two files by name, the options of the launcher, exported variables."""

    files: dict[str, str]
    arguments: list[str]
    environment: dict[str, str]

    def script(self) -> str:
        """Return the launch as a shell script."""
        exports = [f"export {name}={value}" for name, value in self.environment.items()]
        return "\n".join(
            ["#!/bin/bash", *exports, " ".join(["accelerate", "launch", *self.arguments, "train.py"])]
        )


def drawn(seed: int) -> Launch:
    """Return the launch of a seed."""
    random = Random(seed)
    config, deepspeed = _config(random)
    files = {FILE: yaml.safe_dump(config, sort_keys=False)}
    if deepspeed is not None:
        files[DEEPSPEED_FILE] = json.dumps(deepspeed)
    plain = random.random() < 0.5
    arguments = [] if plain else _options(random)
    if deepspeed is not None and random.random() < 0.3:
        arguments += ["--mixed_precision", random.choice(["bf16", "fp16"])]
    environment = {} if plain else _some(random, ENVIRONMENT, 0.08)
    return Launch(
        files, ["--config_file", FILE, *arguments], {name: str(value) for name, value in environment.items()}
    )


def _some(random: Random, choices: dict[str, Any], chance: float) -> dict[str, Any]:
    return {name: random.choice(values) for name, values in choices.items() if random.random() < chance}


def _config(random: Random) -> tuple[dict[str, Any], dict[str, Any] | None]:
    kind = random.choice(TYPES)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_processes": 2,
    }
    config |= _some(random, TOP, random.choice([0.1, 0.5]))
    if random.random() < 0.03:
        name, values = random.choice(list(BAD_TOP.items()))
        config[name] = random.choice(values)
    if random.random() < 0.02:
        del config["distributed_type"]
    if random.random() < (0.1 if kind == "DEEPSPEED" else 0.02):
        config |= {
            "mixed_precision": "fp8",
            "fp8_config": {"backend": random.choice(["MSAMP", "MSAMP", "TE", "AO"])},
        }
    names = [OF_TYPE[kind]] if kind in OF_TYPE and random.random() < 0.97 else []
    if random.random() < 0.1:
        names.append(random.choice(list(SECTIONS)))
    for name in names:
        config[name] = _section(random, name)
    deepspeed = _deepspeed_file(random, config) if "deepspeed_config" in names else None
    items = list(config.items())
    random.shuffle(items)
    return dict(items), deepspeed


def _section(random: Random, name: str) -> dict[str, Any]:
    good, bad = SECTIONS[name]
    section = _some(random, good, random.choice([0.1, 0.25, 0.5]))
    if random.random() < 0.12:
        field, values = random.choice(list(bad.items()))
        section[field] = random.choice(values)
    if random.random() < 0.08:
        section[random.choice(UNKNOWN[name])] = True
    if name == "fsdp_config" and random.random() < 0.15:
        section = {field.removeprefix("fsdp_"): value for field, value in section.items()}
    return section


def _deepspeed_file(random: Random, config: dict[str, Any]) -> dict[str, Any] | None:
    """Name a DeepSpeed file now and then, mostly without the fields that it excludes."""
    if random.random() > 0.3:
        return None
    if random.random() < 0.7:
        kept = {"zero3_init_flag", "deepspeed_multinode_launcher"}
        config["deepspeed_config"] = {k: v for k, v in config["deepspeed_config"].items() if k in kept}
        config.pop("mixed_precision", None)
    config["deepspeed_config"]["deepspeed_config_file"] = DEEPSPEED_FILE
    if random.random() < 0.08:
        return {"train_batch_size": 8}
    zero: dict[str, Any] = {"stage": random.choice([1, 2, 3, "auto"])}
    for name in ("offload_optimizer", "offload_param"):
        if random.random() < 0.5:
            zero[name] = {"device": random.choice(["cpu", "none", "auto"])}
    content: dict[str, Any] = {"zero_optimization": zero}
    if random.random() < 0.6:
        content[random.choice(["bf16", "fp16"])] = {"enabled": random.choice([True, False, "auto"])}
    return content


def _options(random: Random) -> list[str]:
    options: list[str] = []
    for _, (good, _bad) in SECTIONS.items():
        for name, value in _some(random, good, 0.04).items():
            if value is None or (name == "fsdp_version" and str(value) not in "12"):
                continue
            dashed = name.replace("_", "-") if random.random() < 0.2 else name
            options += [f"--{dashed}={value}"] if random.random() < 0.3 else [f"--{dashed}", str(value)]
    if random.random() < 0.25:
        options += ["--mixed_precision", random.choice(["bf16", "fp16", "no"])]
    flags = [flag for flag in FLAGS if random.random() < 0.06]
    random.shuffle(flags)
    unknown = ["--fsdp_offload", "true"] if random.random() < 0.02 else []
    return [*flags, *options, *unknown]
