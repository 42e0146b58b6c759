# SPDX-License-Identifier: Apache-2.0
"""Libraries' faults mended by a later release, and the ones shown by a failure.

Each was read from its fix: the changed code, the functions in the fault's traceback, the text of the failure, and the
first release with the fix. A fault is told if all its signs are there and the run's release, if stated, is an older
one. Facts are in `knowledge/fixes/*.yaml`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.symptoms import load_symptoms, sign_in
from skill_tools.diagnosis.texts import position
from skill_tools.rules.versions import Standing, standing

_NUMBER = re.compile(r"/(?:pull|issues|commit)/(\w+)$")
_SHORT = 9  # characters of a commit's hash
# What any line of code can end in: a fault without a text of its own is not shown by one of these.
_ENDS_OF_ANY = (
    "out of memory",
    "allocate memory",
    "No space left",
    "Disk quota",
    "NCCL error",
    "Watchdog caught",
)
_EXACT = 3  # kinds of evidence that outweigh a text common to many runs


class Fix(NamedTuple):
    """One fault. `code` are parts of files and `functions` names; a frame has one of each, if there are any.

    `texts` stand in the failure, any of them; of each group in `needs` one word stands in the run's files or log.
    `release` is the first of `package` without the fault, "" if none was known; `since` the first with it.
    `only_stated`: its signs are those of many runs, so that the release has to be stated.
    """

    package: str
    release: str
    since: str
    code: tuple[str, ...]
    functions: tuple[str, ...]
    texts: tuple[str, ...]
    phases: tuple[str, ...]
    needs: tuple[tuple[str, ...], ...]
    cause: str
    instead: str
    source: str
    only_stated: bool

    @property
    def asked(self) -> int:
        """How many kinds of evidence it asks for."""
        return len(self.needs) + sum(map(bool, (self.code, self.functions, self.texts, self.phases)))

    @property
    def is_exact(self) -> bool:
        """Whether it asks for more than a text common to many runs."""
        return self.asked >= _EXACT

    @property
    def change(self) -> str:
        """The remedy: the first release that mends it, and its change."""
        number = _NUMBER.search(self.source)
        by = f"#{number[1]}" if number and "/commit/" not in self.source else number and number[1][:_SHORT]
        if self.release:
            return f"{self.package} {self.release} or newer ({by})"
        if "/issues/" in self.source:
            return f"no {self.package} that mends it was known when this was written ({self.source})"
        if "/commit/" in self.source:  # of a branch that its users check out
            return f"a newer {self.package}, with {by}"
        return f"{self.package} with {by}, which no release had when this was written"

    @property
    def changes(self) -> tuple[str, ...]:
        """The remedy and the one for releases with the fault, first the one that can be taken."""
        if not self.instead:
            return (self.change,)
        if self.release or "/issues/" not in self.source:
            return (self.change, f"or {self.instead}")
        return (self.instead, self.change)

    @property
    def range(self) -> dict[str, str]:
        """The releases with the fault, by distribution; none if all known ones have it."""
        bounds = [f">={self.since}"] * bool(self.since) + [f"<{self.release}"] * bool(self.release)
        return {self.package: ",".join(bounds)} if bounds else {}


class Shown(NamedTuple):
    """A fault that a failure shows, its sign, and its release if none is stated."""

    fix: Fix
    by: tuple[str, ...]
    depends_on: tuple[str, ...]


@knowledge.derived
def load_fixes() -> tuple[Fix, ...]:
    """Return every fault, in the files' order."""
    says = {symptom.id: symptom.texts for symptom in load_symptoms()}
    return tuple(
        Fix(
            entry["package"],
            entry.get("release", ""),
            entry.get("since", ""),
            tuple(entry.get("code", ())),
            tuple(entry.get("functions", ())),
            (*entry.get("text", ()), *(says[entry["symptom"]] if "symptom" in entry else ())),
            tuple(entry.get("phases", ())),
            tuple(tuple(group) for group in entry.get("needs", ())),
            entry["cause"],
            entry.get("instead", ""),
            entry["source"],
            entry.get("stated", False),
        )
        for entry in knowledge.index()["fixes"]
    )


def shown_by(
    failure: Failure | None,
    said: str,
    phase: Phase,
    texts: Iterable[tuple[str, str]],
    releases: Mapping[str, str],
) -> tuple[Shown, ...]:
    """Return the faults shown by a failure with the text `said`, the most demanding first.

    Where nothing was raised (`failure` is None), `said` is the log. `texts` are the run's files and its log by name,
    `releases` those that ran.
    """
    read = tuple(texts)
    found = []
    for order, fix in enumerate(load_fixes()):
        if fix.phases and phase not in fix.phases:
            continue
        place = _place(fix, failure)
        if place is None or not _says(fix, said):
            continue
        signs = [sign_in(group, read) for group in fix.needs]
        if not all(signs):
            continue
        stands, depends_on = standing(fix.range, releases)
        if stands is Standing.ABSENT or (fix.only_stated and depends_on):
            continue
        by = tuple(dict.fromkeys(filter(None, (place, *signs))))
        found.append(((-fix.asked, bool(depends_on), order), Shown(fix, by, depends_on)))
    return tuple(each for _, each in sorted(found, key=lambda pair: pair[0]))


def _place(fix: Fix, failure: Failure | None) -> str | None:
    """Return the innermost frame in the fault's code, "" if the fault names no code, and None without such a frame."""
    if not fix.code and not fix.functions:
        return ""
    for frame in reversed(failure.frames if failure else ()):
        path = frame.path.replace("\\", "/")
        in_code = not fix.code or any(part in path for part in fix.code)
        if in_code and (not fix.functions or frame.function.rpartition(".")[2] in fix.functions):
            return f"{path.rpartition('/')[2]}:{frame.line} {frame.function}".rstrip()
    return None


def _says(fix: Fix, said: str) -> bool:
    if fix.texts:
        return any(position(said, text) >= 0 for text in fix.texts)
    return not any(position(said, text) >= 0 for text in _ENDS_OF_ANY)
