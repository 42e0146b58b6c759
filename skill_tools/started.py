# SPDX-License-Identifier: Apache-2.0
"""How this tool was started, so the command that it recommends next runs there, too.

A wheel brings `offload`; a clone is run as `python3 skill_tools`, and an agent runs its skill by a path.
"""

from __future__ import annotations  # so that an older Python reads this file and can be told

import os
import re
import sys
from collections.abc import Sequence

_PLAIN = re.compile(r"[\w@%+=:,./~-]+")
_PACKAGES = ("skill_tools", "cpu_offloading")
# Where a command may stand in help or a message: in backticks, at the head of a line, behind "try" or "or".
_TOLD = (
    r"(?m)(^ *|`|\btry |\bor )offload "
    r"(?=(?:card|diagnose|explain|knowledge|lint|plan|probe|trace|verify|watch)\b)"
)


def started_as(program: str, typed: Sequence[str]) -> str:
    """Return the words before a command's name; `offload` where it is installed, or called by other code.

    `program` is `sys.argv[0]`, and `typed` are the words of the process, `sys.orig_argv`.
    """
    if "card" in typed:  # renders documents, whose readers start it in any way
        return "offload"
    folder, name = os.path.split(program.rstrip(os.sep))
    if name == "__main__.py" and os.path.basename(folder) in _PACKAGES:
        return f"{_python(typed)} -m {os.path.basename(folder)}"
    if name in _PACKAGES:
        return f"{_python(typed)} {_quoted(program)}"
    return "offload"


def as_started(text: str) -> str:
    """Return help or a message that calls the tool `offload`, as an installed one is, for the way it was started."""
    return text if COMMAND == "offload" else re.sub(_TOLD, lambda found: f"{found[1]}{COMMAND} ", text)


def _python(typed: Sequence[str]) -> str:
    """Return the word for this interpreter: its name if a shell finds it by that, as far as one can tell."""
    path = typed[0] if typed else "python3"
    is_found = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    return _quoted(os.path.basename(path) if is_found else path)


def _quoted(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    import shlex

    return shlex.quote(word)


COMMAND = started_as(sys.argv[0] if sys.argv else "", getattr(sys, "orig_argv", ()))
