# SPDX-License-Identifier: Apache-2.0
"""torchtune as a dialect: a YAML of components and switches, which a recipe reads with `cfg.get(name, default)`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Kind, Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.torchtune import TORCHTUNE

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

_COMPONENT = "_component_"
_COMMAND = r"(?m)^[^#\n]*\b(tune run)\b"


class TorchTune(Dialect):
    """torchtune. An unset key has the recipe's default; an unread key is ignored."""

    name = TORCHTUNE
    label = "torchtune"
    scripts = (Kind.SHELL,)
    looks_for = "a section with `_component_: torchtune.…`, or the command `tune run`"
    marks = ("_component_",)
    shell_marks = ("tune run",)
    adapter = (
        "optimizer: {_component_: cpu_offloading.HybridDeviceOptimizer, lr: LR, split: [R, S, C]} in the YAML, where "
        "R, S and C are the shares in the plan's execute.optimizer; the rest stays torchtune's own"
    )

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for `tune run` with a configuration."""
        import re

        command = re.search(_COMMAND, text)
        return Evidence(1, certain=True, proof="tune run") if command and "--config" in text else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Look for a component of torchtune in any section."""
        pending = list(entries.values())
        while pending:
            value = pending.pop().value
            if isinstance(value, dict):
                component = value.get(_COMPONENT)
                if component is not None and str(component.value).startswith("torchtune."):
                    return Evidence(1, certain=True, proof=f"{_COMPONENT}: {component.value}")
                pending += value.values()
        return NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read sources in order, then overrides."""
        from skill_tools.dialects.torchtune.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """A name that no recipe reads changes nothing."""
        return "tt-key-typo"

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run that the YAML describes."""
        from skill_tools.dialects.torchtune.run import build

        return build(config, shape, gpus=gpus)

    def current(self, config: Config, run: "TrainingRun") -> "Mode":
        """Return the mode that the YAML asks for as it stands."""
        from skill_tools.dialects.torchtune.run import current

        return current(config)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield every way to keep activations, with and without offloading weights or states."""
        from skill_tools.dialects.torchtune.candidates import candidates

        return candidates(config, run)

    def in_script(self, spelled: Mapping[str, object], config: Config | None, script: Kind | None) -> str:
        """Return words of a command."""
        from skill_tools.dialects.patch import as_assignments

        return as_assignments(spelled)

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the changes beside offloading in its YAML."""
        from skill_tools.dialects.torchtune.levers import found

        return found(config, run)


DIALECT = TorchTune()
