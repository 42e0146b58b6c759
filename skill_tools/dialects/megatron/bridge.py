"""Megatron Bridge as a dialect: recipes, YAML overrides, saved runs, dotted overrides, launch programs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Setting, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import Evidence
from skill_tools.dialects.megatron import BRIDGE
from skill_tools.dialects.megatron.core import MegatronCore

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.patch import Patch

_SECTIONS = frozenset(
    {
        "checkpoint", "comm_overlap", "dataset", "ddp", "dist", "env_vars", "logger", "mixed_precision", "model",
        "optimizer", "peft", "profiling", "rerun_state_machine", "rng", "scheduler", "tokenizer", "train",
        "validation", "_target_",
    }
)  # fmt: skip
_SCALARS = ("_target_", "mixed_precision")  # which need not hold a section
_DOTTED = r"(?<![\w.-])[+~]{0,2}([a-z_]+)\.[\w.]+="  # compiled when there is a script
_DISTRIBUTED_OPTIMIZER = ("use_distributed_optimizer", "ddp.use_distributed_optimizer")
_V1_OFFLOAD = "env.NVTE_CPU_OFFLOAD_V1"


class MegatronBridge(MegatronCore):
    """Megatron Bridge. An override file is a part of a configuration; the recipe that fills the rest is unseen."""

    name = BRIDGE
    label = "Megatron Bridge"
    form = "as overrides"

    def evidence_in_python(self, text: str) -> Evidence:
        """Any Python is a recipe until it turns out to set nothing: no other dialect has Python."""
        return Evidence(1)

    def evidence_in_text(self, text: str) -> Evidence:
        """Count the sections of its configuration that dotted overrides set."""
        return Evidence(20 * len(set(re.findall(_DOTTED, text)) & _SECTIONS))

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Count the sections of its configuration."""
        sections = (
            name in _SECTIONS and (isinstance(node.value, dict) or name in _SCALARS)
            for name, node in entries.items()
        )
        return Evidence(3 * sum(sections))

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Merge a recipe, files, overrides and the environment."""
        from skill_tools.dialects.megatron.bridge_compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """An unknown key in a file or after `+` is dropped silently, as an override it ends the run."""
        suffix = PurePath(unknown.place.file).suffix
        if suffix == ".py":
            return "unknown-key"
        skipped = suffix in {".yaml", ".yml"} or unknown.written.startswith("+")
        return "br-dotted-plus-unknown" if skipped else "br-dotted-unknown-key"

    def replaced(self, config: Config) -> Iterator[tuple[str, Setting, Setting]]:
        """Yield what `mixed_precision`, a distributed optimizer in one section or an exported variable replaces.

        A value that a later file or override of the same key replaced is no such case.
        """
        for loser in config.overridden:
            winner = config.settings.get(loser.key)
            if winner is not None and winner.value != loser.value:
                rule = _rule_for_replaced(loser, winner)
                if rule:
                    yield rule, loser, winner

    def patch(
        self, settings: Mapping[str, object], config: Config | None = None, *, dead: Sequence[str] = ()
    ) -> "Patch":
        """Return dotted overrides beside the YAML that says the same."""
        patch = super().patch(settings, config)
        own = {key: value for key, value in settings.items() if not key.startswith("env.")}
        overrides = (f"{key}={_hydra(value)}" for key, value in self.spelled(own, config).items())
        return patch._replace(overrides=" ".join(overrides))


def _rule_for_replaced(loser: Setting, winner: Setting) -> str:
    if loser.key == _V1_OFFLOAD:
        return "br-env-vars-setdefault" if str(loser.value) == "1" else ""
    if winner.written == loser.written:
        return ""
    if loser.key in _DISTRIBUTED_OPTIMIZER:
        return "oc-distopt-autosync"
    return "oc-mixed-precision-overwrite" if winner.written.startswith("mixed_precision") else ""


def _hydra(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)


DIALECT = MegatronBridge()
