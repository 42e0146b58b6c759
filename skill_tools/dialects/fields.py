# SPDX-License-Identifier: Apache-2.0
"""Typed reading of a Config: "an integer under any of these names, if anybody set one".

A value that contradicts its name gives one error line with its place.
"""

import re
from collections.abc import Callable
from typing import TypeVar

from skill_tools.configs.config import Config, Setting
from skill_tools.errors import UnusableInput

T = TypeVar("T")
LARGEST = 2**53  # nothing that a training counts or weighs is more; beyond it floats are no whole numbers
_SHOWN = 60
_DIGITS = 12
_PATTERN_PIECE = re.compile(r"\[([01])\]\*(\d+)|\[([01](?:,[01])*)\]")


def _setting(config: Config, keys: tuple[str, ...]) -> Setting | None:
    for key in keys:
        setting = config.settings.get(key)
        if setting is not None and setting.value is not None:
            return setting
    return None


def _typed(config: Config, keys: tuple[str, ...], expected: str, convert: Callable[[object], T]) -> T | None:
    setting = _setting(config, keys)
    if setting is None:
        return None
    try:
        return convert(setting.value)
    except (TypeError, ValueError, OverflowError):
        raise UnusableInput(
            f"{setting.written} = {_shown(setting.value)} ({setting.place})",
            expected=expected,
            attempt="correct the value",
        ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _to_integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = float(value.replace("_", "")) if isinstance(value, str) else value
    if abs(number) >= LARGEST or number != int(number):
        raise ValueError
    return int(number)


def _to_count(value: object) -> int:
    if (number := _to_integer(value)) < 1:
        raise ValueError
    return number


def _to_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = float(value)
    if not abs(number) < LARGEST:
        raise ValueError
    return number


def _to_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if isinstance(value, int) and value in {0, 1}:
        return bool(value)
    raise TypeError


def integer(config: Config, *keys: str) -> int | None:
    """Return the first of `keys` that was set, as an integer."""
    return _typed(config, keys, "a whole number", _to_integer)


def count(config: Config, *keys: str) -> int | None:
    """Return the first of `keys` that was set, as a number of things: 1 or more."""
    return _typed(config, keys, "a whole number above zero", _to_count)


def number(config: Config, *keys: str) -> float | None:
    """Return the first of `keys` that was set, as a float."""
    return _typed(config, keys, "a number", _to_number)


def flag(config: Config, *keys: str) -> bool | None:
    """Return the first of `keys` that was set, as a bool."""
    return _typed(config, keys, "true or false", _to_flag)


def text(config: Config, *keys: str) -> str | None:
    """Return the first of `keys` that was set, as a string."""
    setting = _setting(config, keys)
    return None if setting is None else str(setting.value)


def words(config: Config, *keys: str) -> tuple[str, ...]:
    """Return a list of names: a YAML list, or `[a b]`, `a,b` and `a b` in one string."""
    setting = _setting(config, keys)
    if setting is None:
        return ()
    if isinstance(setting.value, list | tuple):
        return tuple(str(item) for item in setting.value)
    return tuple(re.findall(r"[A-Za-z0-9_.]+", str(setting.value)))


def moe_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts by `moe_layer_freq`: every n-th layer, or a pattern of 0 and 1."""
    setting = _setting(config, ("moe_layer_freq",))
    if setting is None:
        return ()
    if isinstance(setting.value, list):
        return tuple(bool(item) for item in setting.value)
    written = str(setting.value).replace(" ", "")
    if written.isdecimal() and (period := int(written[:_DIGITS])) > 0:
        return tuple(layer % period == 0 for layer in range(num_layers))
    pattern: list[bool] = []
    for repeated, times, listed in _PATTERN_PIECE.findall(written):
        count = min(int(times[:_DIGITS] or 0), num_layers + 1)  # one too many is wrong whatever the rest is
        pattern += [repeated == "1"] * count if repeated else [item == "1" for item in listed.split(",")]
    if len(pattern) != num_layers:
        raise UnusableInput(
            f"{setting.written} = {_shown(setting.value)} ({setting.place}) names {len(pattern)} layers",
            expected=f"{num_layers} layers, for example [0]*3+[1]*{max(num_layers - 3, 1)}",
            attempt="correct the pattern",
        )
    return tuple(pattern)
