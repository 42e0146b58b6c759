# SPDX-License-Identifier: Apache-2.0
"""Compares a failure with where the run's offloads keep their tensors, and names the misplaced one.

A failure states the fault of a tensor's place: another device, no elements, freed memory, no room, or a wrong record of
the offload. Its frames say which tensor was used, and when. A row of `knowledge/residency.yaml` that has all of it for
an offload of the run is the cause; a second one, of another offload, is told with the difference of the two.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.residency.moments import Moment, moment_of
from skill_tools.diagnosis.symptoms import (
    Offload,
    is_between_gpus,
    load_offloads,
    load_symptoms,
    named,
    of_the_code,
    shows,
    sign_in,
)

# Where a tensor has to lie for each kind of failure (an entry of symptoms.yaml).
PLACES: Mapping[str, tuple[str, ...]] = {
    "two-devices": ("cpu",),
    "empty-weights": ("share", "meta"),
    "memory-that-is-gone": ("unmapped", "in-flight"),
    "memory-of-another-process": ("unmapped",),
    "modes-that-differ": ("kept",),
    "gpu-memory": ("gpu",),
    "saved-tensors": ("record",),
    "states-that-differ": ("record",),
}
_NO_PLACES = ("record", "gpu", "collective")  # of rows without a place for a tensor itself
# Words of an unread library: one sentence about a tensor, the CPU and an accelerator.
_OF_BOTH = re.compile(
    r"(?i)^(?=.*\b(?:tensor|device|weight|parameter|storage|buffer)s?\b)(?=.*\b(?:cuda|gpu|npu|xpu|hpu|musa)\b).*\bcpu\b"
)
_LOOKUPS = (
    "KeyError",
    "IndexError",
    "AssertionError",
)  # errors of a record that does not fit, in its own code


class Row(NamedTuple):
    """Where `offload` keeps `tensors` at `moments` (none: all).

    It holds beside none of the offloads in `unless`; `inside` asks for a frame in the offload's own code, `needs` for
    one of these words in the run's files, `lacks` for none of these.
    """

    offload: str
    unless: frozenset[str]
    tensors: tuple[str, ...]
    lies: str
    moments: tuple[str, ...]
    inside: bool
    needs: tuple[str, ...]
    lacks: tuple[str, ...]
    where: str
    past: str
    change: tuple[str, ...]


class Placed(NamedTuple):
    """A row that fits a failure, its offload, and the run's sign of it."""

    row: Row
    offload: Offload
    shown_by: str


class Found(NamedTuple):
    """The rows that fit a failure: the moment, the first row, and the first of another offload if there is one."""

    moment: Moment
    first: Placed
    other: Placed | None


@knowledge.derived
def load_rows() -> tuple[Row, ...]:
    """Return every row, in the file's order."""
    return tuple(
        Row(
            offload,
            frozenset(entry.get("unless", ())),
            tuple(entry["tensors"]),
            entry["lies"],
            tuple(entry.get("moments", ())),
            entry.get("inside", False),
            tuple(entry.get("needs", ())),
            tuple(entry.get("lacks", ())),
            entry["where"],
            entry["past"],
            tuple(entry["change"]),
        )
        for entry in knowledge.index()["residency"]
        for offload in named(entry["offload"])
    )


def find(
    failure: Failure,
    said: str,
    phase: Phase,
    running: Mapping[str, str],
    texts: Sequence[tuple[str, str]] = (),
) -> Found | None:
    """Return the rows that fit `failure` with the text `said`.

    `running` shows each offload of the run, `texts` are its files by name.
    """
    moment, places = moment_of(failure, phase), _places(failure, said)
    if moment is None or not places:
        return None
    inner = of_the_code(failure)
    fitting = sorted(
        (row for row in load_rows() if _holds(row, running, texts) and _fits(row, moment, places, inner)),
        key=lambda row: _rank(row, moment, places, inner),
    )
    placed = [Placed(row, load_offloads()[row.offload], running[row.offload]) for row in fitting]
    if not placed:
        return None
    first = placed[0]
    # A row with its own code in the failure is not weighed against others.
    others = placed[1:] if first.row.offload not in inner else ()
    return Found(
        moment, first, next((each for each in others if each.row.offload != first.row.offload), None)
    )


def there(failure: Failure, phase: Phase, running: Mapping[str, str]) -> Placed | None:
    """Return where an offload of the run keeps the tensors of the failing code, whatever `failure` says of it."""
    moment = moment_of(failure, phase)
    if moment is None:
        return None
    for row in load_rows():
        here = moment.name in row.moments and not set(row.tensors).isdisjoint(moment.touched)
        if here and row.lies not in _NO_PLACES and _holds(row, running):
            return Placed(row, load_offloads()[row.offload], running[row.offload])
    return None


def of_moment(name: str, running: Mapping[str, str]) -> Placed | None:
    """Return the first row of the moment `name` of an offload of the run, whatever failed."""
    for row in load_rows():
        if name in row.moments and _holds(row, running):
            return Placed(row, load_offloads()[row.offload], running[row.offload])
    return None


def of_a_hang(phase: Phase, running: Mapping[str, str]) -> Placed | None:
    """Return the first row with weights gathered by all ranks at the hanging moment: a save, a load or a step."""
    moment = {Phase.SAVE: "save", Phase.RESUME: "resume"}.get(phase, "forward")
    for row in load_rows():
        if row.lies == "collective" and moment in row.moments and _holds(row, running):
            return Placed(row, load_offloads()[row.offload], running[row.offload])
    return None


def _places(failure: Failure, said: str) -> tuple[str, ...]:
    """Return the possible places of a tensor by the words of `failure`, the likeliest first: one that it names."""
    found = [
        place for kind in load_symptoms() if shows(kind, failure, said) for place in PLACES.get(kind.id, ())
    ]
    if not found and _OF_BOTH.search(said):
        found = ["cpu"]
    found.sort(key=lambda place: place not in said)
    if is_between_gpus(said):
        found = [place for place in found if place != "cpu"]
    if failure.error.rpartition(".")[2] in _LOOKUPS:
        found.append("record")
    return tuple(dict.fromkeys(found))


def _holds(row: Row, running: Mapping[str, str], texts: Sequence[tuple[str, str]] = ()) -> bool:
    """Return whether the run has the offload of `row`, no excluding one, and a needed word."""
    return (
        row.offload in running
        and row.unless.isdisjoint(running)
        and (not row.needs or sign_in(row.needs, texts) is not None)
        and (not row.lacks or sign_in(row.lacks, texts) is None)
    )


def _fits(row: Row, moment: Moment, places: Sequence[str], inner: frozenset[str]) -> bool:
    return (
        row.lies in places
        and (not row.moments or moment.name in row.moments)
        and not set(row.tensors).isdisjoint(moment.touched)
        and (not row.inside or row.offload in inner)
    )


def _rank(
    row: Row, moment: Moment, places: Sequence[str], inner: frozenset[str]
) -> tuple[bool, int, bool, bool, int]:
    """Return a sort key, smaller for a row closer to the failure."""
    touched = min(moment.touched.index(each) for each in row.tensors if each in moment.touched)
    return (row.offload not in inner, places.index(row.lies), not row.needs, not row.moments, touched)
