"""What a log says about the machine it was written on: the GPU's name, and how much memory the host has.

Apart because a plan from a log would otherwise be made for somebody else's machine.
"""

import re
from collections.abc import Callable

from skill_tools.diagnosis.log import Log
from skill_tools.units import GIB

_GPU = re.compile(r"\b(?:NVIDIA|Tesla|AMD Instinct|GeForce)[ -]([A-Za-z0-9][A-Za-z0-9 -]{1,40})")
_MOST_NAMES = 200
_USED = re.compile(r"CPU Virtual Memory:\s+used = ([0-9.]+) GB, percent = ([0-9.]+)%")  # DeepSpeed, in GiB
_RAY = re.compile(r"was running was ([0-9.]+)\s*GB / ([0-9.]+)\s*GB")
_LEAST_PERCENT = 1.0  # below it the two rounded numbers say little about their quotient


def gpu_name(log: Log, known: Callable[[str], str | None]) -> str | None:
    """Return the GPU that the log names first, as `nvidia-smi` or a framework prints it, by the name `known` has."""
    for count, match in enumerate(_GPU.finditer(log.text)):
        if count == _MOST_NAMES:
            break
        words = match.group(1).split()
        for end in range(len(words), 0, -1):
            if name := known(" ".join(words[:end])):
                return name
    return None


def host_bytes(log: Log) -> int | None:
    """Return the memory of the host by what DeepSpeed or Ray printed of it."""
    for used, percent in reversed(_USED.findall(log.text)):
        if _number(percent) >= _LEAST_PERCENT and _number(used) > 0:
            return round(_number(used) / _number(percent) * 100 * GIB)
    if match := _RAY.search(log.text):
        return round(_number(match.group(2)) * GIB) or None
    return None


def _number(written: str) -> float:
    try:
        number = float(written)
    except ValueError:
        return 0.0
    return number if number < 1e9 else 0.0
