# SPDX-License-Identifier: Apache-2.0
"""How objects show themselves to people: one line at a prompt, a table in a notebook, bytes in GB.

GB are 10^9 bytes, as the memory of cards is sold and as plans state it beside GiB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from html import escape
from typing import Any

_SMALL_BYTES = 10**8


def size(size_bytes: float) -> str:
    """Return a number of bytes in GB, or in MB where GB would show nothing of it."""
    return f"{size_bytes / 1e9:.2f} GB" if abs(size_bytes) >= _SMALL_BYTES else f"{size_bytes / 1e6:.3g} MB"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural ends in s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(title: str, facts: Mapping[str, str]) -> str:
    """Return HTML of `facts` under a title; a notebook's own style is kept."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{rows}</tbody></table>"


class Shown(ABC):
    """An object with facts about itself, which are cheap and can be asked for at any time."""

    @abstractmethod
    def _facts(self) -> Mapping[str, str]:
        """Return its properties and its work, in words, by name; raises nothing."""

    def __repr__(self) -> str:
        """Return one line."""
        return (
            f"{type(self).__name__}({', '.join(f'{name}: {value}' for name, value in self._facts().items())})"
        )

    def _repr_html_(self) -> str:
        return table(type(self).__name__, self._facts())


class Report:
    """A dataclass of figures: `str()` and notebooks show `..._bytes` in GB, `..._s` in seconds; `repr()` is exact."""

    def _facts(self) -> Mapping[str, str]:
        facts: dict[str, str] = {}
        for each in fields(self):  # type: ignore[arg-type]
            facts |= _shown(each.name, getattr(self, each.name))
        return facts

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"{type(self).__name__}({', '.join(f'{name}: {value}' for name, value in self._facts().items())})"
        )

    def _repr_html_(self) -> str:
        return table(type(self).__name__, self._facts())


def _shown(name: str, value: Any) -> dict[str, str]:
    """Return a figure under its name without the unit, and the entries of a report or a mapping one by one."""
    if isinstance(value, Report):
        return {f"{name} {inner}": text for inner, text in value._facts().items()}
    words = name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
    if isinstance(value, Mapping):
        return {
            f"{words} {inner}": size(figure) if name.endswith("_bytes") else str(figure)
            for inner, figure in value.items()
        }
    if name.endswith("_bytes"):
        return {words: size(value)}
    if name.endswith("_s"):
        return {words: f"{value:.3f} s"}
    return {words: f"{value:,}" if isinstance(value, int) else str(value)}
