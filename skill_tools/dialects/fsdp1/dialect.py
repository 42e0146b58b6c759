# SPDX-License-Identifier: Apache-2.0
"""FSDP1 as a dialect: a Python script that wraps its model in FullyShardedDataParallel with CPUOffload."""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.fsdp1 import FSDP1, OFFLOAD, WRAPPER

_IMPORTED = re.compile(r"^\s*(?:from|import) torch\b[^#\n]*\b(?:fsdp|distributed)\b", re.MULTILINE)
_WRAPPED_BY_OTHERS = re.compile(
    r"^\s*(?:from|import) (?:lightning|pytorch_lightning|accelerate)\b", re.MULTILINE
)
_PLENTY = 20


class Fsdp1(Dialect):
    """FSDP1 of torch. A script without CPUOffload offloads nothing and is a plain loop."""

    name = FSDP1
    label = "PyTorch FSDP1"
    looks_for = f"a script that calls {WRAPPER} with {OFFLOAD}"
    python_marks = (WRAPPER,)
    example_file = "train.py"
    form = "in the script"
    language = "python"
    assigns = "="
    takes_new_keys = False
    no_plan = "a script builds its model itself, so no plan can see the model"

    def evidence_in_python(self, text: str) -> Evidence:
        """Take a text that imports torch's FSDP, names the wrapper and calls CPUOffload."""
        named = WRAPPER in text and re.search(rf"\b{OFFLOAD}\(", text)
        if not (named and _IMPORTED.search(text)) or _WRAPPED_BY_OTHERS.search(text):
            return NONE
        from skill_tools.dialects.fsdp1.python_script import wraps

        return Evidence(_PLENTY, proof=f"{WRAPPER}, {OFFLOAD}", yields=True) if wraps(text) else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read one script."""
        from skill_tools.dialects.fsdp1.python_script import compose

        return compose(sources, overrides)


DIALECT = Fsdp1()
