# SPDX-License-Identifier: Apache-2.0
"""FSDP2 as a dialect: a Python script that calls `fully_shard` with CPUOffloadPolicy."""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.fsdp2 import FSDP2, POLICY, SHARDS

_IMPORTED = re.compile(
    rf"^\s*from torch\.distributed\S*fsdp\S* import [^#]*\b(?:{SHARDS}|{POLICY})\b", re.MULTILINE
)


class Fsdp2(Dialect):
    """FSDP2 of torch. A script without the policy offloads nothing and is a plain loop."""

    name = FSDP2
    label = "PyTorch FSDP2"
    looks_for = "a script that calls fully_shard with CPUOffloadPolicy"
    python_marks = (POLICY,)
    example_file = "train.py"
    form = "in the script"
    language = "python"
    assigns = "="
    takes_new_keys = False
    no_plan = "a script builds its model itself, so no plan can see the model"

    def evidence_in_python(self, text: str) -> Evidence:
        """Take both calls in a script that imports one of them from torch."""
        named = all(f"{name}(" in text and re.search(rf"\b{name}\(", text) for name in (SHARDS, POLICY))
        if not (named and _IMPORTED.search(text)):
            return NONE
        from skill_tools.configs.python.syntax import calls_one_of

        if not all(calls_one_of(text, (name,)) for name in (SHARDS, POLICY)):
            return NONE
        return Evidence(1, proof=f"{SHARDS}, {POLICY}", yields=True)

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read one script."""
        from skill_tools.dialects.fsdp2.python_script import compose

        return compose(sources, overrides)


DIALECT = Fsdp2()
