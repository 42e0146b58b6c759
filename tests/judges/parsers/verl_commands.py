# SPDX-License-Identifier: Apache-2.0
"""Commands of verl's PPO trainer, and our reader's values of them."""

import shlex
from random import Random
from typing import Any

import hydra_overrides
from composed import believed_of, same_values

from skill_tools.configs.source import Source
from skill_tools.dialects.verl.compose import compose
from skill_tools.rules.knowledge import load_rules
from skill_tools.rules.lint import lint

VERL = "verl"
_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_OPTIMIZER = f"{_ACTOR}.optim.override_optimizer_config"
_TRANSFORMER = f"{_ACTOR}.megatron.override_transformer_config"
FLAGS = [
    *(
        f"{role}.fsdp_config.{name}"
        for role in (_ACTOR, _REF)
        for name in ("param_offload", "optimizer_offload", "offload_policy", "reshard_after_forward")
    ),
    *(f"critic.fsdp.{name}" for name in ("param_offload", "optimizer_offload", "offload_policy")),
    *(f"critic.model.fsdp_config.{name}" for name in ("param_offload", "offload_policy")),
    "actor_rollout_ref.model.enable_activation_offload",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "critic.model.enable_activation_offload",
]
OF_MEGATRON = [
    *(f"{_ACTOR}.megatron.{name}" for name in ("param_offload", "grad_offload", "optimizer_offload")),
    f"{_ACTOR}.megatron.use_distributed_optimizer",
    f"{_ACTOR}.megatron.sequence_parallel",
    *(f"{_OPTIMIZER}.{name}" for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer")),
    f"{_TRANSFORMER}.cpu_offloading",
    f"{_TRANSFORMER}.fine_grained_activation_offloading",
]
NUMBERS = [
    f"{_ACTOR}.megatron.tensor_model_parallel_size",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size",
    f"{_OPTIMIZER}.optimizer_offload_fraction",
    f"{_TRANSFORMER}.cpu_offloading_num_layers",
    f"{_ACTOR}.veomni.activation_offload_host_cache_limit_gb",
]
TEXTS = [f"{_ACTOR}.strategy", "critic.strategy", f"{_ACTOR}.fsdp_config.strategy", "algorithm.adv_estimator"]
NAMES = [*FLAGS, *OF_MEGATRON, *NUMBERS, *TEXTS]
SECTIONS = [f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", f"{_ACTOR}.megatron"]
ENGINES = ["dp", "megatron", "veomni", "torchtitan"]
TRUTHS = ["true", "false", "True", "False", "TRUE", "null", "1", "0", "007", "no", "'true'", "1.0"]
SIZES = ["1", "2", "8", "0.5", "1e0", "-1", "null", "'2'", "auto", "1_0"]
WORDS = ["fsdp", "fsdp2", "megatron", "gae", "grpo", "veomni", "ddp", "null", "1"]
TABLE: list[dict[str, Any]] = [
    {"name": name, "words": words.split()}
    for name, words in (
        ("ppo_trainer", f"{_ACTOR}.fsdp_config.param_offload=00"),
        ("ppo_trainer", f"{_ACTOR}.fsdp_config.param_offload=007"),
        ("ppo_trainer", f"{_ACTOR}.fsdp_config.param_offload=True"),
        ("ppo_trainer", f"+{_ACTOR}.fsdp_config.param_offload=True"),
        ("ppo_trainer", f"++{_ACTOR}.fsdp_config.param_offload=True"),
        ("ppo_trainer", f"~{_ACTOR}.fsdp_config.param_offload"),
        ("ppo_trainer", f"{_ACTOR}.fsdp_config.param_ofload=True"),
        ("ppo_trainer", f"{_ACTOR}.fsdp_config.param_offload"),
        ("ppo_trainer", f"{_ACTOR}.fsdp_config.param_offload="),
        ("ppo_trainer", f"--{_ACTOR}.fsdp_config.param_offload=True"),
        ("ppo_trainer", f"{_ACTOR}.fsdp_config={{param_offload:true}}"),
        ("ppo_trainer", f"{_ACTOR}.fsdp_config=null"),
        ("ppo_trainer", f"{_ACTOR}.megatron.param_offload=True"),
        ("ppo_trainer", "critic.fsdp.param_offload=True"),
        ("ppo_trainer", "critic.model.fsdp_config.param_offload=True"),
        ("ppo_trainer", f"model_engine=megatron {_ACTOR}.megatron.param_offload=True"),
        ("ppo_trainer", f"model_engine=veomni {_ACTOR}.veomni.activation_offload_host_cache_limit_gb=-1"),
        ("ppo_megatron_trainer", f"{_ACTOR}.megatron.param_offload=True"),
        ("ppo_megatron_trainer", f"{_OPTIMIZER}.optimizer_cpu_offload=True"),
        ("ppo_megatron_trainer", f"+{_OPTIMIZER}.optimizer_cpu_offload=True"),
        ("ppo_trainer", f"{_ACTOR}.fsdp_config.param_offload=True {_ACTOR}.fsdp_config.param_offload=False"),
        (
            "ppo_trainer",
            "critic.model.enable_activation_offload=null +critic.model.enable_activation_offload=007",
        ),
        (
            "ppo_trainer",
            f"model_engine=veomni +{_REF}.fsdp_config.reshard_after_forward=0 ~{_REF}.fsdp_config.param_offload",
        ),
        ("ppo_trainer", f"{_REF}.fsdp_config=null {_REF}.fsdp_config={{}}"),
        ("ppo_trainer", f"{_REF}.fsdp_config=null {_REF}.fsdp_config.param_offload=True"),
        ("ppo_trainer", f"{_REF}.fsdp_config.param_offload=???"),
    )
]


def asked_names(words: list[str]) -> list[str]:
    """Return the names in overrides, and the names set by the choice of an engine."""
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    below = tuple(f"{key}." for key in keys)
    return [name for name in NAMES if name in keys or name in TEXTS or name.startswith(below)]


def question(random: Random) -> dict[str, Any]:
    """Return a configuration of verl's own by name, and overrides of it."""
    name = "ppo_megatron_trainer" if random.random() < 0.3 else "ppo_trainer"
    words = []
    engine = "megatron" if name == "ppo_megatron_trainer" else "dp"
    if name == "ppo_trainer" and random.random() < 0.3:
        engine = random.choice(ENGINES)
        words.append(f"model_engine={engine}")
    words += [_word(random, engine) for _ in range(random.choice([1, 1, 2, 3]))]
    return {"name": name, "words": words}


def _word(random: Random, engine: str) -> str:
    kind = random.random()
    name = random.choice(NAMES if kind < 0.3 else OF_MEGATRON if engine == "megatron" else FLAGS)
    is_new = "override_" in name
    sign = random.choice(["+", "+", "++", ""] if is_new else ["", "", "", "", "", "+", "++", "~"])
    value = random.choice(SIZES if name in NUMBERS else WORDS if name in TEXTS else TRUTHS)
    if random.random() < 0.08:
        value = random.choice(hydra_overrides.VALUES)
    if random.random() < 0.03:
        name, sign = random.choice(SECTIONS), random.choice(["", "", "++"])
        value = random.choice(["{param_offload:true}", "null", "{}"])
    if random.random() < 0.03 and "+" not in sign:
        name = name.replace("offload", "ofload")
    is_bare = sign == "~" and (random.random() < 0.5 or name not in FLAGS)
    return f"{sign}{name}" if is_bare else f"{sign}{name}={value}"


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the set names, or raise the rules' refusals."""
    words = shlex.join([f"--config-name={asked['name']}", *asked["words"]])
    script = f"# verl=={release}\npython3 -m verl.trainer.main_ppo {words}\n"
    config = compose([Source("run.sh", script, None)], [])
    found = lint(config, versions={VERL: release}).findings
    refused = [each.rule for each in found if each.rule in _RAISING]
    if refused:
        raise ValueError(str(refused))
    values = believed_of(config, NAMES)
    written = {setting.written for setting in config.settings.values()}
    return {
        name: value for name, value in values.items() if not name.startswith("critic.") or name in written
    }


# Refusals of Hydra and of verl's configuration classes; the other rules are about workers.
_RAISING = {rule.id for rule in load_rules() if rule.effect == "raises" and VERL in rule.dialects}


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or each set name has the configuration's value."""
    if "value" in real and "value" in mine:
        names = {name for name, _ in mine["value"]["map"]}
        real = {"value": {"map": [each for each in real["value"]["map"] if each[0] in names]}}
    return same_values(real, mine)
