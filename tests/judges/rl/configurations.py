# SPDX-License-Identifier: Apache-2.0
"""Generates configurations of the four RL frameworks: a question for the witness, and the text that lint reads.

Most are sparse, as people write them: a few keys around one mechanism, the rest left to its default.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """One configuration: `question` for the witness, `text` in a file called `filename` for lint."""

    question: dict[str, Any]
    text: str
    filename: str


def sampled(chance: random.Random, options: dict[str, list[Any]], keep: float = 0.4) -> dict[str, Any]:
    """Return a few of `options` with one of their values each."""
    share = chance.choice([0.15, keep, 0.8])
    return {name: chance.choice(values) for name, values in options.items() if chance.random() < share}


BOOL = [True, False]
ACTOR = "actor_rollout_ref.actor"
VERL = {
    f"{ACTOR}.strategy": ["fsdp", "fsdp2"],
    f"{ACTOR}.fsdp_config.strategy": ["fsdp", "fsdp2", "fsdp_turbo", "ddp", "megatron"],
    f"{ACTOR}.fsdp_config.param_offload": BOOL,
    f"{ACTOR}.fsdp_config.optimizer_offload": BOOL,
    f"{ACTOR}.fsdp_config.offload_policy": BOOL,
    f"{ACTOR}.fsdp_config.offload_param": BOOL,
    f"{ACTOR}.fsdp_config.cpu_offload": BOOL,
    "actor_rollout_ref.model.enable_activation_offload": BOOL,
    "actor_rollout_ref.model.activation_offload": BOOL,
    "actor_rollout_ref.ref.fsdp_config.param_offload": BOOL,
    "critic.strategy": ["fsdp", "fsdp2"],
    "critic.fsdp.param_offload": BOOL,
    "critic.model.fsdp_config.optimizer_offload": BOOL,
    "algorithm.adv_estimator": ["gae", "grpo"],
    "trainer.nnodes": [1, 2],
    "trainer.n_gpu_per_node": [8],
}
VERL_MEGATRON = {
    f"{ACTOR}.megatron.param_offload": BOOL,
    f"{ACTOR}.megatron.optimizer_offload": BOOL,
    f"{ACTOR}.megatron.tensor_model_parallel_size": [1, 2],
    f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload": BOOL,
    f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction": [0.5, 1.0],
    f"+{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer": BOOL,
    f"{ACTOR}.megatron.override_transformer_config.fine_grained_activation_offloading": BOOL,
    f"+{ACTOR}.megatron.override_transformer_config.cpu_offloading": BOOL,
    f"{ACTOR}.megatron.cpu_offload": BOOL,
    "algorithm.adv_estimator": ["gae", "grpo"],
}


def verl(chance: random.Random) -> Asked:
    """Overrides of the PPO trainer, with FSDP or Megatron."""
    is_megatron = chance.random() < 0.4
    name = "ppo_megatron_trainer" if is_megatron else "ppo_trainer"
    chosen = sampled(chance, VERL_MEGATRON if is_megatron else VERL, 0.25)
    overrides = [f"{key}={value}" for key, value in chosen.items()]
    command = ["python3 -m verl.trainer.main_ppo", f"--config-name={name}", *overrides]
    return Asked({"name": name, "overrides": overrides}, " \\\n  ".join(command) + "\n", "run.sh")


NEMO = {
    "optimizer_cpu_offload": BOOL,
    "optimizer_offload_fraction": [0.0, 0.5, 1.0, 1.5, -0.5],
    "use_distributed_optimizer": BOOL,
    "optimizer": ["adam", "sgd", "muon"],
    "overlap_cpu_optimizer_d2h_h2d": BOOL,
}
NEMO_DEFAULT = {
    "optimizer": "adam", "optimizer_cpu_offload": False, "optimizer_offload_fraction": 0.0,
    "use_distributed_optimizer": True, "use_precision_aware_optimizer": False, "bf16": True,
}  # fmt: skip
MEGATRON_DEFAULT = {
    "enabled": True, "activation_checkpointing": False, "apply_rope_fusion": True, "bias_activation_fusion": True,
    "gradient_accumulation_fusion": False, "use_fused_weighted_squared_relu": False,
}  # fmt: skip
MODULES = [None, [], ["core_attn"], ["core_attn", "attn_proj"], ["moe_act"], ["expert_fc1", "core_attn"]]


def nemo_rl(chance: random.Random) -> Asked:
    """A policy with the Megatron backend; the keys that its code needs are always there."""
    megatron: dict[str, Any] = {
        **MEGATRON_DEFAULT,
        "model_overrides": {"num_moe_experts": chance.choice([None, 8])},
    }
    if chance.random() < 0.4:
        megatron["fine_grained_activation_offloading"] = chance.choice([True, True, False])
        if chance.random() < 0.8:
            megatron["offload_modules"] = chance.choice(MODULES)
    megatron["optimizer"] = {**NEMO_DEFAULT, **sampled(chance, NEMO)}
    policy = {"precision": "bfloat16", "dtensor_cfg": {"enabled": False}, "megatron_cfg": megatron}
    text = json.dumps({"policy": policy, "grpo": {"max_num_steps": 1}}, indent=1)
    return Asked({"policy": policy}, text, "run.yaml")


SECTION = {
    "fsdp_version": [2],
    "state_dict_type": ["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
    "activation_checkpointing": BOOL,
    "activation_cpu_offload": BOOL,
}
SWIFT = {"save_only_model": BOOL, "gradient_checkpointing": BOOL}
DEEPSPEED = ["zero2", "zero3", "zero2_offload", "zero3_offload"]


def ms_swift(chance: random.Random) -> Asked:
    """A command of `swift sft` with FSDP, DeepSpeed or both, on one visible GPU a process or on two."""
    arguments = sampled(chance, SWIFT)
    if chance.random() < 0.6:
        inline = {"fsdp": "full_shard auto_wrap", "fsdp_config": sampled(chance, SECTION)}
        arguments["fsdp"] = "fsdp2" if chance.random() < 0.4 else json.dumps(inline)
    if chance.random() < 0.4:
        arguments["deepspeed"] = chance.choice(DEEPSPEED)
    is_mp = chance.random() < 0.25
    words = [f"--{name} {_shell(value)}" for name, value in arguments.items()]
    start = f"CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE={1 if is_mp else 2} swift sft --model Qwen/Qwen3-8B"
    text = " ".join([start, "--dataset my", *words]) + "\n"
    return Asked({"arguments": arguments, "is_mp": is_mp}, text, "run.sh")


def _shell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"'{value}'"


PRIME_MODEL = {
    "fsdp_cpu_offload": BOOL,
    "optim_cpu_offload": BOOL,
    "full_offload": BOOL,
    "reshard_after_forward": BOOL,
    "cpu_offload": BOOL,
}
PRIME_OPTIM = {"type": ["adamw", "sgd", "muon", "sign_sgd"], "lr": [1e-6], "max_norm": [1.0, 0.5, "None"]}


def prime_rl(chance: random.Random) -> Asked:
    """The trainer of an RL run."""
    trainer: dict[str, Any] = {"model": sampled(chance, PRIME_MODEL), "optim": sampled(chance, PRIME_OPTIM)}
    if "type" not in trainer["optim"]:
        trainer["optim"]["type"] = "adamw"  # the classes tell the optimizers apart by it
    if chance.random() < 0.1:
        trainer["max_concurrent_runs"] = chance.choice([1, 2])
    lines = ["[orchestrator]", "[trainer]"]
    lines += [
        f"{name} = {json.dumps(value)}" for name, value in trainer.items() if not isinstance(value, dict)
    ]
    for name in ("model", "optim"):
        lines += [
            f"[trainer.{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in trainer[name].items()),
        ]
    return Asked({"trainer": trainer}, "\n".join(lines) + "\n", "rl.toml")


FRAMEWORKS: dict[str, Callable[[random.Random], Asked]] = {
    "verl": verl,
    "nemo_rl": nemo_rl,
    "ms_swift": ms_swift,
    "prime_rl": prime_rl,
}


def configurations(framework: str, count: int, seed: int) -> Iterator[Asked]:
    """Yield `count` configurations, the same ones for the same seed."""
    chance = random.Random(f"{framework} {seed}")
    for _ in range(count):
        yield FRAMEWORKS[framework](chance)
