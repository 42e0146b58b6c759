# SPDX-License-Identifier: Apache-2.0
"""First suspects for a log without a failure: a slow or standing run, wrong results, empty saves.

Its numbers may be wrong in silence, its steps slow, or it may stand still at its last line. None of it is claimed:
each is possible under an offload that the run shows, and comes with the way to see whether it is so.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis import newer, no_effect, phases, steps
from skill_tools.diagnosis.evidence import Evidence, Suspect, of_finding
from skill_tools.diagnosis.exceptions import launches, own_files
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.series import numbers
from skill_tools.diagnosis.symptoms import named, sign_in
from skill_tools.rules.finding import Finding
from skill_tools.rules.versions import Standing, standing

_MOST = 3  # faults without a sign in the log that an answer names
_MOST_SLOW = 2
_LONG_S = 15  # seconds of a step from which its speed is the likeliest complaint
_DONE = re.compile(r"100%\||train_runtime|[Tt]raining (?:complete|finished|done)")
_ANY = "any"  # of a cause that needs no offload
_LAST = 600  # characters at a log's end in which its last line stands


class Complaint(StrEnum):
    """A complaint about a run without a failure, in an answer's words."""

    RESULTS = "its results, or its memory, are wrong all the same"
    SPEED = "it is slower than it should be"
    STILL = "it stands still there"
    SAVED = "its saved files are empty or cannot be read"


class _Possible(NamedTuple):
    """A possible cause under `offload`, in `releases` or in any.

    `needs` and `lacks` are words of the run's files or log.
    """

    offload: str
    needs: tuple[tuple[str, ...], ...]
    lacks: tuple[str, ...]
    releases: Mapping[str, str]
    cause: str
    tell: str
    change: tuple[str, ...]


@knowledge.derived
def load(part: str) -> tuple[_Possible, ...]:
    """Return causes of slow steps (`slow`), or gaps in saves (`saves`), in the file's order."""
    return tuple(
        _Possible(
            offload,
            tuple(map(tuple, entry.get("needs", ()))),
            tuple(entry.get("lacks", ())),
            entry.get("releases", {}),
            entry["cause"],
            entry["tell"],
            tuple(entry["change"]),
        )
        for entry in knowledge.index()["quiet"][part]
        for offload in named(entry["offload"])
    )


def suspects(
    evidence: Evidence,
    log: Log,
    texts: Sequence[tuple[str, str]],
    releases: Mapping[str, str],
    *,
    usual_step_s: float | None,
) -> dict[Complaint, tuple[Suspect, ...]]:
    """Return possible causes by complaint, the likeliest first; none where the run failed."""
    if evidence.failure is not None:
        return {}
    timed = steps.update_s(log)
    waits = timed is not None and timed[0] > timed[1]
    found = {
        Complaint.STILL: tuple(_still(log, evidence)),
        Complaint.RESULTS: _wrong(evidence, texts, releases),
        Complaint.SPEED: tuple(_slow(evidence, texts, releases)),
        Complaint.SAVED: tuple(_saved(evidence, texts, releases)),
    }
    if waits or (usual_step_s or 0) > _LONG_S:
        found = {Complaint.SPEED: found.pop(Complaint.SPEED), **found}
    if found[Complaint.SAVED] and _DONE.search(log.text, max(0, len(log.text) - _LAST)):
        found = {Complaint.SAVED: found.pop(Complaint.SAVED), **found}
    if found[Complaint.STILL] and usual_step_s is None:
        found[Complaint.SPEED] = ()
    if timed is not None and waits and found[Complaint.SPEED]:
        first, *others = found[Complaint.SPEED]
        seen = f"the optimizer's step takes {timed[0]:.2f} s, forward and backward {timed[1]:.2f} s"
        found[Complaint.SPEED] = (first._replace(cause=f"{seen}: {first.cause}"), *others)
    return {complaint: each for complaint, each in found.items() if each}


