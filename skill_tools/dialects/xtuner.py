# SPDX-License-Identifier: Apache-2.0
"""XTuner v1 as a dialect: the Python configuration that its trainer loads; only the one FSDPConfig is read."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source, only_script
from skill_tools.dialects.base import NONE, Dialect, Evidence

if TYPE_CHECKING:
    from skill_tools.configs.keys import Key

XTUNER = "xtuner"
_CLASS = "FSDPConfig"
_IMPORTED = re.compile(rf"(?m)^\s*from xtuner\.v1\.config(?:\.fsdp)? import [^#]*?\b{_CLASS}\b")


class XTuner(Dialect):
    """XTuner v1. FSDP2's CPUOffloadPolicy is one field; activations leave by an environment variable."""

    name = XTUNER
    label = "XTuner"
    looks_for = f"a Python file that imports {_CLASS} from xtuner.v1.config"
    python_marks = ("xtuner.v1",)
    example_file = "config.py"
    form = "in the configuration"
    language = "python"
    assigns = "="
    takes_new_keys = False
    no_plan = "XTuner's GPU memory follows from a model that its Python file computes"

    def evidence_in_python(self, text: str) -> Evidence:
        """Take an import of its class that is also called."""
        proven = f"{_CLASS}(" in text and _IMPORTED.search(text)
        return Evidence(1, certain=True, proof=f"{_CLASS} of xtuner.v1") if proven else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read one file; of several objects nobody knows which one trains."""
        from skill_tools.configs.python.constructions import constructions

        source = only_script(sources, overrides, "XTuner", "behind --config", one="file")
        draft = Draft(XTUNER)
        draft.complete = True
        draft.take(source)
        made = constructions(source, (_CLASS,))
        if len(made) != 1 or made[0].is_open:
            draft.may_be_set()
        for name, value, place in made[0].values() if len(made) == 1 else ():
            if draft.accepts(name):
                draft.set(name, value, place)
            else:
                draft.note_unknown(name, place)
        return draft.finish()

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """The model forbids fields that it does not have."""
        return "xt-unknown-field"

    def rule_for_type(self, key: "Key | None") -> str:
        """Pydantic reads each value as the type of its field, or refuses it."""
        return "xt-wrong-type"


DIALECT = XTuner()
