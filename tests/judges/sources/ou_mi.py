# SPDX-License-Identifier: Apache-2.0
"""Asks Oumi: `TrainingConfig` on OmegaConf, whose classes check themselves as they are made."""

import functools
import importlib
import random
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed.fsdp
import yaml
from stand_ins import Release

NAME = "oumi"
RELEASES = ("0.7", "0.8", "0.9")
WHEEL = "oumi"
FILENAME = "train.yaml"
# Settings that nothing turns on, or only DeepSpeed's engine refuses.
NOT_JUDGED = {"oumi-deepspeed-off", "oumi-own-trainer", "oumi-file-counts", "oumi-nvme-path", "oumi-fsdp-off"}
TRAINERS = ("TRL_SFT", "TRL_SFT", "TRL_DPO", "HF", "OUMI", "TRL_GRPO", "TrainerType.HF", "trl_sft")
STAGES = ("ZERO_0", "ZERO_1", "ZERO_2", "ZERO_3", "ZERO_3", "ZeRORuntimeStage.ZERO_3")
_OF_NO_TYPE = ("forward_prefetch", "overlap_comm", "train_batch_size")  # no key, or one of any type
TRUTHS = (True, True, False, "yes", "off", 1)


class _TaskType(str, Enum):  # noqa: UP042 - as peft has it
    CAUSAL_LM = "CAUSAL_LM"


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        kept = importlib.import_module("omegaconf").OmegaConf  # whose merge copies its first argument
        types = ModuleType("peft.utils.peft_types")
        types.TaskType = _TaskType  # type: ignore[attr-defined]
        given = {"peft": ModuleType("peft"), "peft.utils": ModuleType("peft.utils"), types.__name__: types}
        given["peft"].LoraConfig = object  # type: ignore[attr-defined]
        self._release = Release(
            folder,
            own=("oumi", "peft"),
            real=("torch", "omegaconf", "yaml", "antlr4", "numpy", "sympy", "packaging"),
            mocked=("oumi.core.types",),
            given=given,
        )
        with self._release:
            self._class = importlib.import_module("oumi.core.configs.training_config").TrainingConfig
            base = importlib.import_module("oumi.core.configs.base_config")
            base.OmegaConf = type(
                "Kept", (kept,), {"structured": staticmethod(functools.cache(kept.structured))}
            )

    def ask(self, entries: dict[str, Any]) -> None:
        """Build the configuration; raise the release's error."""
        with self._release:
            self._class.from_str(command(entries))


def asked(chance: random.Random, release: str) -> tuple[dict[str, Any]]:
    """Return a configuration, most of it as people write it."""
    odd = chance.random() < 0.15
    training = {"trainer_type": chance.choice(TRAINERS if odd else TRAINERS[:6])}
    entries: dict[str, Any] = {"model": {"model_name": "a/b"}, "training": training}
    if chance.random() < 0.6:
        entries["fsdp"] = _section(
            chance, odd, {"enable_fsdp": TRUTHS, "cpu_offload": TRUTHS, "forward_prefetch": TRUTHS}
        )
    if chance.random() < 0.8:
        stages = (*STAGES, 3, "3", 2, "zero_3", None) if odd else STAGES
        section = _section(
            chance,
            odd,
            {
                "enable_deepspeed": TRUTHS,
                "zero_stage": stages,
                "train_batch_size": ("auto", "auto", 8, "8"),
                "deepspeed_config_path": ("ds.json", None),
                "overlap_comm": TRUTHS,
            },
        )
        for name in ("offload_optimizer", "offload_param"):
            if chance.random() < 0.45:
                section[name] = _offload(chance, odd)
        entries["deepspeed"] = section
    return (entries,)


def _section(chance: random.Random, odd: bool, fields: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    section = {name: chance.choice(values) for name, values in fields.items() if chance.random() < 0.6}
    if odd and chance.random() < 0.3:
        section[chance.choice(["offload", "offload_params", "cpu_ofload", "nvme_path"])] = True
    if odd and chance.random() < 0.3:
        judged = [name for name in fields if name not in _OF_NO_TYPE]
        section[chance.choice(judged)] = chance.choice([None, "maybe", [1], 2.5])
    return section


def _offload(chance: random.Random, odd: bool) -> Any:
    if chance.random() < 0.15:
        return None
    if odd and chance.random() < 0.2:
        return chance.choice(["cpu", True, False, 1, [1]])
    section: dict[str, Any] = {}
    if chance.random() < 0.7:
        section["device"] = chance.choice(["CPU", "NVME", "cpu", None] if odd else ["CPU", "CPU", "NVME"])
    if chance.random() < 0.5:
        section["pin_memory"] = chance.choice(["maybe", None, True] if odd else TRUTHS)
    if odd and chance.random() < 0.3:
        section["nvme_path"] = "/nvme"
    return section


def command(entries: dict[str, Any]) -> str:
    """Return the file that lint reads."""
    return yaml.safe_dump(entries, sort_keys=False)


assert torch.distributed.fsdp.FullyShardedDataParallel  # which its fields name
