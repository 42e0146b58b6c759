# SPDX-License-Identifier: Apache-2.0
"""Asks XTuner: its FSDPConfig, whose model checks itself as it is made. The Python file around it is not run."""

import importlib
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from stand_ins import Release

NAME = "xtuner"
RELEASES = ("1.0.1",)
REPOSITORY = "InternLM/xtuner"
FILENAME = "config.py"
NOT_JUDGED = {"xt-offload-torch"}  # which autograd says in a backward
FIELDS: dict[str, tuple[Any, ...]] = {
    "cpu_offload": (True, False, "true", "off", 1, 0),
    "ep_size": (1, 1, 1, 2, "2", 4),
    "hsdp_sharding_size": (None, 8, 4),
    "recompute_ratio": (0.0, 1.0, 0.5, 1, "0.5"),
    "reshard_after_forward": (True, False),
    "tp_size": (1, 2),
}
ODD: tuple[Any, ...] = ("host", [1], "maybe", None)
JUDGED_TYPES = ("cpu_offload", "ep_size", "recompute_ratio")


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        importlib.import_module("pydantic")
        pydantic = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")
        given = {}
        for name in ("xtuner", "xtuner.v1", "xtuner.v1.config"):
            given[name] = ModuleType(name)  # whose own files load every model
            given[name].__path__ = [str(folder / name.replace(".", "/"))]
        real = (*pydantic, "torch", "numpy", "sympy")
        self._release = Release(folder, own=("xtuner",), real=real, given=given)
        with self._release:
            self._class = importlib.import_module("xtuner.v1.config.fsdp").FSDPConfig

    def ask(self, given: dict[str, Any]) -> None:
        """Make the configuration; raise the release's error."""
        with self._release:
            self._class(**given)


def asked(chance: random.Random, release: str) -> tuple[dict[str, Any]]:
    """Return fields, most of them as people write them."""
    given = {name: chance.choice(values) for name, values in FIELDS.items() if chance.random() < 0.6}
    if chance.random() < 0.15:
        given[chance.choice(JUDGED_TYPES)] = chance.choice(ODD[:3])
    if chance.random() < 0.15:
        given[chance.choice(["offload_params", "cpu_offloading", "pin_memory", "offload_policy"])] = True
    return (given,)


def command(given: dict[str, Any]) -> str:
    """Return the configuration that lint reads."""
    fields = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"from xtuner.v1.config import FSDPConfig\n\nfsdp_cfg = FSDPConfig({fields})\n"


assert torch.bfloat16  # which its fields name
