# SPDX-License-Identifier: Apache-2.0
"""Edits one flag in the text of a launch script and leaves every other character alone.

A flag is edited only if it is written as plain words. If it comes from quotes, from a variable's expansion or from
any other construct of the shell, the result is None, and the caller says the change in words.
"""

import re

from skill_tools.configs.config import Place

# Plain words after a flag on its line: no other flag, and nothing that the shell would expand or end a command with.
_WORD = r"(?:-?\d[\w.]*(?=\s|$)|(?!-)[\w./:,+%@-]+)"
_VALUES = re.compile(rf"(?:=|[ \t]+){_WORD}(?:[ \t]+{_WORD})*")


def set_flag(text: str, place: Place, flag: str, value: object) -> str | None:
    """Return `text` with the values of the flag at `place` replaced; a switch that is to be off is taken out."""
    span = _span(text, place, flag)
    if span is None:
        return None
    if value is False:
        return remove_flag(text, place, flag)
    return f"{text[: span[0]]}{_written(flag, value)}{text[span[1] :]}"


def add_flag(text: str, beside: Place, sibling: str, flag: str, value: object) -> str | None:
    """Return `text` with `flag` added after its `sibling` and that one's values."""
    span = _span(text, beside, sibling)
    if span is None or value is False:
        return None
    return f"{text[: span[1]]} {_written(flag, value)}{text[span[1] :]}"


def remove_flag(text: str, place: Place, flag: str) -> str | None:
    """Return `text` without the flag and its values, and without the line if nothing else stands on it."""
    span = _span(text, place, flag)
    if span is None:
        return None
    start, end = span
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end) + 1 or len(text)
    if not text[line_start:start].strip() and text[end:line_end].strip() == "\\":
        return text[:line_start] + text[line_end:]
    before = text[:start].rstrip(" \t") if text[line_start:start].strip() else text[:start]
    return before + text[end:]


def _span(text: str, place: Place, flag: str) -> tuple[int, int] | None:
    """Return the start of the flag at `place` and the end of its values; None if it is not plainly there."""
    lines = text.split("\n")
    if place.line > len(lines) or not flag.startswith("--"):
        return None
    start = sum(len(line) + 1 for line in lines[: place.line - 1]) + place.column - 1
    end = start + len(flag)
    if text[start:end] != flag or (start and not text[start - 1].isspace() and text[start - 1] != "("):
        return None
    values = _VALUES.match(text, end)
    end = values.end() if values else end
    return (start, end) if re.match(r"[ \t]*(?:[ \t]--?[A-Za-z]|\\?\r?\n|\)|$)", text[end:]) else None


def _written(flag: str, value: object) -> str:
    values = value if isinstance(value, list) else [] if value is True else [value]
    return " ".join([flag, *map(str, values)])
