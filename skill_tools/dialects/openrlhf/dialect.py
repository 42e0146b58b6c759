# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF as a dialect: the command of one of its programs, whose options argparse takes."""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.openrlhf import OPENRLHF

_PROGRAM = r"\bopenrlhf[./]cli[./]train_(?:ppo_ray|sft|dpo|rm)\b"


class OpenRlhf(Dialect):
    """OpenRLHF. Its options become DeepSpeed's configuration inside the program, which no file shows."""

    name = OPENRLHF
    label = "OpenRLHF"
    looks_for = "one of the programs openrlhf.cli.train_ppo_ray, train_sft, train_dpo and train_rm"
    shell_marks = ("openrlhf",)
    example_file = "run.sh"
    form = "as options"
    language = "text"
    assigns = " "
    takes_new_keys = False
    no_plan = (
        "OpenRLHF shares a GPU among trained models, frozen ones and vLLM, which no plan counts together"
    )

    def evidence_in_text(self, text: str) -> Evidence:
        """Take one of its programs, as a module or by its path."""
        found = re.search(rf"(?m)^[^#\n]*({_PROGRAM})", text) if "openrlhf" in text else None
        return Evidence(1, certain=True, proof=found[1]) if found else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read the command, then options on top."""
        from skill_tools.dialects.commands import compose

        return compose(OPENRLHF, sources, overrides, programs=_PROGRAM)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """argparse ends the run."""
        return "orlhf-unknown-option"


DIALECT = OpenRlhf()
