# SPDX-License-Identifier: Apache-2.0
"""Reads Hydra's dotted overrides: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`.

The values are Hydra's: `null`, true and false in any case, numbers, quoted and bare text, lists and dicts. A form that
only a running Hydra knows, an interpolation such as `${oc.env:X}`, is `UNREADABLE`. Sweeps (`a=1,2`) and functions are
refused, because Megatron Bridge refuses them too.
"""

import re
from typing import NamedTuple

from skill_tools.configs.values import UNREADABLE, written
from skill_tools.errors import UnusableInput

MAX_DEPTH = 32

_OVERRIDE = re.compile(
    r"(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-]+)*)(?:@[\w.]*)?(?P<equals>=)?", re.ASCII
)
_WORDS = {"null": None, "true": True, "false": False}
_WHOLE = (
    r"(?:0|[1-9](?:_?\d)*)"  # so `00` and `007` are texts; hydra/grammar/OverrideLexer.g4 of 1.3.2 and 1.3.8
)
_DIGITS = r"\d(?:_?\d)*"
_INT = re.compile(rf"[-+]?{_WHOLE}", re.ASCII)
_FLOAT = re.compile(
    rf"[-+]?(?:(?:{_WHOLE}\.|{_WHOLE}?\.{_DIGITS})(?:e[-+]?{_DIGITS})?|{_WHOLE}e[-+]?{_DIGITS}|inf|nan)",
    re.ASCII | re.IGNORECASE,
)
_UNQUOTED = re.compile(r"\\[\\()\[\]{}:=, \t]|[\w/\-+.$%*@?|:\\ \t]", re.ASCII)
_ESCAPE = re.compile(r"\\([\\()\[\]{}:=, \t])")


class Override(NamedTuple):
    """One override; `sign` is `+`, `++`, `~` or empty, `value` is None for a removal."""

    sign: str
    key: str
    value: object


def looks_like_override(text: str) -> bool:
    """Return whether `text` has the shape of a dotted override with a value."""
    match = _OVERRIDE.match(text)
    return match is not None and (match["equals"] is not None or match["sign"] == "~")


def parse_override(text: str) -> Override:
    """Read one override; raises `UnusableInput` when Hydra would refuse it."""
    match = _OVERRIDE.match(text)
    if match is None or (match["equals"] is None and (match["sign"] != "~" or match.end() != len(text))):
        raise _refuse(text, "key=value, as in model.cpu_offloading=true")
    sign = match["sign"] or ""
    if match["equals"] is None:
        return Override(sign, match["key"], None)
    return Override(sign, match["key"], _Values(text, match.end()).read())


def parse_value(text: str) -> object:
    """Read a value alone, as it stands after the `=`."""
    return _Values(text, 0).read()


def _refuse(text: str, expected: str) -> UnusableInput:
    return UnusableInput(
        f"the override {_shortened(text)!r} is not valid",
        expected=expected,
        attempt="quoting the override, and lists as key=[a,b]",
    )


def _shortened(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


class _Values:
    """A reader at one position of an override's text."""

    def __init__(self, text: str, position: int) -> None:
        self._text = text
        self._at = position

    def read(self) -> object:
        """Read the whole rest as one value."""
        self._skip_spaces()
        value = "" if self._end() else self._value("", 0)
        if not self._end():
            raise _refuse(self._text, "one value")
        return value

    def _value(self, stops: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise _refuse(self._text, f"lists nested at most {MAX_DEPTH} deep")
        self._skip_spaces()
        match self._peek():
            case "[":
                return self._list(depth)
            case "{":
                return self._dict(depth)
            case "'" | '"':
                return self._quoted()
        return self._bare(stops)

    def _list(self, depth: int) -> object:
        self._at += 1
        items: list[object] = []
        while not self._closed("]", first=not items):
            items.append(self._value(",]", depth + 1))
        return UNREADABLE if UNREADABLE in items else items

    def _dict(self, depth: int) -> object:
        self._at += 1
        entries: dict[str, object] = {}
        names: dict[object, str] = {}
        while not self._closed("}", first=not entries):
            key = self._key()
            self._skip_spaces()
            if self._peek() != ":":
                raise _refuse(self._text, "key: value inside braces")
            self._at += 1
            entries[names.setdefault(key, written(key))] = self._value(",}", depth + 1)
        return UNREADABLE if UNREADABLE in entries.values() else entries

    def _key(self) -> object:
        self._skip_spaces()
        if self._peek() in ("'", '"', "[", "{"):
            raise _refuse(self._text, "a bare key inside braces")
        return self._bare(":")

    def _closed(self, close: str, *, first: bool) -> bool:
        """Step over a comma or the closing bracket; return whether it was the bracket."""
        self._skip_spaces()
        character = self._peek()
        if character == close:
            self._at += 1
            return True
        if not first:
            if character != ",":
                raise _refuse(self._text, f"a comma or {close}")
            self._at += 1
        if self._end():
            raise _refuse(self._text, f"a closing {close}")
        return False

    def _quoted(self) -> object:
        quote = self._peek()
        end = self._at + 1
        while end < len(self._text) and self._text[end] != quote:
            end += 2 if self._text[end] == "\\" else 1
        if end >= len(self._text):
            raise _refuse(self._text, f"a closing {quote}")
        body = self._text[self._at + 1 : end]
        self._at = end + 1
        if "${" in body:
            return UNREADABLE
        # Only in front of a quote does a backslash escape, so two of them elsewhere stay two.
        return re.sub(rf"(\\+)({quote}|$)", lambda found: "\\" * (len(found[1]) // 2) + found[2], body)

    def _bare(self, stops: str) -> object:
        """Read unquoted text up to one of `stops` or to a character that Hydra allows only in quotes."""
        start, readable = self._at, True
        while not self._end() and self._peek() not in stops:
            if self._text.startswith("${", self._at):
                self._interpolation()
                readable = False
            elif token := _UNQUOTED.match(self._text, self._at):
                self._at = token.end()
            else:
                break
        body = _without_trailing_space(self._text[start : self._at])
        if not body:
            raise _refuse(self._text, "one value, no sweep and no function")
        return _primitive(body) if readable else UNREADABLE

    def _interpolation(self) -> None:
        """Step over `${...}`, whatever is in it."""
        depth = 0
        for position in range(self._at, len(self._text)):
            depth += {"{": 1, "}": -1}.get(self._text[position], 0)
            if depth == 0 and self._text[position] == "}":
                self._at = position + 1
                return
        raise _refuse(self._text, "a closing } of ${")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _end(self) -> bool:
        return self._at >= len(self._text)

    def _skip_spaces(self) -> None:
        while self._peek() in (" ", "\t"):
            self._at += 1


def _without_trailing_space(body: str) -> str:
    """Return `body` without spaces at its end but an escaped one; a colon is one token with those behind it."""
    stripped = body.rstrip(" \t")
    if stripped.endswith(":"):
        return body
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return body[: len(stripped) + backslashes % 2]


def _primitive(body: str) -> object:
    lowered = body.lower()
    if lowered in _WORDS:
        return _WORDS[lowered]
    if _INT.fullmatch(body) and len(body) < 400:
        return int(body)
    if _FLOAT.fullmatch(body):
        return float(body.replace("_", ""))
    return _ESCAPE.sub(r"\1", body)
