# SPDX-License-Identifier: Apache-2.0
"""Parses JSON into plain values that know their line and column, as Python's `json.loads` reads it.

That is more than the standard has: `NaN`, `Infinity` and half a surrogate pair are values. A text that `json.loads`
refuses is none of its; `source` reads it as the looser readers do.
"""

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]

from skill_tools.configs.position import Position
from skill_tools.configs.yaml_lines import MAX_DEPTH, MAX_NODES, Documents, Node
from skill_tools.errors import UnusableInput

_BLANK = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|-?Infinity|NaN|true|false|null", re.ASCII)
_WORDS = {
    "null": None, "true": True, "false": False,
    "NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf"),
}  # fmt: skip
_LONGEST_INTEGER = 4300  # digits, beyond which Python refuses to convert


class NotJsonError(Exception):
    """The text goes on in a way that `json.loads` refuses."""


def parse(text: str, filename: str) -> Documents:
    """Return the root of a JSON text, as the only document.

    Raises `NotJsonError` where `json.loads` refuses the text, and `UnusableInput` for input beyond `MAX_DEPTH` levels
    or `MAX_NODES` values.
    """
    return Documents([_Reader(text, filename).read()])


class _Reader:
    """A reader at one position of the text, which only ever moves on."""

    def __init__(self, text: str, filename: str) -> None:
        self._text, self._filename = text, filename
        self._at = self._nodes = 0
        self._position = Position(text)

    def read(self) -> Node:
        """Read the whole text as one value."""
        self._skip()
        root = self._value(1)
        self._skip()
        if self._at < len(self._text):
            raise NotJsonError
        return root

    def _value(self, depth: int) -> Node:
        place = self._place()
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise self._too_much(depth)
        match self._text[self._at : self._at + 1]:
            case "{":
                return Node(self._object(depth), *place)
            case "[":
                return Node(self._array(depth), *place)
            case '"':
                return Node(self._string(), *place)
        found = _SCALAR.match(self._text, self._at)
        if found is None:
            raise NotJsonError
        self._at = found.end()
        return Node(_scalar(found[0]), *place, found[0], bare=True)

    def _object(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        self._at += 1
        while not self._closed("}", first=not entries):
            place = self._place()
            if not self._text.startswith('"', self._at):
                raise NotJsonError
            name = self._string()
            self._skip()
            self._expect(":")
            self._skip()
            node = self._value(depth + 1)._replace(line=place[0], column=place[1])
            earlier = entries.pop(name, None)
            if earlier is not None:
                node = node._replace(shadowed=(*earlier.shadowed, earlier._replace(shadowed=())))
            entries[name] = node
        return entries

    def _array(self, depth: int) -> list[Node]:
        items: list[Node] = []
        self._at += 1
        while not self._closed("]", first=not items):
            items.append(self._value(depth + 1))
        return items

    def _closed(self, close: str, *, first: bool) -> bool:
        """Step over a comma or the closing bracket; return whether it was the bracket."""
        self._skip()
        if self._text.startswith(close, self._at):
            self._at += 1
            return True
        if not first:
            self._expect(",")
            self._skip()
        return False

    def _string(self) -> str:
        try:
            value, self._at = scanstring(self._text, self._at + 1, True)
        except json.JSONDecodeError:
            raise NotJsonError from None
        return str(value)

    def _expect(self, mark: str) -> None:
        if not self._text.startswith(mark, self._at):
            raise NotJsonError
        self._at += len(mark)

    def _skip(self) -> None:
        found = _BLANK.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _place(self) -> tuple[int, int]:
        """Return line and column of the present position, from 1."""
        return self._position.of(self._at)

    def _too_much(self, depth: int) -> UnusableInput:
        deep = depth > MAX_DEPTH
        what = f"nested deeper than {MAX_DEPTH} levels" if deep else f"more than {MAX_NODES} values"
        return UnusableInput(
            f"{self._filename}:{self._place()[0]}: {what}",
            expected="a training configuration",
            attempt="linting a file with less nesting"
            if deep
            else "linting the configuration itself, without data",
        )


def _scalar(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    if text.lstrip("-").isdecimal():
        if len(text) > _LONGEST_INTEGER:
            raise NotJsonError
        return int(text)
    return float(text)
