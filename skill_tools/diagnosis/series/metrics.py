# SPDX-License-Identifier: Apache-2.0
"""The metrics that a log prints, each as a series of values: losses, norms of gradients, rewards, and how far
policies are apart.

Trainers print them in many forms (a Python dictionary, JSON, `name: value`, `name=value` in a progress bar, `name
value`), but call them by few names. So a value is read wherever it follows such a name, whoever prints it.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from skill_tools.diagnosis.log import Log

# By kind, the names that trainers give to a metric, without the section before it (`actor/`, `train/`).
_NAMES = {
    "loss": r"(?:lm|train(?:ing)?)[_ ]loss(?:_step)?|loss(?:_step|[_ ]train)?",
    "policy": r"(?:pg|policy|actor|act|vf|value|cri)_loss",
    "norm": r"(?:global_|total_)?grad(?:ient)?s?[._]?[_ ]?norm",
    "reward": r"rewards?|raw_reward|(?:avg|mean)[_ ]reward|score",
    "kl": r"(?:ppo_|approx_?)?kl(?:_loss|_div(?:ergence)?)?",
    "mismatch": r"mismatch[_ ]kl|gen(?:eration)?[_ ]kl[_ ]error|[a-z_]{0,40}(?:log)?probs?(?:_abs)?_diff(?:_mean)?",
    "evaluation": r"(?:eval|val(?:id(?:ation)?)?)[_/ ]loss",
}
_NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:[0-9]{1,12}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})(?:e[-+]?[0-9]{1,3})?)(?![\w%])"
_VALUE = re.compile(
    r"(?P<section>(?:[a-z_]{1,24}/){0,3})(?:"
    + "|".join(f"(?P<{kind}>{names})" for kind, names in reversed(_NAMES.items()))
    + r")(?:/(?:mean|avg))?[\"']?(?:\s{0,3}[:=]\s{0,3}|\s{1,3})[\"']?(?:(?:np\.float(?:16|32|64)|tensor)\()?(?P<value>"
    + _NUMBER
    + ")"
)
# One of these stands in each of the names: they are found in a tenth of the time that the whole pattern would take.
_WORDS = re.compile("loss|norm|reward|score|kl|diff")
_INSIDE = "_/.-"  # characters of a name beside letters and digits
_OF_A_NAME = 100  # characters of the longest name with its sections
_EVALUATES = re.compile(r"(?:eval|val|valid|validation|test)/", re.IGNORECASE)
_STEP = re.compile(
    r"(?:\b(?:global_)?step|\biteration|\brollout)[\"']?(?:\s{0,3}[:=#]\s{0,3}|\s{1,8})(?P<step>[0-9]{1,9})\b",
    re.IGNORECASE,
)
# A step's headline, where its values stand in lines below it, as NeMo-RL prints them.
_HEADLINE = re.compile(
    r"^\W*step\s{1,8}(?P<step>[0-9]{1,9})(?:\s?/\s?[0-9]{1,9})?\W*$", re.IGNORECASE | re.MULTILINE
)
EDGE = 1 << 20  # characters read of a long log, at its beginning and at its end
_BEFORE = 400  # characters of a line searched for its step
_ABOVE = 8000  # characters before a value searched for its step's headline


class Point(NamedTuple):
    """A value, and its position in the log's text."""

    value: float
    at: int


class Series(NamedTuple):
    """The values of one metric in the order of the log: its kind (a key of `_NAMES`) and its name there."""

    kind: str
    name: str
    points: tuple[Point, ...]

    @property
    def values(self) -> tuple[float, ...]:
        """The values alone."""
        return tuple(point.value for point in self.points)


def series(log: Log) -> tuple[Series, ...]:
    """Return the series that `log` prints, in the order of their first values."""
    found: dict[tuple[str, str], list[Point]] = {}
    named: dict[
        str, tuple[str, str]
    ] = {}  # kind and name of each text before a value: few, repeated in each step
    for match in _values(log.text):
        at = match.start("value")
        before = log.text[match.start() : at]
        if before not in named:
            named[before] = _kind(match), log.text[match.start() : match.end(_group(match))]
        found.setdefault(named[before], []).append(Point(float(match["value"]), at))
    return tuple(Series(kind, name, tuple(points)) for (kind, name), points in found.items())


def _values(text: str) -> Iterator[re.Match[str]]:
    """Yield the values behind the names of metrics; one that is named in two words begins at the first."""
    lower, end = lowered(text), 0
    for hit in edges(lower, _WORDS):
        if hit.start() < end:
            continue
        begin = _begin(lower, hit.start())
        before = _begin(lower, begin - 1) if begin > 0 and lower[begin - 1] == " " else begin
        match = (_VALUE.match(lower, before) if end <= before < begin else None) or _VALUE.match(lower, begin)
        if match is not None and match.end("value") > hit.start() and begin >= end:
            end = match.end()
            yield match


def _begin(text: str, position: int) -> int:
    """Return the start of the name that goes on at `position`."""
    first = max(0, position - _OF_A_NAME)
    while position > first and (text[position - 1].isalnum() or text[position - 1] in _INSIDE):
        position -= 1
    return position


@lru_cache(maxsize=2)
def lowered(text: str) -> str:
    """Return `text` in small letters, with each letter where it was."""
    lower = text.lower()
    return (
        lower
        if len(lower) == len(text)
        else "".join(low if len(low := each.lower()) == 1 else each for each in text)
    )


def edges(text: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the matches of `pattern` in `text`; of a long one, in its beginning and its end."""
    if len(text) <= 2 * EDGE:
        yield from pattern.finditer(text)
    else:
        yield from pattern.finditer(text, 0, EDGE)
        yield from pattern.finditer(text, len(text) - EDGE)


def step_at(log: Log, position: int) -> int | None:
    """Return the step in the line of `position`, else that of the headline above it, or None."""
    start = max(log.text.rfind("\n", 0, position) + 1, position - _BEFORE)
    end = log.text.find("\n", position, position + _BEFORE)
    match = _STEP.search(log.text, start, end if end >= 0 else position + _BEFORE)
    if match is None:
        headlines = _HEADLINE.finditer(log.text, max(0, position - _ABOVE), position)
        match = max(headlines, key=lambda each: each.start(), default=None)
    return int(match["step"]) if match else None


def _group(match: re.Match[str]) -> str:
    return next(kind for kind in _NAMES if match[kind])


def _kind(match: re.Match[str]) -> str:
    kind = _group(match)
    return "evaluation" if kind == "loss" and _EVALUATES.search(match["section"]) else kind
