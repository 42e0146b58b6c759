# SPDX-License-Identifier: Apache-2.0
"""Reads amounts with units and writes them for people.

Memory is written in GiB for people and always says so; GB and GB/s are decimal. A bare number is read as
GiB, and the plan then prints that it was. Rates are read in `planning/cost/machine.py`.
"""

import math
import re

from skill_tools.errors import UnusableInput

GIB = 1 << 30
GB = 10**9

_FACTORS = {"": GIB, "gib": GIB, "gi": GIB, "mib": 1 << 20, "mi": 1 << 20, "tib": 1 << 40, "ti": 1 << 40}
_FACTORS |= {"gb": GB, "g": GB, "mb": 10**6, "tb": 10**12, "b": 1, "bytes": 1}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


_LONGEST = 40  # characters of an amount that anybody means


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def parse_bytes(text: str, *, option: str) -> int:
    """Return the bytes that `text` says, for example `80GiB`, `80GB` (decimal) or `80` (GiB).

    Raises `UnusableInput` for anything else, and for amounts that are not above zero.
    """
    match = _AMOUNT.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None or len(text) > _LONGEST:
        raise UnusableInput(
            f"{option} {_short(text)!r} is not an amount of memory",
            expected="a number with GiB, GB, MiB or TiB",
            attempt=f"{option} 80GiB",
        )
    amount = round(float(match.group(1)) * factor)
    if amount <= 0:
        raise UnusableInput(
            f"{option} {text!r} is not above zero",
            expected="more than zero bytes",
            attempt=f"{option} 80GiB",
        )
    return amount


def is_bare_number(text: str) -> bool:
    """Whether `text` has no unit, so that it was read as GiB."""
    match = _AMOUNT.fullmatch(text)
    return match is not None and not match.group(2)


def gib(amount_bytes: float) -> str:
    """Write bytes for people, for example `47.2 GiB`, or `3.1 MiB` below 0.05 GiB."""
    unit_bytes, unit = _unit_of(amount_bytes)
    return f"{amount_bytes / unit_bytes:.1f} {unit}"


def at_least_gib(amount_bytes: float) -> str:
    """Write needed bytes as `gib` does, rounded up: the written number is enough."""
    unit_bytes, unit = _unit_of(amount_bytes)
    return f"{math.ceil(10 * amount_bytes / unit_bytes) / 10:.1f} {unit}"


def _unit_of(amount_bytes: float) -> tuple[int, str]:
    return (2**20, "MiB") if 0 < amount_bytes < 0.05 * GIB else (GIB, "GiB")


def both(amount_bytes: float) -> str:
    """Write bytes in both units that people use, for example `47.2 GiB (50.7 GB)`, or `3.1 MiB (3.3 MB)`."""
    unit_bytes, unit = _unit_of(amount_bytes)
    decimal_bytes, decimal = (GB, "GB") if unit_bytes == GIB else (10**6, "MB")
    return f"{amount_bytes / unit_bytes:.1f} {unit} ({amount_bytes / decimal_bytes:.1f} {decimal})"


def seconds(duration_s: float) -> str:
    """Write a duration for people: milliseconds below one second, with two digits below one of them."""
    if 0 < duration_s < 0.001:
        return f"{duration_s * 1000:.2g} ms"
    return f"{duration_s * 1000:.0f} ms" if duration_s < 1 else f"{duration_s:.2f} s"
