# SPDX-License-Identifier: Apache-2.0
"""The GPU memory that a log prints before and after an offload: whether it went down, and stays so in each cycle.

An offload that does nothing fails nowhere. Its trainer prints figures around it; three faults are read from them:
nothing left the GPU, a good part stayed, or each cycle leaves more than the one before.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.series.metrics import edges
from skill_tools.units import GIB, gib

_FIGURE = re.compile(
    r"\b(?P<when>before|after)\b(?P<of>[^\n]{0,80}?)"
    r"(?:(?<![\w.])(?P<number>\d{1,6}(?:\.\d{1,9})?) ?(?P<unit>[KMG]i?B)\b"
    r"|\((?P<unit_first>[KMG]i?B)\) ?[:=] ?(?P<behind>\d{1,6}(?:\.\d{1,9})?))",
    re.IGNORECASE,
)
_OFFLOADS = re.compile(r"off-?load|sleep|pause|releas|swap(?:ped)? out|to (?:the )?cpu", re.IGNORECASE)
_HOST = re.compile(r"\b(?:host|cpu|ram) (?:memory|virtual)|cpu virtual|rss", re.IGNORECASE)
_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_UNMOVED = 0.97  # of the memory before, left after an offload that moved nothing
_REST, _LEAST_REST_BYTES = (
    0.2,
    8 * GIB,
)  # left after one that moved a part, and more than a context takes
_GROWTH, _LEAST_GROWTH_BYTES = 1.1, GIB  # by how much three cycles or more leave more than the first one
_CYCLES = 3
_CYCLE = 100_000  # characters of a cycle in which a complaint is looked for


# The words of a line that may be why something is never freed.
_COMPLAINS = re.compile(
    r"(?i)\b(?:already|invalid|skip(?:ped|ping)|fail(?:ed|s|ure)?|warn(?:ing)?|unable|could not|cannot|leak(?:ed)?"
    r"|ignored)\b"
)
_NUMBERS = re.compile(r"\d+")


class Around(NamedTuple):
    """Figures around offloads: `unmoved`, `rest` or `growth`, the line of the last one, and the words.

    `repeated` is the log's complaint in each cycle that leaves more behind.
    """

    kind: str
    line: int
    seen: str
    repeated: str = ""


class _Figure(NamedTuple):
    after: bool
    bytes: int
    at: int


def find(log: Log) -> Around | None:
    """Return the finding of the figures around the offloads of `log`; None where there are none, or all is well."""
    figures = [
        _Figure(
            match["when"].lower() == "after",
            round(
                float(match["number"] or match["behind"])
                * _BYTES[(match["unit"] or match["unit_first"])[0].upper()]
            ),
            match.start(),
        )
        for match in edges(log.text, _FIGURE)
        if _OFFLOADS.search(match["of"]) and not _HOST.search(match["of"])
    ]
    return _growth(log, figures) or _of_a_pair(log, figures)


def _of_a_pair(log: Log, figures: Sequence[_Figure]) -> Around | None:
    """Compare the last figure before an offload with the last one of those that follow it."""
    before: _Figure | None = None
    found: Around | None = None
    for figure, following in pairwise([*figures, None]):
        assert figure is not None
        if not figure.after:
            before = figure
            continue
        if before is None or before.bytes < GIB or (following is not None and following.after):
            continue
        left, line = figure.bytes / before.bytes, log.line_at(figure.at)
        if left >= _UNMOVED:
            seen = f"{gib(before.bytes)} of GPU memory before the offload and {gib(figure.bytes)} after it"
            return Around("unmoved", line, seen)
        if left >= _REST and figure.bytes >= _LEAST_REST_BYTES:
            seen = f"{gib(figure.bytes)} of {gib(before.bytes)} stay on the GPU after the offload"
            found = found or Around("rest", line, seen)
        before = None
    return found


def _growth(log: Log, figures: Sequence[_Figure]) -> Around | None:
    last = [
        each
        for each, following in pairwise([*figures, None])
        if each is not None and each.after and (following is None or following.at - each.at > 1)
    ]
    left = [each.bytes for each in last]
    if len(left) < _CYCLES or any(later <= earlier for earlier, later in pairwise(left)):
        return None
    if left[-1] < _GROWTH * left[0] or left[-1] - left[0] < _LEAST_GROWTH_BYTES:
        return None
    seen = (
        f"after its offloads {gib(left[0])}, then {gib(left[1])}, at last {gib(left[-1])} are left on the GPU"
    )
    return Around("growth", log.line_at(last[-1].at), seen, _repeated(log, last))


def _repeated(log: Log, figures: Sequence[_Figure]) -> str:
    """Return a complaint in front of each of `figures` but one; "" without any."""
    least = len(figures) - 1
    bounds = [max(0, figures[0].at - _CYCLE), *(each.at for each in figures)]
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for start, end in pairwise(bounds):
        here: dict[str, str] = {}
        for line in log.text[max(start, end - _CYCLE) : end].splitlines():
            if _COMPLAINS.search(line):
                here.setdefault(_NUMBERS.sub("", line), line.strip())
        for plain, line in here.items():
            counts[plain] = counts.get(plain, 0) + 1
            first.setdefault(plain, line)
    return next((first[plain][:200] for plain, count in counts.items() if count >= least), "")
