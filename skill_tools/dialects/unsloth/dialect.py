# SPDX-License-Identifier: Apache-2.0
"""Unsloth as a dialect: a Python script that loads by one of its classes, and the same calls beside a Trainer's."""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.unsloth import EMBEDDED, LOAD, UNSLOTH

_IMPORTED = re.compile(r"^\s*(?:from|import) unsloth\b", re.MULTILINE)
_LOADS = re.compile(rf"\b(Fast\w*\.{LOAD})\(")


class Unsloth(Dialect):
    """Unsloth. A script with a Trainer's arguments is the Trainer's, which embeds these calls."""

    name = UNSLOTH
    label = "Unsloth"
    embeds = EMBEDDED
    looks_for = "a script that imports unsloth and calls FastLanguageModel.from_pretrained"
    python_marks = ("unsloth",)
    example_file = "train.py"
    form = "in the script"
    language = "python"
    assigns = "="
    takes_new_keys = False
    no_plan = "this script does not show its trainer's arguments"

    def evidence_in_python(self, text: str) -> Evidence:
        """Take an import of unsloth with a load by one of its classes."""
        found = _LOADS.search(text) if _IMPORTED.search(text) else None
        return Evidence(1, proof=found[1], yields=True) if found else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read one script."""
        from skill_tools.dialects.unsloth.python_script import compose

        return compose(sources, overrides)


DIALECT = Unsloth()
