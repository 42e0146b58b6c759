# SPDX-License-Identifier: Apache-2.0
"""AReaL as a dialect: the YAML behind --config, and the command with its overrides."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.areal import AREAL
from skill_tools.dialects.base import NONE, Dialect, Evidence

if TYPE_CHECKING:
    from skill_tools.configs.keys import Key
    from skill_tools.configs.yaml_lines import Node

_LAUNCHER = r"(?m)^[^#\n]*\b(areal\.(?:infra\.)?launcher\.\w+)"
_NAMES = ("experiment_name", "trial_name")
_OWN = frozenset({"rollout", "gconfig", "saver", "stats_logger", "recover", "train_dataset"})
_ENOUGH = 2


class AReaL(Dialect):
    """AReaL. A field that the file does not set has the default of its dataclass."""

    name = AREAL
    label = "AReaL"
    no_plan = (
        "AReaL packs rollouts into steps of no fixed size, so that no plan can count a trainer's activations"
    )
    looks_for = "experiment_name and trial_name beside actor and two of rollout, saver, recover and the like"
    marks = ("trial_name",)
    shell_marks = ("areal.",)
    takes_new_keys = False

    def evidence_in_text(self, text: str) -> Evidence:
        """Take one of its launchers."""
        found = re.search(_LAUNCHER, text) if "areal." in text else None
        return Evidence(1, certain=True, proof=found[1]) if found else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take an experiment and a trial beside the actor, with two sections that only this framework has together."""
        own = sorted(_OWN & entries.keys())
        proven = "actor" in entries and len(own) >= _ENOUGH and all(name in entries for name in _NAMES)
        return Evidence(1, certain=True, proof=", ".join([*_NAMES, "actor", *own[:2]])) if proven else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read the file, then overrides on top."""
        from skill_tools.dialects.areal.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """The dataclasses have no room for a name that they do not declare."""
        return "areal-unknown-key"

    def rule_for_type(self, key: "Key | None") -> str:
        """OmegaConf converts each value to the type of its field, or refuses it."""
        return "areal-wrong-type"


DIALECT = AReaL()
