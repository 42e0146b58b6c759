# SPDX-License-Identifier: Apache-2.0
"""The known faults of an offload behind a log's numbers, and the experiments that tell them apart.

A fault counts if the run shows its conditions: the offload, words of its configuration, script or log, and faulty
releases. Faults that need nothing but the offload are told as possible, never as certain. Facts are in
`knowledge/numbers.yaml`, which also has the numbers of rules about wrong numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis.series.anomalies import Anomaly
from skill_tools.diagnosis.symptoms import named, sign_in
from skill_tools.rules.versions import Standing, standing

ANYWHERE = "none"  # the offload of a fault that has nothing to do with one
_AND = "+"
_AT_RESUME = "jump-at-resume"


class Fault(NamedTuple):
    """One known fault. `shows` are its kinds of anomalies, any of them; `a+b` are two together.

    Of each group in `needs` one word must stand in the run's files or log. `tell` is one cheap experiment that tells
    this fault from others. `always`: each run with its conditions has it, whatever its numbers. `quiet`: it may be
    there without a sign in the numbers.
    """

    offload: str
    shows: tuple[str, ...]
    needs: tuple[tuple[str, ...], ...]
    releases: Mapping[str, str]
    cause: str
    tell: str
    change: tuple[str, ...]
    always: bool
    quiet: bool

    @property
    def has_evidence(self) -> bool:
        """Whether more than the offload has to be seen for it: words, a resume, or two kinds of anomalies together."""
        return bool(self.needs) or all(_AND in each or each == _AT_RESUME for each in self.shows)


class Found(NamedTuple):
    """A possible fault of the run, its signs, and its unstated releases."""

    fault: Fault
    shown_by: tuple[str, ...]
    depends_on: tuple[str, ...]

    @property
    def is_likely(self) -> bool:
        """Whether more of the fault is asked for than one word: several, a release that has it, or two anomalies."""
        fault = self.fault
        return len(fault.needs) > 1 or bool(fault.releases) or any(_AND in each for each in fault.shows)


@knowledge.derived
def load_faults() -> tuple[Fault, ...]:
    """Return every known fault, in the file's order."""
    return tuple(
        Fault(
            offload,
            tuple(entry["shows"]),
            tuple(tuple(group) for group in entry.get("needs", ())),
            entry.get("releases", {}),
            entry["cause"],
            entry["tell"],
            tuple(entry["change"]),
            entry.get("always", False),
            entry.get("quiet", False),
        )
        for entry in knowledge.index()["numbers"]["faults"]
        for offload in named(entry["offload"])
    )


@knowledge.derived
def load_rules_that_show() -> Mapping[str, frozenset[str]]:
    """Return the kinds of anomalies of each rule about wrong numbers; none for subtle ones."""
    return {entry["rule"]: frozenset(entry["shows"]) for entry in knowledge.index()["numbers"]["rules"]}


def explain(
    anomalies: Sequence[Anomaly],
    running: Mapping[str, str],
    texts: Iterable[tuple[str, str]],
    releases: Mapping[str, str],
) -> tuple[Found, ...]:
    """Return the run's possible faults that give `anomalies`, the likeliest first; without any, those of each such run.

    `running` shows each offload of the run, `texts` are its files and its log by name, `releases` those that ran.
    """
    given = [fault for fault in load_faults() if (_gives(fault, anomalies) if anomalies else fault.always)]
    return _that_the_run_may_have(given, running, tuple(texts), releases)


def suspects(
    running: Mapping[str, str], texts: Iterable[tuple[str, str]], releases: Mapping[str, str]
) -> tuple[Found, ...]:
    """Return the run's possible faults that silently give wrong results, the likeliest first.

    A run without a sign may have none of them: they are the first suspects for wrong results.
    """
    asked = [each for each in load_faults() if each.offload != ANYWHERE and (each.needs or each.quiet)]
    return _that_the_run_may_have(asked, running, tuple(texts), releases)


def _that_the_run_may_have(
    faults: Iterable[Fault],
    running: Mapping[str, str],
    read: Sequence[tuple[str, str]],
    releases: Mapping[str, str],
) -> tuple[Found, ...]:
    found = []
    for order, fault in enumerate(faults):
        if fault.offload not in (ANYWHERE, *running):
            continue
        signs = [sign_in(group, read) for group in fault.needs]
        if not all(signs):
            continue
        stands, depends_on = standing(fault.releases, releases)
        if stands is Standing.ABSENT:
            continue
        shown = tuple(dict.fromkeys((*(each for each in signs if each), running.get(fault.offload, ""))))
        rank = (not fault.has_evidence, bool(depends_on), -len(fault.needs), order)
        found.append((rank, Found(fault, tuple(filter(None, shown)), depends_on)))
    return tuple(each for _, each in sorted(found, key=lambda pair: pair[0]))


def gives(rule: str, anomalies: Sequence[Anomaly]) -> bool:
    """Return whether the fault of `rule` gives one of `anomalies`."""
    return bool(load_rules_that_show().get(rule, frozenset()) & {each.kind for each in anomalies})


def _gives(fault: Fault, anomalies: Sequence[Anomaly]) -> bool:
    kinds = {each.kind for each in anomalies}
    return any(kinds >= set(each.split(_AND)) for each in fault.shows)
