# SPDX-License-Identifier: Apache-2.0
"""The machine that a log was written on: the GPU's name, and how much memory the host has.

Apart because a plan from a log would otherwise be made for somebody else's machine.
"""

import re
from collections.abc import Callable

from skill_tools.diagnosis.log import Log
from skill_tools.units import GIB

_MAKERS = ("NVIDIA", "Tesla", "AMD Instinct", "GeForce")
_GPU = re.compile(rf"\b(?:{'|'.join(_MAKERS)})[ -]([A-Za-z0-9][A-Za-z0-9 -]{{1,40}})")
_MOST_NAMES = 200
_USED = re.compile(r"CPU Virtual Memory:\s+used = ([0-9.]+) GB, percent = ([0-9.]+)%")  # DeepSpeed, in GiB
_RAY = re.compile(r"was running was ([0-9.]+)\s*GB / ([0-9.]+)\s*GB")
# The limit of a job or a container: the kernel states it in KiB, Slurm and Docker in their options, in binary units.
_CGROUP = re.compile(r"memory: usage [0-9]{1,18}kB, limit ([0-9]{1,18})kB")
_OPTION = re.compile(r"(--mem|--memory|-m)[ =]([0-9]{1,15})([bkmgtBKMGT]?)(?![0-9A-Za-z])")
_LAUNCHERS = {
    "--mem": re.compile(r"\b(?:srun|sbatch|salloc|SBATCH)\b"),
    "-m": re.compile(r"\b(?:docker|podman) run\b"),
}
_UNITS = {
    "b": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": GIB,
    "t": GIB << 10,
    "": 1 << 20,
}  # Slurm's bare number is in MiB
_UNLIMITED = 1 << 50
_FAR_FROM_FULL = 50.0  # percent
_LEAST_PERCENT = 1.0  # below it the two rounded numbers say little about their quotient


def gpu_name(log: Log, known: Callable[[str], str | None]) -> str | None:
    """Return the GPU that the log names first, as `nvidia-smi` or a framework prints it, by the name `known` has."""
    if not any(maker in log.text for maker in _MAKERS):  # `re` would take twenty times as long to say so
        return None
    for count, match in enumerate(_GPU.finditer(log.text)):
        if count == _MOST_NAMES:
            break
        words = match.group(1).split()
        for end in range(len(words), 0, -1):
            if name := known(" ".join(words[:end])):
                return name
    return None


def host_bytes(log: Log) -> int | None:
    """Return the run's host memory: the limit of its job or container, else all of the host's."""
    return _limit_bytes(log) or _all_bytes(log)


def _limit_bytes(log: Log) -> int | None:
    """Return the kernel's enforced limit, or else that of the log's own launch command."""
    for written in reversed(_CGROUP.findall(log.text)):
        if int(written) << 10 < _UNLIMITED:
            return int(written) << 10 or None
    for match in _OPTION.finditer(log.text):
        option, amount, unit = match.groups()
        asked = int(amount) * _UNITS[unit.lower()]
        launcher = _LAUNCHERS["--mem" if option == "--mem" else "-m"]
        if 0 < asked < _UNLIMITED and launcher.search(
            log.context(match.start())
        ):  # --mem=0 asks for the whole node
            return asked
    return None


def _all_bytes(log: Log) -> int | None:
    """Return the memory of the host as DeepSpeed or Ray printed it."""
    for used, percent in reversed(_USED.findall(log.text)):
        if _number(percent) >= _LEAST_PERCENT and _number(used) > 0:
            return round(_number(used) / _number(percent) * 100 * GIB)
    if match := _RAY.search(log.text):
        return round(_number(match.group(2)) * GIB) or None
    return None


def below_the_host(log: Log) -> str:
    """Say how little of the host was in use at its last reading, if it was far from full: a limit may be lower."""
    used, percent = next(reversed(_USED.findall(log.text)), ("", "100"))
    if not _LEAST_PERCENT <= _number(percent) < _FAR_FROM_FULL or _limit_bytes(log):
        return ""
    return (
        f"the host had {percent}% in use ({used} GB) at the last reading, so that unless it rose steeply after it, the "
        "limit was another's: a container's or job's (cgroup), which counts page cache and /dev/shm too"
    )


def _number(written: str) -> float:
    try:
        number = float(written)
    except ValueError:
        return 0.0
    return number if number < 1e9 else 0.0