def _wrong(
    evidence: Evidence, texts: Sequence[tuple[str, str]], releases: Mapping[str, str]
) -> tuple[Suspect, ...]:
    """Return silent faults that are possible under the run's offloads."""
    slips = (Suspect(each.cause, f"then {each.change}") for each in own_files.in_scripts(texts[:-1]))
    own = (_of_a_finding(each) for each in evidence.findings if each.effect == "wrong-numerics")
    faults = (_of_a_fault(each) for each in numbers.suspects(evidence.offloads, texts, releases))
    found = (*slips, *own, *no_effect.rest(evidence), *faults)[:_MOST]
    return tuple(Suspect(each.cause, *newer.named([each.check], evidence)) for each in found)


def _of_a_finding(finding: Finding) -> Suspect:
    """Return the configuration's own finding about a run that goes wrong in silence, and its change."""
    told = of_finding(finding)
    return Suspect(f"{told.cause}: {finding.message}", f"then {_either(told.change)}")


def _of_a_fault(found: numbers.Found) -> Suspect:
    fault = found.fault
    if_ = f"if this is {' and '.join(found.depends_on)}, " if found.depends_on else ""
    return Suspect(
        f"{if_}{fault.cause} ({', '.join(found.shown_by)})",
        f"to be sure: {fault.tell}; then {_either(fault.change)}",
    )


def _slow(
    evidence: Evidence, texts: Sequence[tuple[str, str]], releases: Mapping[str, str]
) -> Iterator[Suspect]:
    """Yield causes of slow steps under the run's offloads: the configuration's own findings first."""
    own = [each for each in evidence.findings if each.effect == "slow"][:1]
    yield from map(_of_a_finding, own)
    yield from _possible("slow", evidence, texts, releases)[:_MOST_SLOW]


def _saved(
    evidence: Evidence, texts: Sequence[tuple[str, str]], releases: Mapping[str, str]
) -> Iterator[Suspect]:
    """Yield possible gaps in a save under the run's offloads, where the log has a save."""
    if phases.saves(texts[-1][1]):
        yield from _possible("saves", evidence, texts, releases)[:1]


def _possible(
    part: str, evidence: Evidence, texts: Sequence[tuple[str, str]], releases: Mapping[str, str]
) -> list[Suspect]:
    """Return causes that fit: those of the stated release first, those of a release that may run last."""
    found: dict[str, tuple[int, Suspect]] = {}
    for each in load(part):
        here = each.offload in (_ANY, *evidence.offloads) and each.cause not in found
        if not (here and all(sign_in(group, texts) for group in each.needs)) or sign_in(each.lacks, texts):
            continue
        stands, depends_on = standing(each.releases, releases)
        if stands is Standing.ABSENT:
            continue
        if_ = f"if this is {' and '.join(depends_on)}, " if depends_on else ""
        told = Suspect(
            f"{if_}{each.cause} ({evidence.offloads.get(each.offload) or sign_in(each.needs[0], texts)})",
            f"to be sure: {each.tell}; then {_either(each.change)}",
        )
        found[each.cause] = (1 if not each.releases else 2 if depends_on else 0, told)
    return [told for _, told in sorted(found.values(), key=lambda pair: pair[0])]


def _still(log: Log, evidence: Evidence) -> Iterator[Suspect]:
    """Yield the work that a run had begun at its log's last line, and the calls that a script leaves to one rank."""
    last = log.text[-_LAST:].rstrip().replace("\r", "\n").rpartition("\n")[2]
    for entry in knowledge.index()["quiet"]["ends"]:
        if any(text in last for text in named(entry["text"])):
            yield Suspect(
                f"{entry['cause']} (the log's last line: {last.strip()[:80]})",
                f"then {_either(entry['change'])}",
            )
            break
    if alone := launches.of_one_rank(evidence):
        yield Suspect(alone.cause, f"then {alone.change}")


def _either(changes: Sequence[str]) -> str:
    return " or ".join(each.removeprefix("or ") for each in changes)
