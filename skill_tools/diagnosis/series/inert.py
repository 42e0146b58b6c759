# SPDX-License-Identifier: Apache-2.0
"""A log's own words about an offload that does nothing: disabled, ignored or not carried out, and the reason.

No fact about a framework is needed. Such a line is a cause only where the run asks for an offload.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from skill_tools.diagnosis.exceptions.own_words import Said
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.series.metrics import EDGE

# Looked for one by one: a pattern of all of them takes a second where this takes ten milliseconds.
_INERT = (
    "disabled",
    "ignored",
    "skipped",
    "overridden",
    "switched off",
    "turned off",
    "no effect",
    "without effect",
    "not have any effect",
    "not be offloaded",
    "not be moved",
    "not be enabled",
    "ignoring",
    "disabling",
    "skipping",
)
_OFFLOAD = re.compile(r"off-?load|sleep[_ ]mode|memory[ _]?saver|blocks?[_ ]?(?:to_)?swap", re.IGNORECASE)
_IS_STATED = re.compile(r"[=:] ?$")  # in front of a value of a printed configuration
_REASONS = (
    re.compile(r"\b(?:because(?: of)?|since|due to|as)\b (?P<reason>.{4,200})", re.IGNORECASE),
    re.compile(r"\b(?:when|while|unless|without|for)\b (?P<reason>.{4,200})", re.IGNORECASE),
)
_LONGEST, _MOST = 400, 300
_PREFIX = re.compile(r"^(?:[\[(][^\])\n]{0,80}[\])] ?|\w*(?:WARN(?:ING)?|INFO)\b[: ]*|\d[\d:.,T -]{7,30})+")


class Inert(NamedTuple):
    """A line about an offload without effect, and its number."""

    text: str
    line: int


def find(log: Log) -> Inert | None:
    """Return the first line of `log` about an offload that is not carried out."""
    places = sorted(place for phrase in _INERT for place in _places(log.text, phrase))
    for place in places:
        cut = log.text.rfind("\n", max(0, place - _LONGEST), place)
        start = cut + 1 if cut >= 0 else max(0, place - _LONGEST)
        end = log.text.find("\n", place, place + _LONGEST)
        line = log.text[start : end if end >= 0 else place + _LONGEST].strip()
        if _OFFLOAD.search(line) and not _IS_STATED.search(log.text, start, place):
            return Inert(_PREFIX.sub("", line), log.line_at(place))
    return None


def _places(text: str, phrase: str) -> Iterator[int]:
    """Yield where `phrase` stands in the beginning and the end of `text`, in small letters; at most a few hundred."""
    for first, last in ((0, min(EDGE, len(text))), (max(EDGE, len(text) - EDGE), len(text))):
        place = text.find(phrase, first, last)
        for _ in range(_MOST):
            if place < 0:
                break
            yield place
            place = text.find(phrase, place + 1, last)


def told(inert: Inert) -> Said:
    """Return that line as the cause, and its reason as the change."""
    found = (reason.search(inert.text) for reason in _REASONS)
    why = next((match["reason"].rstrip(" .") for match in found if match), "the condition in this line")
    return Said(
        f"the log itself says that an offload of this run does nothing (line {inert.line}): {inert.text}",
        (
            f"its condition: {why}",
            "the figures of torch.cuda.max_memory_allocated() with it and without, to be sure",
        ),
    )
