"""Step times in a log, and the patterns in them that offloading is known for.

It reads Megatron's iteration lines and the `s/it` of progress bars. A pattern points to likely causes and proves
none: a slow first step suggests pinning or compilation, rising step times a leak or swapping.
"""

import re
import statistics
from dataclasses import dataclass

from skill_tools.diagnosis.log import Log

_ITERATION = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_PROGRESS = re.compile(r"[ ,]([0-9.]+)s/it\b")
_STARVED = re.compile(r"Setting OMP_NUM_THREADS environment variable for each process to be 1")
_SLOW_FIRST, _RISING, _LEAST_STEPS = 4.0, 1.2, 6


@dataclass(frozen=True, slots=True)
class StepPattern:
    """One pattern: what was seen, what it points to, and the rule that tells more, if any."""

    line: int
    seen: str
    points_to: str
    rule: str = ""


def times_s(log: Log) -> tuple[float, ...]:
    """Return the step times of the log in seconds, in order."""
    iterations = [float(value) / 1000 for value in _ITERATION.findall(log.text)]
    return tuple(iterations or (float(value) for value in _PROGRESS.findall(log.text)))


def patterns(log: Log) -> tuple[StepPattern, ...]:
    """Return the patterns that stand out."""
    found = []
    if match := _STARVED.search(log.text):
        found.append(
            StepPattern(
                log.line_at(match.start()),
                "torchrun set OMP_NUM_THREADS to 1",
                "a CPU optimizer that runs on one thread a rank: export OMP_NUM_THREADS = cores / ranks of a node",
                "oc-cpu-threads",
            )
        )
    steps = times_s(log)
    if len(steps) < _LEAST_STEPS:
        return tuple(found)
    usual = statistics.median(steps[1:])
    first_line = _line_of_first_step(log)
    if steps[0] > _SLOW_FIRST * usual:
        seen = f"the first step took {steps[0]:.1f} s, the usual one {usual:.2f} s"
        found.append(
            StepPattern(first_line, seen, "host memory being pinned, or compilation; it happens once")
        )
    third = len(steps) // 3
    early, late = statistics.median(steps[1 : 1 + third]), statistics.median(steps[-third:])
    if late > _RISING * early:
        seen = f"steps went from {early:.2f} s to {late:.2f} s"
        found.append(
            StepPattern(first_line, seen, "host memory filling up or swapping; watch it with free -g")
        )
    return tuple(found)


def _line_of_first_step(log: Log) -> int:
    match = _ITERATION.search(log.text) or _PROGRESS.search(log.text)
    return log.line_at(match.start()) if match else 1
