# SPDX-License-Identifier: Apache-2.0
"""verl as a dialect: Hydra overrides on a command line, over the configurations that it ships."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.verl import VERL

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node

# Compiled when there is a script. A fork has its own program, verl.trainer.main, with another configuration.
_PROGRAM = r"\bverl\.(?:trainer\.(?:main_(?!eval|generation)\w+|\w*sft_trainer\w*)|experimental\.\w+)"
_OVERRIDE = r"\bactor_rollout_ref\.\w"
_PROOF = Evidence(1, certain=True, proof="actor_rollout_ref, or a program of verl")


class Verl(Dialect):
    """verl. A key that no override sets has the value of verl's own configuration files."""

    name = VERL
    label = "verl"
    no_plan = "verl shares each GPU between training and a rollout engine whose memory no plan counts"
    looks_for = "verl.trainer programs, actor_rollout_ref"
    marks = ("actor_rollout_ref",)
    shell_marks = ("verl.", "actor_rollout_ref.")
    example_file = "run.sh"
    form = "as overrides"
    language = "text"
    assigns = "="
    takes_new_keys = False

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for its programs, or an override of the section that no other framework has."""
        is_program = "verl." in text and re.search(_PROGRAM, text)
        is_override = "actor_rollout_ref." in text and re.search(_OVERRIDE, text)
        return _PROOF if is_program or is_override else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take `actor_rollout_ref` beside `algorithm` or `trainer`."""
        has_role = "actor_rollout_ref" in entries
        return _PROOF if has_role and ("algorithm" in entries or "trainer" in entries) else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files, then the overrides of the command line."""
        from skill_tools.dialects.verl.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """A key of an empty mapping lacks its plus; any other is in no release."""
        from skill_tools.dialects.verl.compose import in_open_mapping

        return "verl-mcore-hdo" if in_open_mapping(unknown.written) else "verl-unknown-key"


DIALECT = Verl()
