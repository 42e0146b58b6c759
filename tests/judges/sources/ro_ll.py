# SPDX-License-Identifier: Apache-2.0
"""Asks ROLL: dacite's `from_dict` with the class of a pipeline, whose checks run as they are.

Hydra is not asked: it only merges the file with the files named in it.
"""

import importlib
import random
from pathlib import Path
from typing import Any

import yaml
from stand_ins import Release

NAME = "roll"
RELEASES = ("0.2.1", "0.3.0")
REPOSITORY = "alibaba/ROLL"
FILENAME = "config.yaml"
# Settings that are passed over, or judged as the strategy begins.
NOT_JUDGED = {
    "roll-unknown-offload", "roll-optimizer-offload", "roll-optimizer-fsdp2", "roll-policy-megatron",
    "roll-offload-nccl", "roll-states-unread", "roll-step-unread", "roll-step-fsdp2",
}  # fmt: skip
CLASSES = {
    "rl": ("rlvr.rlvr_config", "RLVRConfig"),
    "dpo": ("dpo.dpo_config", "DPOConfig"),
    "sft": ("sft.sft_config", "SFTConfig"),
}
STRATEGIES = (
    "megatron_train",
    "megatron_train",
    "fsdp2_train",
    "fsdp2_train",
    "deepspeed_train",
    "fsdp_train",
    "megatron",
)


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        self._from_dict = importlib.import_module("dacite").from_dict
        self._release = Release(
            folder,
            own=("roll",),
            real=("dacite", "yaml", "omegaconf", "antlr4"),
            mocked=(
                "roll.platforms",
                "roll.utils.logging",
                "roll.pipeline.rlvr.rlvr_pipeline",
            ),
        )
        with self._release:
            platform = importlib.import_module("roll.platforms").current_platform
            platform.device_count.return_value = 8
            self._classes = {
                kind: getattr(importlib.import_module(f"roll.pipeline.{module}"), name)
                for kind, (module, name) in CLASSES.items()
            }

    def ask(self, kind: str, entries: dict[str, Any]) -> None:
        """Make the dataclasses; raise the release's error."""
        with self._release:
            self._from_dict(data_class=self._classes[kind], data=yaml.safe_load(command(kind, entries)))


def asked(chance: random.Random, release: str) -> tuple[str, dict[str, Any]]:
    """Return a kind of run with a configuration, most of it as people write it."""
    kind = chance.choice([*CLASSES])
    entries: dict[str, Any] = {"sequence_length": 4096, "prompt_length": 2048, "rollout_batch_size": 64}
    for name in ("is_offload_states", "is_offload_optimizer_states_in_train_step"):
        if chance.random() < 0.5:
            entries[name] = chance.choice([True, False] * 8 + ["yes", "true", None, 2.5, []])
    trained = entries["sft_train" if kind == "sft" else "actor_train"] = _role(chance)
    if chance.random() < 0.4:
        trained["offload_nccl"] = chance.choice([True, False, True, "no", None])
    if kind == "rl":
        entries["actor_infer"] = {
            "strategy_args": {"strategy_name": "vllm", "strategy_config": None},
            "generating_args": {},
        }
        entries["rewards"] = {"math": {"tag_included": ["a"]}}
        if chance.random() < 0.4:
            entries["critic"] = _role(chance)
    if kind == "dpo" or (kind == "rl" and chance.random() < 0.5):
        name = chance.choice(
            ["megatron_infer", "fsdp2_infer", "hf_infer", "deepspeed_infer", "megatron_infers"]
        )
        entries["reference"] = {"strategy_args": {"strategy_name": name}}
    return kind, entries


def _role(chance: random.Random) -> dict[str, Any]:
    section: dict[str, Any] = {
        "training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    }
    section["device_mapping"] = "list(range(0,8))"
    strategy: dict[str, Any] = {}
    if chance.random() < 0.9:
        strategy["strategy_name"] = chance.choice(STRATEGIES if chance.random() < 0.5 else STRATEGIES[:4])
    fields = {
        "optimizer_cpu_offload": (True, False),
        "optimizer_offload_fraction": (0.0, 0.5, 1.0),
        "offload_policy": (True, False),
        "cpu_offload": (True,),
    }
    if chance.random() < 0.8:
        given = {name: chance.choice(values) for name, values in fields.items() if chance.random() < 0.3}
        strategy["strategy_config"] = given
    section["strategy_args"] = strategy
    return section


def command(kind: str, entries: dict[str, Any]) -> str:
    """Return the file that lint reads."""
    return yaml.safe_dump(entries, sort_keys=False)
