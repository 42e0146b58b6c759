# SPDX-License-Identifier: Apache-2.0
"""Asks MaxText: the lookup of names in `pyconfig` and the models of pydantic, and post-training's `validate_config`."""

import importlib
import random
from pathlib import Path
from typing import Any

import yaml
from source_parts import Sources
from stand_ins import Release

NAME = "maxtext"
RELEASES = ("0.2.5",)
WHEEL = "maxtext"
PYTHON = "3.12"
# Values that are refused as the state is made, needs a mixture of experts, or is passed over.
NOT_JUDGED = {"mt-scan-axis", "mt-dropless", "mt-tensors-unread"}
MODULES = {
    "pre_train": "pre_train.train",
    "sft": "post_train.sft.train_sft",
    "dpo": "post_train.dpo.train_dpo",
    "rl": "post_train.rl.train_rl",
}
TENSORS = (
    "mlpwi",
    "mlpwi_0",
    "mlpwo",
    "query_proj",
    "out_proj",
    "context",
    "decoder_layer_input",
    "moe_x_sorted",
)
UTILITIES = ("gcs_utils", "max_utils", "elastic_utils", "max_logging", "accelerator_to_spec_map")
NEEDED = {"run_name": "a", "model_name": "llama3.1-8b", "max_target_length": 2048}


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        for library in ("pydantic", "omegaconf", "jinja2"):
            importlib.import_module(library)
        pydantic = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")
        self._release = Release(
            folder,
            own=("maxtext",),
            real=(*pydantic, "yaml", "omegaconf", "antlr4", "jinja2", "markupsafe", "numpy"),
            mocked=tuple(f"maxtext.utils.{name}" for name in UTILITIES),
        )
        sources = Sources(folder)
        with self._release:
            types = importlib.import_module("maxtext.configs.types")
            self._prepare = importlib.import_module("maxtext.configs.pyconfig")._prepare_for_pydantic
            self._classes = dict.fromkeys(MODULES, types.MaxTextConfig) | {"rl": types.RLConfig}
        self._checks = {
            kind: sources.take(f"maxtext.trainers.{MODULES[kind]}", "validate_config")
            for kind in ("sft", "dpo")
        }
        self._base = yaml.safe_load((folder / "maxtext/configs/base.yml").read_text(encoding="utf-8"))
        rl = folder / "maxtext/configs/post_train/rl.yml"
        self._rl = yaml.safe_load(rl.read_text(encoding="utf-8")) if rl.is_file() else {}

    def ask(self, kind: str, given: dict[str, Any]) -> None:
        """Make the configuration and check it; raise the release's error."""
        with self._release:
            base = {**self._base, **(self._rl if kind == "rl" else {}), **NEEDED}
            base.pop("base_config", None)
            kind_of = self._classes[kind]
            if kind == "rl":
                base = {name: value for name, value in base.items() if name in kind_of.model_fields}
            made = kind_of(**self._prepare({**base, **given}, kind_of))
            if kind in self._checks:
                self._checks[kind](made)


def asked(chance: random.Random, release: str) -> tuple[str, dict[str, Any]]:
    """Return a program and the settings of its command."""
    given: dict[str, Any] = {}
    for name in ("optimizer_memory_host_offload", "parameter_memory_host_offload"):
        if chance.random() < 0.5:
            given[name] = chance.choice(["true", "false", "True", "1"] * 5 + ["host", "pinned", "2"])
    if chance.random() < 0.5:
        given["remat_policy"] = chance.choice(["full", "custom", "minimal", "qkv_proj_offloaded"])
    for name in TENSORS:
        if chance.random() < 0.2:
            given[name] = chance.choice(["remat", "device", "offload"] * 5 + ["offloaded", "host"])
    if chance.random() < 0.2:
        given["param_scan_axis"] = chance.choice(["0", "1"])
    if chance.random() < 0.07:
        given[
            chance.choice(["optimizer_host_offload", "offload_optimizer", "remat_polcy", "param_offload"])
        ] = "true"
    return chance.choice([*MODULES]), given


def command(kind: str, given: dict[str, Any]) -> str:
    """Return the command that lint reads."""
    words = " ".join(f"{name}={value}" for name, value in given.items())
    return f"python3 -m maxtext.trainers.{MODULES[kind]} maxtext/configs/base.yml run_name=a {words}\n"
