# SPDX-License-Identifier: Apache-2.0
"""Accelerate as a dialect: its configuration file, alone or named by `accelerate launch`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.keys import Key
from skill_tools.configs.source import Kind, Source
from skill_tools.dialects.accelerate import (
    ACCELERATE,
    ACCELERATOR,
    DEEPSPEED_PLUGIN,
    EMBEDDED,
    FSDP_PLUGIN,
    OUR_MODULE,
)
from skill_tools.dialects.base import NONE, Dialect, Evidence, Question

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

_OWN = frozenset(
    {
        *("compute_environment", "fsdp_config", "deepspeed_config", "megatron_lm_config"),
        *("num_processes", "num_machines", "machine_rank", "mixed_precision"),
    }
)


class Accelerate(Dialect):
    """Accelerate. A key at the top that it does not know is refused, one of a section is dropped silently."""

    name = ACCELERATE
    label = "Accelerate"
    runs_hugging_face = True
    embeds = EMBEDDED
    looks_for = (
        "`distributed_type` with `compute_environment`, `num_processes` or a section, `accelerate launch`, or an "
        "Accelerator with a plugin"
    )
    marks = ("distributed_type",)
    shell_marks = python_marks = ("accelerate",)
    scripts = (Kind.PYTHON, Kind.SHELL)
    adapter = (
        'cpu_offloading.integrations.accelerate.offload(accelerator, model, optimizer, plan="plan.json")'
    )

    def evidence_in_python(self, text: str) -> Evidence:
        """Take a plugin that a script makes for its Accelerator, or our line for it."""
        if not re.search(r"^\s*(?:from|import) accelerate\b", text, re.MULTILINE):
            return NONE
        found = re.search(rf"\b(?:{FSDP_PLUGIN}|{DEEPSPEED_PLUGIN})(?=\()|{OUR_MODULE}", text)
        if not (found and re.search(rf"\b{ACCELERATOR}\(", text)):
            return NONE
        from skill_tools.configs.python.syntax import calls_one_of

        if not calls_one_of(text, (ACCELERATOR,)):
            return NONE
        return Evidence(1, proof=f"{ACCELERATOR}, {found[0]}", yields=True)

    def recipes(self, source: Source) -> Sequence[Source]:
        """Return each Accelerator that a Python script gives a plugin, unless one is asked for."""
        if source.kind is not Kind.PYTHON or source.recipe is not None:
            return (source,)
        from skill_tools.dialects.accelerate.python_script import recipes

        names = list(recipes(source))
        return [source.for_recipe(name) for name in names] if len(names) > 1 else (source,)

    def evidence_in_text(self, text: str) -> Evidence:
        """Take the launcher's command, unless the script that it runs is somebody's."""
        launch = re.search(r"\baccelerate[ -]launch\b|\baccelerate\.commands\.launch\b", text)
        return Evidence(1, proof=launch[0], yields=True) if launch else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a way to shard together with its place, on how many processes it runs, or with a section for it."""
        beside = sorted(entries.keys() & _OWN)
        if "distributed_type" not in entries or not beside:
            return NONE
        return Evidence(1, certain=True, proof=f"distributed_type, {beside[0]}")

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files and scripts in order, then the launcher's options in `overrides`."""
        from skill_tools.dialects.accelerate.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """A field of a section is dropped; at the top it ends the launch, as an unknown option does."""
        if unknown.written.startswith("-"):
            return "acc-launch-option"
        if unknown.written.startswith((FSDP_PLUGIN, DEEPSPEED_PLUGIN)):
            return "acc-plugin-argument"
        return "acc-sub-key" if "." in unknown.written else "acc-top-key"

    def rule_for_type(self, key: Key | None) -> str:
        """The plugins cannot read values that the launcher passes on as text."""
        return "acc-value"

    def size_override(self, *keys: str) -> str:
        """Return the overrides as `compose` takes them."""
        return f"--overrides {' '.join(f'{key}=N' for key in keys)}"

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run of the script under this file."""
        from skill_tools.dialects.accelerate.run import build

        return build(config, shape, gpus=gpus)

    def current(self, config: Config, run: "TrainingRun") -> "Mode":
        """Return the mode that the file asks for as it stands."""
        from skill_tools.dialects.accelerate.run import current

        return current(config, run)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield every way to keep activations and weights that the file can choose."""
        from skill_tools.dialects.accelerate.candidates import candidates

        return candidates(config, run)

    def question(self, config: Config) -> Question | None:
        """Return the unreadable condition under which a script adds adapters."""
        from skill_tools.dialects.python_adapters import question

        return question(config, "lora_rank")

    def in_script(self, spelled: Mapping[str, object], config: Config | None, script: Kind | None) -> str:
        """Return options of the launcher for a command, and a plugin's arguments for a Python script."""
        if script is Kind.PYTHON:
            from skill_tools.dialects.accelerate.python_script import as_plugins

            return as_plugins(spelled)
        from skill_tools.dialects.patch import as_flags

        return as_flags({name.rpartition(".")[2]: value for name, value in spelled.items()})

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the changes beside offloading in its file, or in the script."""
        from skill_tools.dialects.accelerate.levers import found

        return found(config, run)


DIALECT = Accelerate()


def is_one(source: Source) -> bool:
    """Return whether a YAML or JSON is the launcher's own, for a dialect that is given it beside its script."""
    return source.kind in (Kind.YAML, Kind.JSON) and bool(DIALECT.evidence(source).votes)
