# SPDX-License-Identifier: Apache-2.0
"""ROLL as a dialect: the YAML of a pipeline, which Hydra composes and dacite makes dataclasses of.

Each role has a strategy with a free section of settings; each strategy reads its own. A name that no class has
is passed over.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Place, UnknownKey
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence

if TYPE_CHECKING:
    from skill_tools.configs.keys import Key
    from skill_tools.configs.yaml_lines import Node

ROLL = "roll"
_KINDS = {
    "actor_infer": "rl",
    "student_infer": "rl",
    "sft_train": "sft",
    "student": "distill",
    "actor_train": "dpo",
}
_TRAINED = ("actor_train", "critic", "student_train", "sft_train", "student")


class Roll(Dialect):
    """ROLL. Its pipelines move whole states between the phases of a step; its strategies have offloads of their own."""

    name = ROLL
    label = "ROLL"
    looks_for = "a role such as actor_train or sft_train with strategy_args"
    marks = ("strategy_args",)
    no_plan = "ROLL trains on rollouts of no fixed size, and its strategies choose the states on a GPU between phases"

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a trained role with a strategy, in no other framework's files."""
        for role in _TRAINED:
            section = entries[role].value if role in entries else None
            if isinstance(section, dict) and "strategy_args" in section:
                return Evidence(1, certain=True, proof=f"{role}.strategy_args")
        return NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files in order, then `NAME=VALUE` on top."""
        from skill_tools.configs.sections import read_tree

        draft = Draft(ROLL, converts_text=False)
        entries = read_tree(
            draft,
            sources,
            overrides,
            expected="the YAML of a pipeline",
            omegaconf=True,
            reports=_is_an_offload,
        )
        top = entries.top()
        kind = next((kind for section, kind in _KINDS.items() if section in top), None)
        if kind is not None and draft.sources:
            draft.set_key(
                "roll.kind", kind, "the sections of the file", Place(next(iter(draft.sources)), 1, 1)
            )
        return draft.finish()

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """FSDP2 passes over it, and Megatron's arguments have no room for it."""
        return "roll-unknown-offload"

    def rule_for_type(self, key: "Key | None") -> str:
        """Dacite compares the value with the type of the field."""
        return "roll-wrong-type"


def _is_an_offload(path: str) -> bool:
    role, _, option = path.partition(".strategy_args.strategy_config.")
    return role in _TRAINED and "offload" in option


DIALECT = Roll()
