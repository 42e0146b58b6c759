"""Applies the fixes of a whole configuration, one after another, each only if its finding is gone afterwards.

Every fix is read back and linted before the next, since one fix may open or close another finding. Nothing is
written: the caller gets new texts. Choices (manual fixes) are never made here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.configs.keys import load_keys
from skill_tools.configs.source import Source
from skill_tools.rules import fixes
from skill_tools.rules.finding import Finding, Severity, Verdict
from skill_tools.rules.knowledge import load_rules

Judge = Callable[[Sequence[Source]], tuple[Config, Verdict]]


class Repaired(NamedTuple):
    """The sources after all fixes, what is still wrong with them, and how many fixes went in."""

    sources: tuple[Source, ...]
    verdict: Verdict
    applied: int


def repair(sources: Sequence[Source], judge: Judge, *, unsafe: bool = False) -> Repaired:
    """Fix what can be fixed in `sources`; `judge` reads and lints them.

    Safe fixes go in, with `unsafe` all but the manual ones; none for a finding that depends on an unstated release.
    """
    config, verdict = judge(sources)
    rules = {rule.id: rule for rule in load_rules()}
    applied = 0
    tried: set[str] = set()  # so that two fixes which undo each other do not alternate for ever
    while finding := next((found for found in verdict.findings if _may_fix(found, unsafe, tried)), None):
        tried.add(_identity(finding))
        texts = fixes.repaired(config, rules[finding.rule].fix, load_keys())
        edited = [source._replace(text=texts.get(source.name, source.text)) for source in sources]
        new_config, new_verdict = judge(edited) if texts else (config, verdict)
        if _is_better(new_verdict, verdict, finding):
            sources, config, verdict = edited, new_config, new_verdict
            applied += 1
    return Repaired(tuple(sources), verdict, applied)


def _may_fix(finding: Finding, unsafe: bool, tried: set[str]) -> bool:
    allowed = {"safe", "unsafe"} if unsafe else {"safe"}
    return finding.fix.applicability in allowed and not finding.depends_on and _identity(finding) not in tried


def _identity(finding: Finding) -> str:
    """Return what stays the same of a finding while lines move."""
    return f"{finding.rule} {finding.place.file} {sorted(finding.observed.items(), key=str)}"


def _is_better(after: Verdict, before: Verdict, fixed: Finding) -> bool:
    """Return whether there are fewer findings of the fixed rule, and no more errors than before."""

    def count(verdict: Verdict) -> tuple[int, int]:
        same_rule = sum(finding.rule == fixed.rule for finding in verdict.findings)
        return same_rule, sum(finding.severity is Severity.ERROR for finding in verdict.findings)

    return count(after)[0] < count(before)[0] and count(after)[1] <= count(before)[1]
