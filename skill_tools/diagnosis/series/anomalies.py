# SPDX-License-Identifier: Apache-2.0
"""Anomalies in the numbers of a run without a failure: values that are none, a leaping loss, no gradient.

An anomaly is an observation and its place. It is strong if a healthy run never shows it. An anomaly of healthy runs too
(a flat loss) counts only beside a fault known to give it. Their causes are in `numbers`.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.series import metrics
from skill_tools.diagnosis.series.metrics import Series

KINDS = {
    "nan": "a loss or the norm of the gradients is not finite, and stays so",
    "zero-gradient": "the norm of the gradients is 0",
    "zero-loss": "a loss is exactly 0 after it was none",
    "jump": "the loss leaps within the first steps and stays there",
    "jump-at-resume": "the loss is higher after a checkpoint was loaded, or rises from there",
    "collapse": "the reward falls to nothing and stays there",
    "divergence": "rollout engine and trainer compute different numbers for the same text at once, and stay so",
    "kl": "the policy leaves its reference at once, and stays away",
    "garbage": "generated text is one character over and over",
    "untrained": "an adapter's weights are still the zeros that they began with",
    "flat": "the loss does not go down",
    "flat-reward": "the reward does not go up",
    "high-loss": "the loss is above that of guessing",
    "spike": "the norm of the gradients is many times as large for one step",
}
_WEAK = frozenset({"flat", "flat-reward", "high-loss", "kl", "spike"})
_RESUMES = re.compile(
    r"loading (?<=\bloading )(?:distributed |the )?checkpoint (?!shards)"
    r"|resum(?<=\bresum)(?:e|ed|ing) (?:training )?from|successfully loaded checkpoint"
    r"|load_checkpoint(?<=\bload_checkpoint)\b"
)
_GARBAGE = re.compile(r"!{12,}")  # other characters are lines of a banner or digits of an address
_FIRST_LOSSES, _LEAP, _LEAST_LEAP = 12, 3.0, 2.0
_APART, _LEAST_APART, _LEAST_KL = 10.0, 0.05, 1.0
# A loss moves by a tenth from step to step, the norm of its gradients by a factor; the mean loss of a policy is noise.
_AFTER_RESUME, _LEAST_AFTER_RESUME = {"loss": 1.5, "norm": 5.0}, 0.1
_NOTHING, _LEAST_REWARD = 0.1, 0.05  # the rest of a fallen reward, and its least value before
# The time of a reward at nothing that is no chance: a small one comes from few answers, and is often 0.
_SMALL_REWARD, _AT_ZERO, _AT_LITTLE = 0.2, (2, 5), (3, 8)
_GUESSING = 12.7  # nats: every word of 327,000 alike, a larger vocabulary than any model in use
_FLAT, _LEAST_VALUES, _LEAST_STEPS = 0.02, 6, 50
_SPIKE = 50.0
_FIRST_ROUNDS = (
    3  # steps in which an offload has moved all its tensors; a bad batch or a high rate takes longer
)


# Statements of a report about numbers that it does not show; a warning may say the same, so they count like a weak one.
_VERB = r"(?:is|are|was|were|be|becom\w{1,4}|became|goes to|went to|turn\w{0,3} (?:in)?to|stay\w{0,3})"
_IS = rf"\W{{1,3}}{_VERB}\W(?:\w{{1,12}} ){{0,3}}"
_GRADIENT = r"grad(?<=\bgrad)(?:ient)?s?(?:[ _]norm)?"
_NO = r"\b[^.\n]{0,30}(?:\bnot|n't|\bnever|\bno longer) "
_NONSENSE = r"(?:gibberish|garbage|garbled|nonsense)"
_TEXT = r"(?:completion|generation|rollout|output|response|text)"
_SAID = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "nan": rf"(?:loss(?<=\bloss)(?:es)?|{_GRADIENT}){_IS}(?:nan|inf)\b",
        "zero-gradient": rf"{_GRADIENT}{_IS}(?:0(?:\.0{{1,6}})?|zero)(?!\.?\w)",
        "untrained": r"lora_?b\b[^.\n]{0,60}\b(?:zeros?|0\.0)\b|zeros? [^.\n]{0,20}\blora_?b\b"
        r"|\b(?:adapter|lora)s? [^.\n]{0,30}(?:no effect|changes? nothing|(?:is|are) a no-op)",
        "garbage": rf"\b{_TEXT}s?\b[^.\n]{{0,40}}\b{_NONSENSE}\b|\b{_NONSENSE} {_TEXT}",
        "flat": rf"loss(?<=\bloss){_NO}(?:go(?:es|ing)? down|decreas|converg|fall|improv)",
        "flat-reward": rf"reward(?<=\breward){_NO}(?:go(?:es|ing)? up|increas|improv|chang)",
        "jump-at-resume": r"loss(?<=\bloss)\b[^.\n]{0,30}\b(?:jump|spike|explode|higher)"
        r"[^.\n]{0,40}\b(?:resum|load|restor)",
    }.items()
}
# One of these words stands in each such sentence: where none does, it is not looked for.
_OF_SAID = {
    "nan": ("nan", " inf"),
    "untrained": ("lora", "adapter"),
    "garbage": ("gibberish", "garbage", "garbled", "nonsense"),
    "flat": (" down", "decreas", "converg", " fall", "improv"),
    "flat-reward": ("reward",),
    "jump-at-resume": ("jump", "spike", "explode", "higher"),
}


class Anomaly(NamedTuple):
    """One thing that is wrong: its kind, its position and line in the log, and the observation in a few words.

    `is_said` is true where no number shows it and a sentence of the text says it. `good` counts the values of the
    series before it.
    """

    kind: str
    at: int
    line: int
    seen: str
    is_said: bool = False
    good: int = 0

    @property
    def is_at_the_first_round(self) -> bool:
        """Whether the run was right at first, and wrong as soon as its offload had moved something once or twice."""
        return 0 < self.good <= _FIRST_ROUNDS

    @property
    def is_strong(self) -> bool:
        """Whether a healthy run does not show it."""
        return self.kind not in _WEAK and not self.is_said


def find(log: Log) -> tuple[Anomaly, ...]:
    """Return the anomalies in the numbers of `log`, the strong first, then in its order; each once a series."""
    read = metrics.series(log)
    found = [anomaly for each in read for anomaly in _of_series(log, each)]
    found += _zero_losses(log, read)
    if match := _GARBAGE.search(log.text):
        line = log.line_at(match.start())
        found.append(Anomaly("garbage", match.start(), line, "generated text is !!!! and nothing else"))
    found += _said(log, {each.kind for each in found})
    rewarded = any(each.kind == "reward" for each in read)
    if rewarded:  # where all answers of a group are as good, there is no gradient
        found = [each for each in found if each.kind != "zero-gradient"]
    return tuple(sorted(found, key=lambda each: (not each.is_strong, each.at)))


def _of_series(log: Log, of: Series) -> Iterator[Anomaly]:
    for kind, check in _CHECKS.get(of.kind, ()):
        if (place := check(log, of)) is not None:
            index, what = place
            at = of.points[index].at
            seen = f"{of.name} {what} {_where(log, of, index)}".rstrip()
            yield Anomaly(kind, at, log.line_at(at), seen, good=index)


def _where(log: Log, of: Series, index: int) -> str:
    if index == 0:
        return "from its first value on"
    before, at = of.points[index - 1].at, of.points[index].at
    step = metrics.step_at(log, at)
    where = f"step {step}" if step is not None else f"its value {index + 1}"
    left_out = at - before > metrics.EDGE or any(before < cut <= at for cut, _ in log.cuts)
    return f"from {where} on, or from one before it that was not read" if left_out else f"from {where} on"


def _not_finite(_: Log, of: Series) -> tuple[int, str] | None:
    values = of.values
    tail = next((place for place in range(len(values), 0, -1) if math.isfinite(values[place - 1])), 0)
    if len(values) - tail < 2:
        return None
    return tail, "is nan" if any(map(math.isnan, values[tail:])) else "is inf"


def _no_gradient(_: Log, of: Series) -> tuple[int, str] | None:
    tail = _tail(of.values, lambda value: value == 0)
    return (tail, "is 0") if len(of.values) - tail >= 3 else None


def _leap(_: Log, of: Series) -> tuple[int, str] | None:
    """Return where a loss leaps within its first values and stays: learnt or loaded state is lost."""
    place = _parted(of.values[:_FIRST_LOSSES], _LEAP, _LEAST_LEAP)
    if place is None:
        return None
    return place, f"leaps from {of.values[place - 1]:.2f} to {of.values[place]:.2f} and stays there"


def _apart(_: Log, of: Series) -> tuple[int, str] | None:
    least = _LEAST_KL if of.kind == "kl" else _LEAST_APART
    place = _parted([abs(value) for value in of.values], _APART, least)
    if place is None:
        return None
    return place, f"goes from {of.values[place - 1]:.4g} to {of.values[place]:.4g} and stays high"


def _collapse(_: Log, of: Series) -> tuple[int, str] | None:
    values = of.values
    if len(values) < 3 or values[0] < _LEAST_REWARD:
        return None
    best = values[0]
    tail = _tail(values, lambda value: value <= _NOTHING * best)
    long_enough = (_AT_LITTLE if any(values[tail:]) else _AT_ZERO)[best < _SMALL_REWARD]
    if tail == 0 or len(values) - tail < long_enough:
        return None
    return tail, f"falls from {statistics.median(values[:tail]):.2f} to {values[tail]:.2f} and stays there"


def _after_resume(log: Log, of: Series) -> tuple[int, str] | None:
    """Return the place of a loss above that before a load of a checkpoint; if the log begins there, of its rise."""
    mark = next((each for each in reversed(_resumes(log.text)) if each < of.points[-1].at), None)
    if mark is None:
        return None
    first = next(place for place, point in enumerate(of.points) if point.at > mark)
    before, after = of.values[:first][-5:], of.values[first : first + _FIRST_LOSSES]
    if len(after) < 2 or not all(map(math.isfinite, (*before, *after))):
        return None
    times = _AFTER_RESUME[of.kind]
    if before and min(after) > times * max(before) and min(after) > max(before) + _LEAST_AFTER_RESUME:
        return first, f"was {before[-1]:.4g} before the checkpoint was loaded and is {after[0]:.4g}"
    if (
        not before
        and len(after) >= 3
        and after[0] > _LEAST_AFTER_RESUME
        and min(after[1:]) > times * after[0]
    ):
        return first + 1, f"rises from {after[0]:.4g} after the checkpoint was loaded to {after[1]:.4g}"
    return None


@lru_cache(maxsize=4)
def _resumes(text: str) -> tuple[int, ...]:
    return tuple(match.start() for match in metrics.edges(metrics.lowered(text), _RESUMES))


def _flat(log: Log, of: Series) -> tuple[int, str] | None:
    values = of.values
    if len(values) < _LEAST_VALUES or not all(map(math.isfinite, values)) or _steps(log, of) < _LEAST_STEPS:
        return None
    third = len(values) // 3
    early, late = statistics.mean(values[:third]), statistics.mean(values[-third:])
    if early <= 0 or abs(late - early) > _FLAT * early:
        return None
    return 0, f"stays where it is: {early:.4g} at the beginning and {late:.4g} at the end,"


def _steps(log: Log, of: Series) -> int:
    """Return how many steps the values are of; where their lines name none, as many as there are values."""
    ends = [metrics.step_at(log, of.points[place].at) for place in (0, -1)]
    return len(of.points) if None in ends else abs((ends[1] or 0) - (ends[0] or 0))


def _guessing(_: Log, of: Series) -> tuple[int, str] | None:
    values = [value for value in of.values if math.isfinite(value)]
    above = len(values) >= 3 and min(values) > _GUESSING
    return (0, f"is {values[0]:.1f}, more than guessing among all words gives,") if above else None


def _spike(_: Log, of: Series) -> tuple[int, str] | None:
    values = [value if math.isfinite(value) else 0.0 for value in of.values]
    for place in range(5, len(values)):
        usual = statistics.median(values[max(0, place - 20) : place])
        if usual > 0 and values[place] > _SPIKE * usual:
            return place, f"spikes to {values[place]:.4g} where {usual:.4g} is usual,"
    return None


def _zero_losses(log: Log, read: Sequence[Series]) -> Iterator[Anomaly]:
    """Yield losses of exactly 0: after others, or while the norm of the gradients is not finite.

    A policy's loss is 0 on average in a healthy run (GRPO's), so it counts only beside such a norm.
    """
    broken = any(each.kind == "norm" and _not_finite(log, each) for each in read)
    for each in read:
        tail = _tail(each.values, lambda value: value == 0)
        lost = any(abs(value) > _NOTHING for value in each.values[:tail])
        if each.kind == "loss" and len(each.values) - tail >= 3 and (lost or broken):
            at = each.points[tail].at
            yield Anomaly("zero-loss", at, log.line_at(at), f"{each.name} is 0 {_where(log, each, tail)}")


def _said(log: Log, shown: set[str]) -> Iterator[Anomaly]:
    """Yield the sentences of the text about its numbers, where no number shows it."""
    lower = metrics.lowered(log.text)
    for kind, pattern in _SAID.items():
        if kind in shown or not any(word in lower for word in _OF_SAID.get(kind, ("",))):
            continue
        if (match := next(metrics.edges(lower, pattern), None)) is not None:
            line, said = log.line_at(match.start()), log.text[match.start() : match.end()]
            yield Anomaly(kind, match.start(), line, f'it says "{said}" (line {line})', is_said=True)


def _tail(values: Sequence[float], holds: Callable[[float], bool]) -> int:
    """Return the start of the values for which `holds` is true up to the end."""
    return next((place for place in range(len(values), 0, -1) if not holds(values[place - 1])), 0)


def _parted(values: Sequence[float], times: float, least: float) -> int | None:
    """Return the first place from which all values are `times` as much as all before, and more than `least` beyond."""
    if not all(map(math.isfinite, values)):
        return None
    lowest: list[float] = []
    for value in reversed(values):
        lowest.append(min(value, lowest[-1]) if lowest else value)
    lowest.reverse()
    highest = -math.inf
    for place in range(1, len(values)):
        highest = max(highest, values[place - 1])
        if len(values) - place >= 2 and lowest[place] > times * highest and lowest[place] > highest + least:
            return place
    return None


_Check = Callable[[Log, Series], tuple[int, str] | None]
_CHECKS: dict[str, tuple[tuple[str, _Check], ...]] = {
    "loss": (
        ("nan", _not_finite),
        ("jump-at-resume", _after_resume),
        ("jump", _leap),
        ("flat", _flat),
        ("high-loss", _guessing),
    ),
    "policy": (("nan", _not_finite),),
    "norm": (
        ("nan", _not_finite),
        ("zero-gradient", _no_gradient),
        ("jump-at-resume", _after_resume),
        ("spike", _spike),
    ),
    "reward": (("collapse", _collapse), ("flat-reward", _flat)),
    "kl": (("nan", _not_finite), ("kl", _apart)),
    "mismatch": (("nan", _not_finite), ("divergence", _apart)),
}
