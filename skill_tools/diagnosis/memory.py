# SPDX-License-Identifier: Apache-2.0
"""Reads the numbers in a log about the GPU's memory: out-of-memory messages, and memory reports.

PyTorch writes GiB and MiB (binary); Megatron's report is in MiB although it says MB. Every rank writes its own
out-of-memory message; the last one counts, because the failure is at the log's end.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from skill_tools.diagnosis.log import Log
from skill_tools.units import GIB

_AMOUNT = r"([0-9.]+) ?(bytes|KiB|MiB|GiB|TiB)"
_FACTORS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB, "TiB": 1 << 40}
_OOM = re.compile(rf"(?P<device>CUDA|HIP|NPU|XPU) out of memory\. Tried to allocate {_AMOUNT}")
_FIELDS = {
    "total_bytes": (rf"total capacity of {_AMOUNT}", rf"{_AMOUNT} total capacity"),
    "free_bytes": (rf"of which {_AMOUNT} is free", rf"{_AMOUNT} free"),
    "process_bytes": (rf"this process has {_AMOUNT} memory in use",),
    "allocated_bytes": (rf"{_AMOUNT} is allocated by PyTorch", rf"{_AMOUNT} already allocated"),
    "unallocated_bytes": (rf"{_AMOUNT} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_AMOUNT} reserved in total by PyTorch",),
}
_OTHERS = re.compile(rf"Process (\d{{1,9}}) has {_AMOUNT} memory in use")
_WRITER = re.compile(r"\W?\w[\w.\[\]= ]{0,60} pid=(?P<pid>\d{1,9})")
_LATER_RANK = re.compile(r"\W{0,2}(?:rank|default) ?[1-9]")
_MUCH = 20  # of which parts of the GPU one is much, for another process to hold or for gaps
_MOST_BYTES = 1 << 60
_REPORT = re.compile(r"memory \(MB\) \| allocated: (\d{1,9}(?:\.\d*)?) \| max allocated: (\d{1,9}(?:\.\d*)?)")


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One out-of-memory message of PyTorch for its `device`; amounts in bytes, None where the message does not say.

    The allocator had reserved `unallocated_bytes` and could not use them; other processes held `others_bytes`. `other`
    is the log's name of the process with the most of these, such as an actor's. `like_this` counts those with about as
    much as this one, where a rank but the first failed on the first GPU, and two at least.
    """

    line: int
    text: str
    device: str
    tried_bytes: int
    total_bytes: int | None
    free_bytes: int | None
    process_bytes: int | None
    allocated_bytes: int | None
    unallocated_bytes: int | None
    count: int
    others_bytes: int = 0
    other: str = ""
    like_this: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether other processes held much of the GPU."""
        return self.total_bytes is not None and self.others_bytes > self.total_bytes // _MUCH

    @property
    def is_fragmented(self) -> bool:
        """Whether the reserved and unused memory would have held the request, and is much of the GPU.

        A GPU that is full but for a little has gaps as large as a small request, and is out of room all the same.
        """
        unused = self.unallocated_bytes
        return unused is not None and unused >= self.tried_bytes and unused > (self.total_bytes or 0) // _MUCH

    @property
    def needed_bytes(self) -> int | None:
        """Bytes of live tensors that the failed allocation asked for in all."""
        return None if self.allocated_bytes is None else self.allocated_bytes + self.tried_bytes


def out_of_memory(log: Log) -> OutOfMemory | None:
    """Return the last out-of-memory message of a device, and how many there are."""
    matches = list(_OOM.finditer(log.text))
    if not matches:
        return None
    last = matches[-1]
    message = log.text[last.start() : last.start() + 1200].split("\n\n")[0]
    fields = {name: _first(patterns, message) for name, patterns in _FIELDS.items()}
    reserved, allocated = fields.pop("reserved_bytes"), fields["allocated_bytes"]
    if fields["unallocated_bytes"] is None and reserved is not None and allocated is not None:
        fields["unallocated_bytes"] = reserved - allocated
    return OutOfMemory(
        line=log.line_at(last.start()),
        text=log.context(last.start()),
        device=last["device"],
        tried_bytes=_bytes(last),
        count=len(matches),
        others_bytes=(others := _others(message, fields)),
        other=_named(log, last.start(), message) if others else "",
        like_this=_like_this(log, last.start(), message, fields["process_bytes"] or 0) if others else 0,
        **fields,
    )


def _others(message: str, fields: Mapping[str, int | None]) -> int:
    """Return the bytes that other processes held; nothing above the GPU's memory: a container may count twice.

    Where no process is called "this", it is one of the numbered: a container numbers its processes anew, and torch
    does not find its own number in the driver's list.
    """
    held = sum(_amount(match.group(2), match.group(3)) for match in _OTHERS.finditer(message))
    if fields["process_bytes"] is None:
        held -= (fields["allocated_bytes"] or 0) + (fields["unallocated_bytes"] or 0)
    return held if 0 < held < (fields["total_bytes"] or 0) else 0


def _like_this(log: Log, at: int, message: str, own: int) -> int:
    """Return how many other processes on the first GPU have about as much as the rank that failed there."""
    start = log.text.rfind("\n", 0, at) + 1
    if not (_LATER_RANK.match(log.text, start) and "GPU 0 " in message):
        return 0
    held = (_amount(each.group(2), each.group(3)) for each in _OTHERS.finditer(message))
    alike = sum(own < 2 * each < 4 * own for each in held)
    return alike if alike > 1 else 0


def _named(log: Log, at: int, message: str) -> str:
    """Return the name in front of the lines of the process with the most beside the failed one; "" without any.

    Ray and others print `(NAME pid=N)` in front of each line.
    """
    start = log.text.rfind("\n", 0, at) + 1
    own = _WRITER.match(log.text, start)
    held = sorted(
        ((_amount(each.group(2), each.group(3)), each.group(1)) for each in _OTHERS.finditer(message)),
        reverse=True,
    )
    for _, pid in held:
        if own is not None and own["pid"] == pid:
            continue
        found = re.search(rf"(?m)^\W?(?P<name>\w[\w.\[\]= ]{{0,60}}) pid={pid}\b", log.text)
        if found:
            return f"{found['name']} (pid {pid})"
    return ""


def _first(patterns: tuple[str, ...], message: str) -> int | None:
    for pattern in patterns:
        if match := re.search(pattern, message):
            return _bytes(match)
    return None


def _bytes(match: re.Match[str]) -> int:
    number, unit = match.groups()[-2:]
    return _amount(number, unit)


def _amount(number: str, unit: str) -> int:
    """Return an amount; no number, or more than any machine has, counts as nothing."""
    try:
        amount = float(number.rstrip(".")) * _FACTORS[unit]
    except ValueError:
        return 0
    return round(amount) if amount < _MOST_BYTES else 0


def reported_bytes(log: Log) -> tuple[int, int] | None:
    """Return Megatron's (allocated, max allocated) of the most loaded rank that reported."""
    reports = [(float(now), float(most)) for now, most in _REPORT.findall(log.text)]
    if not reports:
        return None
    now, most = max(reports, key=lambda report: report[1])
    return round(now * (1 << 20)), round(most * (1 << 20))
