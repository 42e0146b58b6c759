# SPDX-License-Identifier: Apache-2.0
"""Parses TOML into plain values that know their line and column.

The standard `tomllib` reads the values; it keeps no places. `_Places` walks the same text and notes where
each key and each element stands, reading values only to skip them. It leaves unreadable text to `tomllib`,
whose error the user sees.
"""

import re
from datetime import date, time

from skill_tools.configs.position import Position
from skill_tools.configs.yaml_lines import MAX_DEPTH, MAX_NODES, Documents, Node
from skill_tools.errors import UnusableInput

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SPACES = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_MULTILINE = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|' r"'''(?:.)*?'{3,5}", re.DOTALL)
_SCALAR = re.compile(r"[^,\]}\n#]+")


def parse(text: str, filename: str) -> Documents:
    """Return the root of a TOML text, as the only document.

    Raises `UnusableInput` for invalid TOML, and for input beyond `MAX_DEPTH` levels or `MAX_NODES` values.
    """
    import tomllib

    places = _Places(text, filename).found
    try:
        root = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is no TOMLDecodeError
        raise UnusableInput(
            f"{filename} is not valid TOML ({error})", expected="TOML", attempt="mending that line"
        ) from error
    return Documents([_node(root, (), (1, 1), places)])


def _node(value: object, path: Path, around: tuple[int, int], places: dict[Path, tuple[int, int]]) -> Node:
    """Return `value` as a node at its place; one without a place of its own stands where its section does."""
    line, column = place = places.get(path, around)
    if isinstance(value, dict):
        return Node(
            {name: _node(child, (*path, name), place, places) for name, child in value.items()}, line, column
        )
    if isinstance(value, list):
        return Node(
            [_node(child, (*path, position), place, places) for position, child in enumerate(value)],
            line,
            column,
        )
    return Node(value.isoformat() if isinstance(value, date | time) else value, line, column)


class _NotTomlError(Exception):
    """The text goes on in a way that no TOML does."""


class _Places:
    """The place of each key and element, by its path from the root; `found` is filled as far as the text is TOML."""

    def __init__(self, text: str, filename: str) -> None:
        self.found: dict[Path, tuple[int, int]] = {}
        self._text = text
        self._filename = filename
        self._at = 0
        self._position = Position(text)
        self._tables: dict[Path, int] = {}
        try:
            self._document()
        except _NotTomlError:
            return

    def _document(self) -> None:
        table: Path = ()
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _header(self) -> Path:
        """Read `[a.b]` or `[[a.b]]`; return the path of the table, with the position in an array of tables."""
        place = self._place()
        is_array = self._text.startswith("[[", self._at)
        self._at += 1 + is_array
        self._skip(_SPACES)
        path: Path = ()
        parts = self._key()
        for position, part in enumerate(parts):
            path = (*path, part)
            self._note(path, place)
            if is_array and position == len(parts) - 1:
                self._tables[path] = self._tables.get(path, -1) + 1
            if path in self._tables:
                path = (*path, self._tables[path])
                self._note(path, place)
        self._expect("]]" if is_array else "]")
        return path

    def _pair(self, table: Path) -> None:
        """Read `a.b = value`."""
        place = self._place()
        path = table
        for part in self._key():
            path = (*path, part)
            self._note(path, place)
        self._expect("=")
        self._skip(_SPACES)
        self._value(path, 0)

    def _key(self) -> list[str]:
        parts = []
        while True:
            parts.append(self._key_part())
            if len(parts) > MAX_DEPTH:
                raise self._too_deep()
            self._skip(_SPACES)
            if not self._text.startswith(".", self._at):
                return parts
            self._at += 1
            self._skip(_SPACES)

    def _key_part(self) -> str:
        bare = _BARE_KEY.match(self._text, self._at)
        quoted = _BASIC.match(self._text, self._at) or _LITERAL.match(self._text, self._at)
        if bare:
            self._at = bare.end()
            return bare[0]
        if quoted is None:
            raise _NotTomlError
        self._at = quoted.end()
        return _unquoted(quoted[0])

    def _value(self, path: Path, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._too_deep()
        match self._text[self._at : self._at + 1]:
            case "[":
                self._array(path, depth)
            case "{":
                self._inline_table(path, depth)
            case '"' | "'":
                quoted = (
                    _MULTILINE.match(self._text, self._at)
                    or _BASIC.match(self._text, self._at)
                    or _LITERAL.match(self._text, self._at)
                )
                if quoted is None:
                    raise _NotTomlError
                self._at = quoted.end()
            case _:
                if not self._skip(_SCALAR):
                    raise _NotTomlError

    def _array(self, path: Path, depth: int) -> None:
        self._at += 1
        position = 0
        self._skip(_BLANK)
        while not self._text.startswith("]", self._at):
            self._note((*path, position), self._place())
            self._value((*path, position), depth + 1)
            position += 1
            self._skip(_BLANK)
            if not self._text.startswith("]", self._at):
                self._expect(",")
                self._skip(_BLANK)
        self._at += 1

    def _inline_table(self, path: Path, depth: int) -> None:
        self._at += 1
        self._skip(_BLANK)
        while not self._text.startswith("}", self._at):
            place = self._place()
            inner = path
            for part in self._key():
                inner = (*inner, part)
                self._note(inner, place)
            self._expect("=")
            self._skip(_SPACES)
            self._value(inner, depth + 1)
            self._skip(_BLANK)
            if not self._text.startswith("}", self._at):
                self._expect(",")
                self._skip(_BLANK)
        self._at += 1

    def _note(self, path: Path, place: tuple[int, int]) -> None:
        self.found.setdefault(path, place)
        if len(path) > MAX_DEPTH:
            raise self._too_deep()
        if len(self.found) > MAX_NODES:
            raise UnusableInput(
                f"{self._filename}:{place[0]}: more than {MAX_NODES} values",
                expected="a training configuration",
                attempt="linting the configuration itself, without data",
            )

    def _too_deep(self) -> UnusableInput:
        return UnusableInput(
            f"{self._filename}:{self._place()[0]}: nested deeper than {MAX_DEPTH} levels",
            expected="a training configuration",
            attempt="linting a file with less nesting",
        )

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Step over a match of `pattern`; return whether there was one."""
        match = pattern.match(self._text, self._at)
        start, self._at = self._at, match.end() if match else self._at
        return self._at > start

    def _expect(self, mark: str) -> None:
        self._skip(_SPACES)
        if not self._text.startswith(mark, self._at):
            raise _NotTomlError
        self._at += len(mark)

    def _place(self) -> tuple[int, int]:
        """Return line and column of the present position, from 1; it only ever moves on."""
        return self._position.of(self._at)


def _unquoted(part: str) -> str:
    """Return a quoted key without quotes, its escapes resolved."""
    if part.startswith("'") or "\\" not in part:
        return part[1:-1]
    import tomllib

    try:
        value: str = tomllib.loads(f"key = {part}")["key"]
    except tomllib.TOMLDecodeError:
        raise _NotTomlError from None
    return value
