# SPDX-License-Identifier: Apache-2.0
"""SkyRL as a dialect: the command of one of its programs, with words `a.b=c` over its dataclasses."""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.skyrl import SKYRL

_PROGRAM = r"(?m)^[^#\n]*\b(skyrl(?:\.train|_train)\.(?:entrypoints\.)?main_\w+)"
_SECTIONS = (r"\btrainer\.policy\.\w", r"\btrainer\.placement\.\w")


class SkyRL(Dialect):
    """SkyRL. A field that no word sets has the default of its dataclass."""

    name = SKYRL
    label = "SkyRL"
    no_plan = "SkyRL shares each GPU between training and vLLM, whose memory no plan counts"
    looks_for = "a program of skyrl.train, or trainer.policy beside trainer.placement"
    shell_marks = ("skyrl", "trainer.placement.")
    example_file = "run.sh"
    form = "as overrides"
    language = "text"
    assigns = "="
    takes_new_keys = False

    def evidence_in_text(self, text: str) -> Evidence:
        """Take one of its programs, or words for two sections that no other framework has together."""
        if "skyrl" in text and (found := re.search(_PROGRAM, text)):
            return Evidence(1, certain=True, proof=found[1])
        if "trainer.placement." in text and all(re.search(section, text) for section in _SECTIONS):
            return Evidence(1, certain=True, proof="trainer.policy, trainer.placement")
        return NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read the command, then words on top."""
        from skill_tools.dialects.skyrl.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """The dataclasses are built from the words, and have no room for others."""
        return "sky-unknown-key"


DIALECT = SkyRL()
