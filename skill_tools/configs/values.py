# SPDX-License-Identifier: Apache-2.0
"""Converts a written value to the type of its key, as each framework does.

Most parsers convert text (`"2e-5"`, `"4"`); some frameworks take the values of their loader and convert only dtypes.
A value that cannot be converted is left as it is, and the caller is told the expectation.
"""

import re
from enum import Enum
from typing import NamedTuple

from skill_tools.configs.keys import Key

_DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "32": "fp32",
    "bf16": "bf16", "bfloat16": "bf16", "bf16-mixed": "bf16",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "16": "fp16",
    "fp8": "fp8", "uint8": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
_TRUE = {"true", "yes", "on", "1", "y", "t"}
_FALSE = {"false", "no", "off", "0", "n", "f"}
_WHOLE = re.compile(r"\s*[+-]?[0-9]+\.0*\s*")  # pydantic's int takes "2.0" as 2
_LONGEST_NUMBER = 100  # characters
_LARGEST_INTEGER = 2**63
_EXPECTED = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "dtype": "a dtype such as fp32 or bf16",
    "list": "a list",
    "dict": "a section",
}


class Unreadable(Enum):
    """The value of an expression that an input computes when it runs: an interpolation, a shell variable, a call."""

    UNREADABLE = "unreadable"


UNREADABLE = Unreadable.UNREADABLE


class Typed(NamedTuple):
    """A value brought to its key's type; `expected` is set when that is not possible."""

    value: object
    expected: str | None = None


def typed(key: Key, value: object, framework: str, *, converts_text: bool) -> Typed:
    """Return `value` in the type of `key`, or as it is with the expectation. None fits every type.

    `converts_text` says that the framework turns text such as `"4"` into the key's type.
    """
    kind = key.type_in(framework)
    if value is None:
        return Typed(None)
    if converts_text and isinstance(value, str):
        value = _from_text(kind, value)
        if isinstance(value, str) and any(choice is True for choice in key.choices):
            value = _from_text("bool", value)
    result = _checked(kind, value)
    if result.expected is None and key.choices and result.value not in key.choices:
        return Typed(value, f"one of {', '.join(map(written, key.choices))}")
    return result


def as_pydantic(kind: str, value: object) -> object:
    """Return the number of `kind` that only pydantic's lax mode reads, not parsers of arguments."""
    if isinstance(value, bool) and kind in ("int", "float"):
        return int(value)
    if isinstance(value, str) and kind == "int" and _WHOLE.fullmatch(value):
        return value.strip().partition(".")[0]
    return value


def written(value: object) -> str:
    """Return one value as YAML and command lines spell it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def is_template(text: str) -> bool:
    """Return whether somebody fills a text in before it is read: `${BATCH}`, `{{ batch }}`, `<batch size>`."""
    is_likely = "${" in text or "{{" in text or "<" in text
    return is_likely and bool(re.search(r"\$\{[^{}]+\}|\{\{.+\}\}|<[A-Za-z][^<>]*>", text))


def dtype_name(text: str) -> str | None:
    """Return the short name of a dtype (`torch.bfloat16` is `bf16`), or None when `text` names none."""
    return _DTYPES.get(text.removeprefix("torch."))


def _checked(kind: str, value: object) -> Typed:
    match kind, value:
        case "any", _:
            return Typed(value)
        case "dtype", str() if dtype_name(value):
            return Typed(dtype_name(value))
        case "bool", 0 | 1:
            return Typed(bool(value))
        case "int", int() | float() if not abs(value) < _LARGEST_INTEGER:
            return Typed(value, "an integer of 64 bits")
        case "int", float() if value.is_integer():
            return Typed(int(value))
        case ("bool", bool()) | ("str", str()) | ("list", list()) | ("dict", dict()):
            return Typed(value)
        case ("int", int()) | ("float", int() | float()) if not isinstance(value, bool):
            return Typed(value)
    return Typed(value, _EXPECTED[kind])


def whole_number(text: str) -> int | None:
    """Return the number that `text` is the decimal digits of; None for any other text, and beyond any count."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _from_text(kind: str, text: str) -> object:
    """Convert text as a parser of arguments would; other text stays."""
    match kind:
        case "int" | "float":
            return _number(text, whole=kind == "int")
        case "any" if re.fullmatch(r"-?\d{1,18}", text):
            return int(text)
        case "bool" if text.lower() in _TRUE:
            return True
        case "bool" if text.lower() in _FALSE:
            return False
    return text


def _number(text: str, *, whole: bool) -> object:
    try:
        return (int(text) if whole else float(text)) if len(text) <= _LONGEST_NUMBER else text
    except ValueError:
        return text
