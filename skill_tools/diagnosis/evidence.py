# SPDX-License-Identifier: Apache-2.0
"""All that a log and its run's configuration show, and the form of an answer."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.diagnosis.builds import BuildError
from skill_tools.diagnosis.failures import Failure
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
    """All that a log and its run's configuration show. `dialects` are those whose settings the user has.

    `said` is the text of the failure from its first line on, `source` the line of source above it, `texts` are the
    run's files by name, `resumed` says whether the run went on from a checkpoint, and `offloads` has the sign of each
    kind of offload of the run.
    `anomalies` are the faults of its numbers, `faults` those that are known to give such. `mended` are faults of
    libraries that the failure shows, and that a later release mends. `around` is the GPU memory before and after the
    offload, `inert` a line that says that an offload does nothing, `releases` are those that ran.
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

    `plans_away` says that a plan's lines, where there are any, take the place of these. Where `is_known` is false, the
    cause says that nothing is known of it, and `change` is the experiment that would decide. `others` are causes that
    fit too, each with the sign that tells it apart.
    """

    cause: str
    rule: str
    change: tuple[str, ...]
    plans_away: bool = False
    is_known: bool = True
    others: tuple[str, ...] = ()


class Suspect(NamedTuple):
    """A possible fault of a run that shows nothing wrong, and how to be sure of it, in words."""

    cause: str
    check: str


SHOWN = 2  # lines to change that an answer has


def of_finding(finding: Finding) -> Conclusion:
    """Return the conclusion that a finding of the run's own configuration is."""
    fix = finding.fix
    lines = fix.options or tuple(_changed(fix.diff)) or (finding.next,)
    return Conclusion(f"{finding.title} ({finding.place})", finding.rule, lines[:SHOWN])


def of_rule(rule: Rule) -> Conclusion:
    """Return the conclusion that a rule is whose text the log has."""
    fix = rule.fix
    set_ = tuple(f"{key}: {value}" for key, value in fix.set.items())
    return Conclusion(rule.title, rule.id, (fix.options or set_ or (rule.next,))[:SHOWN])


def _changed(diff: str) -> Iterable[str]:
    """Yield the lines that a diff puts in, or where it puts in none, those that it takes out."""
    lines = [line for line in diff.splitlines() if not line.startswith(("+++", "---", "@@"))]
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    return added or [f"remove {line[1:].strip()}" for line in lines if line.startswith("-")]
