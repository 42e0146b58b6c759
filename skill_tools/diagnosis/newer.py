# SPDX-License-Identifier: Apache-2.0
"""Names the library whose newer release is worth a try, and how new the newest is that is known of it.

Apart because every answer about tensors that a trainer's own code moves needs it: most such faults were mended there.
"""

import re
from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

from skill_tools import knowledge
from skill_tools.diagnosis import code
from skill_tools.diagnosis.evidence import Conclusion, Evidence
from skill_tools.diagnosis.exceptions import interfaces

_SAID = re.compile(r"newer|\brelease|[Uu]pgrade|#\d{3}")  # an answer that speaks of releases already
_UNNAMED = re.compile(
    r"(?P<newer>newer )?release of (?:the trainer|the library whose frame is innermost)(?!'s)\b"
)
_ENGINES = ("vllm", "sglang", "torch-memory-saver")  # what a trainer calls beside itself
_OF_TRAINERS = frozenset({"phases", "sleep", "memory-saver", "block-swap", "group-offload"})


def with_release(conclusion: Conclusion | None, evidence: Evidence) -> Conclusion | None:
    """Return `conclusion`, if there is one, with the library's name, and with a newer one where it names no release.

    A rule says by itself what to change. Another failure has a release for its cause where the trainer's own code moves
    tensors, as between its phases, or where the code of an offload raised it.
    """
    name = library(evidence)
    if conclusion is None or not name or not conclusion.is_known:
        return conclusion
    change = named(conclusion.change, name)
    if conclusion.rule or not _may_be_at_fault(evidence) or any(map(_SAID.search, change)):
        return conclusion._replace(change=change)
    newest = _newest(name, evidence)
    return conclusion._replace(change=(*change, *([f"or a newer {newest}"] if newest else [])))


def _may_be_at_fault(evidence: Evidence) -> bool:
    """Return whether a trainer's, or an offload's, own code moved what the failure is about."""
    if evidence.failure is None:
        return False
    where = code.of(evidence.failure)
    return not _OF_TRAINERS.isdisjoint(evidence.offloads) or (
        where is not None and bool(where.code.mechanisms)
    )


def named(sentences: Iterable[str], name: str) -> tuple[str, ...]:
    """Return `sentences` in which the library at fault is called `name`."""
    return tuple(
        _UNNAMED.sub(lambda match: f"newer {name}" if match["newer"] else f"release of {name}", each)
        for each in sentences
    )


def library(evidence: Evidence) -> str:
    """Return the distribution whose code may be at fault: of the innermost frame, else the run's framework; or "".

    A rollout engine's frames do not say whose fault it is: the trainer calls it at the wrong time as often.
    """
    releases = knowledge.index()["releases"]
    frames = interfaces.trainer(evidence.failure) if evidence.failure is not None else ""
    found = [releases["aliases"].get(name, name) for name in (frames, *evidence.dialects[:1])]
    names = [
        name for name in found if name and (name == frames or name in releases["known"]) and name != "torch"
    ]
    return next((name for name in names if name not in _ENGINES), next(iter(names), ""))


def _newest(name: str, evidence: Evidence) -> str:
    """Return `name` with its newest known release; "" where the run has that one."""
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
