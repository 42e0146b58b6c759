# SPDX-License-Identifier: Apache-2.0
"""All that a log and its run's configuration show, and the form of an answer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.diagnosis.builds import BuildError
from skill_tools.diagnosis.changes import written_settings
from skill_tools.diagnosis.failures import Failure, Frame
from skill_tools.diagnosis.fixes import Shown
from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.memory import OutOfMemory
from skill_tools.diagnosis.memory_owners import Owners
from skill_tools.diagnosis.messages import Seen
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.series.anomalies import Anomaly
from skill_tools.diagnosis.series.around import Around
from skill_tools.diagnosis.series.inert import Inert
from skill_tools.diagnosis.series.numbers import Found
from skill_tools.diagnosis.steps import StepPattern
from skill_tools.rules.finding import Finding
from skill_tools.rules.knowledge import Rule


class Evidence(NamedTuple):
    """All facts of a log and its run's configuration. `dialects` are those of the user's settings.

    `said` is the text of the failure from its first line on, `source` the line of source above it, `lines` are the
    frames in none of torch's files with their lines, `texts` the run's files by name, `resumed` says whether the run
    went on from a checkpoint, and `offloads` has the sign of each kind of offload of the run.
    `anomalies` are the faults of its numbers, `faults` the known causes of such. `mended` are the failure's faults
    of libraries that a later release mends. `around` is the GPU memory before and after the offload, `inert` a line
    about an offload without effect, `releases` are the run's.
    """

    failure: Failure | None
    phase: Phase
    errors: Sequence[KnownError]
    seen: Sequence[Seen]
    patterns: Sequence[StepPattern]
    out_of_memory: OutOfMemory | None
    build: BuildError | None
    owners: Owners
    findings: Sequence[Finding]
    config: Config | None
    dialects: tuple[str, ...]
    mechanisms: frozenset[str]
    said: str = ""
    source: str = ""
    lines: Sequence[tuple[Frame, str]] = ()
    texts: Sequence[tuple[str, str]] = ()
    resumed: bool = False
    offloads: Mapping[str, str] = MappingProxyType({})
    anomalies: Sequence[Anomaly] = ()
    faults: Sequence[Found] = ()
    mended: Sequence[Shown] = ()
    around: Around | None = None
    inert: Inert | None = None
    releases: Mapping[str, str] = MappingProxyType({})

    @property
    def states_on_nvme(self) -> bool:
        """Whether the run's configuration keeps the optimizer's states on NVMe, and not in host memory."""
        settings = {} if self.config is None else self.config.settings
        return any(
            each.value == "nvme"
            for key, each in settings.items()
            if key.endswith(".offload_optimizer.device")
        )


class Conclusion(NamedTuple):
    """The cause in words, the rule that tells more if there is one, and the lines to change.

    `plans_away`: a plan's lines, if there are any, replace these. Without `is_known` the cause says that nothing is
    known of it, and `change` is the deciding experiment. `others` are further fitting causes, each with its
    distinguishing sign.
    """

    cause: str
    rule: str
    change: tuple[str, ...]
    plans_away: bool = False
    is_known: bool = True
    others: tuple[str, ...] = ()


class Slip(NamedTuple):
    """A slip in a file of the user's, with its place, in words, and its change."""

    cause: str
    change: str


class Suspect(NamedTuple):
    """A possible fault of a run that shows nothing wrong, and how to be sure of it, in words."""

    cause: str
    check: str


_SENTENCE = re.compile(r".{1,240}?(?<=[\w)\]`\"'])\.(?= [A-Z]|$)")
_OF_THE_SOURCE = re.compile(
    r"(?i)issue thread|^A report|^The call is"
)  # sentences about the evidence, not the fault
_NEWER = re.compile(r"\d\.\d.* (?:or|and) (?:newer|later)")
SHOWN = 2  # lines to change that an answer has


def of_finding(finding: Finding) -> Conclusion:
    """Return the conclusion of a finding of the run's own configuration."""
    lines = finding.fix.options or _with_release(tuple(_changed(finding.fix.diff)), finding.next)
    return Conclusion(f"{finding.title} ({finding.place}){reason(finding.why)}", finding.rule, lines[:SHOWN])


def of_rule(rule: Rule, evidence: Evidence) -> Conclusion:
    """Return the conclusion of a rule with its text in the log."""
    about = [name for name in evidence.dialects if name in rule.dialects] or sorted(rule.dialects)
    set_ = written_settings(about[0], rule.fix.set, evidence.config)
    lines = rule.fix.options or _with_release(set_, rule.next)
    return Conclusion(f"{rule.title}{reason(rule.why)}", rule.id, lines[:SHOWN])


def _with_release(settings: tuple[str, ...], next_: str) -> tuple[str, ...]:
    """Return the lines to set, and the rule's advice too if it names a release without the fault."""
    if not settings:
        return (next_,)
    return (*settings[: SHOWN - 1], f"or: {next_}") if _NEWER.search(next_) else settings


def reason(why: str) -> str:
    """Return the first sentence of a rule's reason, as an addition to its title."""
    first = _SENTENCE.match(" ".join(why.split()))
    return f"; why: {first[0].rstrip('.')}" if first and not _OF_THE_SOURCE.search(first[0]) else ""


def _changed(diff: str) -> Iterable[str]:
    """Yield the added lines of a diff, or without any, the removed ones."""
    lines = [line for line in diff.splitlines() if not line.startswith(("+++", "---", "@@"))]
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    return added or [f"remove {line[1:].strip()}" for line in lines if line.startswith("-")]
