# SPDX-License-Identifier: Apache-2.0
"""Asks VeOmni: `_instantiate_recursive` of its parser, which makes the classes of a YAML; their checks run."""

import importlib
import random
from pathlib import Path
from typing import Any

import yaml
from stand_ins import Release

NAME = "veomni"
RELEASES = ("0.1.10", "0.1.11", "0.1.12")
WHEEL = "veomni"
FILENAME = "train.yaml"
# Settings that are passed over, or only slow.
NOT_JUDGED = {
    "veomni-name-passed-over", "veomni-offload-ddp", "veomni-limit-alone", "veomni-limit-recomputed",
    "veomni-async-alone", "veomni-pageable",
}  # fmt: skip
SINCE_0_1_12 = (
    "enable_async_activation",
    "activation_offload_modules",
    "activation_offload_host_cache_limit_gb",
)


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        self._release = Release(
            folder,
            own=("veomni",),
            real=("yaml", "packaging"),
            mocked=("veomni.utils", "veomni.ops", "veomni.models", "veomni.distributed", "veomni.trainer"),
        )
        with self._release:
            parser = importlib.import_module("veomni.arguments.parser")
            self._class = importlib.import_module("veomni.arguments.arguments_types").VeOmniArguments
            self._make = parser._instantiate_recursive
            devices = importlib.import_module("veomni.utils.import_utils")
            for name in ("is_torch_npu_available", "is_torch_mlu_available", "is_apex_mlu_available"):
                setattr(devices, name, bool)  # a GPU of NVIDIA's

    def ask(self, entries: dict[str, Any]) -> None:
        """Make the arguments; raise the release's error."""
        with self._release:
            self._make(self._class, yaml.safe_load(command(entries)))


def asked(chance: random.Random, release: str) -> tuple[dict[str, Any]]:
    """Return a configuration, most of it as people write it."""
    truths = (True, False)
    accelerator: dict[str, Any] = {}
    if chance.random() < 0.7:
        modes = ("fsdp2", "fsdp2", "fsdp2", "ddp", "fsdp1", "fsdp")
        fields = {
            "fsdp_mode": modes,
            "offload": truths,
            "reshard_after_forward": truths,
            "pin_memory": truths,
        }
        accelerator["fsdp_config"] = _some(chance, fields)
    if chance.random() < 0.8:
        fields = {
            "enable_activation": truths,
            "activation_gpu_limit": (0, 0.5, 2.0),
            "enable_async_activation": truths,
            "activation_offload_modules": ([], ["model.layers.{*}"]),
            "activation_offload_host_cache_limit_gb": (0, 4.0, 8, -1, -0.5),
        }
        accelerator["offload_config"] = _some(chance, fields)
    if chance.random() < 0.1:
        accelerator["offload"] = {"enable_activation": True}
    train: dict[str, Any] = {"accelerator": accelerator}
    if chance.random() < 0.6:
        train["init_device"] = chance.choice(["meta", "meta", "meta", "cuda"])
    if chance.random() < 0.5:
        train["gradient_checkpointing"] = {"enable": chance.choice(truths)}
    return ({"model": {"config_path": "a/b"}, "data": {"train_path": "c"}, "train": train},)


def _some(chance: random.Random, fields: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: chance.choice(values) for name, values in fields.items() if chance.random() < 0.55}


def command(entries: dict[str, Any]) -> str:
    """Return the file that lint reads."""
    return yaml.safe_dump(entries, sort_keys=False)
