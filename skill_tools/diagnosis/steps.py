# SPDX-License-Identifier: Apache-2.0
"""Step times in a log, and the patterns in them that offloading is known for.

It reads Megatron's iteration lines and the `s/it` of progress bars. A pattern points to likely causes and proves
none: a slow first step suggests pinning or compilation, rising step times a leak or swapping.
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skill_tools.diagnosis.failures import is_of_another_bar
from skill_tools.diagnosis.log import Log

_ITERATION = re.compile(r"elapsed time per iteration \(ms\): ([0-9]{1,12}(?:\.[0-9]+)?)")
_PROGRESS = re.compile(r"[ ,]([0-9]{1,9}(?:\.[0-9]+)?)s/it\b")
# DeepSpeed's own timers of a step, in ms.
_TIMERS = re.compile(
    r"\bfwd(?:_microstep)?: ([0-9]{1,9}(?:\.[0-9]+)?) \| bwd(?:_microstep)?: ([0-9]{1,9}(?:\.[0-9]+)?)[^\n]{0,200}?"
    r"\| step(?:_microstep)?: ([0-9]{1,9}(?:\.[0-9]+)?)"
)
_SLOW_FIRST, _RISING, _LEAST_STEPS = 4.0, 1.2, 6


@dataclass(frozen=True, slots=True)
class StepPattern:
    """One pattern: the observation, the likely cause, and the rule that tells more, if any."""

    line: int
    seen: str
    points_to: str
    rule: str = ""


def times_s(log: Log) -> tuple[float, ...]:
    """Return the step times of the log in seconds, in order."""
    iterations = [float(value) / 1000 for value in _ITERATION.findall(log.text)]
    return tuple(iterations or (float(match.group(1)) for match in _training_bars(log)))


def usual_s(times: Sequence[float]) -> float | None:
    """Return the median of step times without the first, which pins memory and compiles."""
    return statistics.median(times[1:] or times) if times else None


def update_s(log: Log) -> tuple[float, float] | None:
    """Return the usual time of the optimizer's step and of forward and backward, where timers of the log say them."""
    timed = [tuple(float(each) / 1000 for each in match) for match in _TIMERS.findall(log.text)]
    if not timed:
        return None
    forward, backward, step = (statistics.median(column) for column in zip(*timed, strict=True))
    return step, forward + backward


def _training_bars(log: Log) -> Iterator[re.Match[str]]:
    """Return the times of bars that count steps; those of loading and of data sets name their unit."""
    return (match for match in _PROGRESS.finditer(log.text) if not is_of_another_bar(log.text, match.start()))


def patterns(log: Log, steps: Sequence[float]) -> tuple[StepPattern, ...]:
    """Return the patterns that stand out in the step times of `log`."""
    found: list[StepPattern] = []
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
    match = _ITERATION.search(log.text) or next(_training_bars(log), None)
    return log.line_at(match.start()) if match else 1
