# SPDX-License-Identifier: Apache-2.0
"""Names the library with a newer release worth a try, and its newest known release.

Apart because every answer about tensors that a trainer's own code moves needs it: most such faults were mended there.
"""

import re
from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

from skill_tools import knowledge
from skill_tools.diagnosis import code
from skill_tools.diagnosis.evidence import Conclusion, Evidence
from skill_tools.diagnosis.exceptions.signatures import home

_SAID = re.compile(r"newer|\brelease|[Uu]pgrade|#\d{3}")  # an answer that speaks of releases already
_UNNAMED = re.compile(
    r"(?P<newer>newer )?release of (?:the trainer|the library whose frame is innermost)(?!'s)\b"
)
_OF_TRAINERS = frozenset({"phases", "sleep", "memory-saver", "block-swap", "group-offload"})


def with_release(conclusion: Conclusion | None, evidence: Evidence) -> Conclusion | None:
    """Return `conclusion`, if there is one, with the library's name, and with a newer one where it names no release.

    A rule has its own change. Another failure has a release for its cause if the trainer's own code moves tensors, as
    between its phases, or if an offload's code raised it.
    """
    if conclusion is None or not conclusion.is_known:
        return conclusion
    change = named(conclusion.change, evidence)
    library = at_fault(evidence)
    full = conclusion.plans_away and evidence.out_of_memory is not None  # a matter of sizes
    if (
        conclusion.rule
        or not library
        or not _may_be_at_fault(evidence)
        or any(map(_SAID.search, change))
        or full
    ):
        return conclusion._replace(change=change)
    newest = _newest(library, evidence)
    return conclusion._replace(change=(*change, *([f"or a newer {newest}"] if newest else [])))


def _may_be_at_fault(evidence: Evidence) -> bool:
    """Return whether a trainer's, or an offload's, own code moved the tensors of the failure."""
    if evidence.failure is None:
        return False
    where = code.of(evidence.failure)
    return not _OF_TRAINERS.isdisjoint(evidence.offloads) or (
        where is not None and bool(where.code.mechanisms)
    )


def at_fault(evidence: Evidence) -> str:
    """Return the distribution that may be at fault: the failed offload's, or the trainer; or ""."""
    own = _of_the_offload(evidence)
    return own if own in knowledge.index()["releases"]["below_trainers"] else trainer(evidence) or own


def _of_the_offload(evidence: Evidence) -> str:
    """Return the distribution of the offload's code in the failure; "" for torch or an engine."""
    where = code.of(evidence.failure) if evidence.failure is not None else None
    package = where.code.package if where is not None and where.code.mechanisms else ""
    return "" if package in knowledge.index()["releases"]["no_offloads"] else package


def named(sentences: Iterable[str], evidence: Evidence) -> tuple[str, ...]:
    """Return `sentences` in which the trainer has its name, if it is known."""
    name = trainer(evidence)
    if not name:
        return tuple(sentences)
    return tuple(
        _UNNAMED.sub(lambda match: f"newer {name}" if match["newer"] else f"release of {name}", each)
        for each in sentences
    )


def trainer(evidence: Evidence) -> str:
    """Return the distribution of the trainer, or "": of the innermost frame that is one's, else of the run's framework.

    Frames of a rollout engine do not say whose fault it is: the trainer calls it at the wrong time as often.
    """
    releases = knowledge.index()["releases"]
    known = {*releases["known"], *(fix["package"] for fix in knowledge.index()["fixes"])}
    known -= set(releases["below_trainers"])
    frames = evidence.failure.frames if evidence.failure is not None else ()
    found = (*(home(frame) for frame in reversed(frames)), *evidence.dialects[:1])
    return next((name for each in found if (name := releases["aliases"].get(each, each)) in known), "")


def _newest(name: str, evidence: Evidence) -> str:
    """Return `name` with its newest known release; "" if the run has that one."""
    known = knowledge.index()["releases"]["known"].get(name, ())
    newest = next((each for each in reversed(known) if "dev" not in each), "")
    stated = evidence.releases.get(name, "")
    if not newest:
        return name
    if not stated:
        return f"{name} ({newest} is known)"
    try:
        return f"{name} than {stated} ({newest} is known)" if Version(stated) < Version(newest) else ""
    except InvalidVersion:
        return name
