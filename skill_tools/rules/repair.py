# SPDX-License-Identifier: Apache-2.0
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
from skill_tools.rules.finding import Finding, LintResult, Severity
from skill_tools.rules.knowledge import RuleFix, load_rules

Lint = Callable[[Sequence[Source]], tuple[Config, LintResult]]


class Repaired(NamedTuple):
    """The sources after all fixes, their remaining findings, and how many fixes went in."""

    sources: tuple[Source, ...]
    result: LintResult
    applied: int


def repair(sources: Sequence[Source], lint: Lint, *, unsafe: bool = False) -> Repaired:
    """Fix `sources` as far as possible; `lint` reads and lints them.

    Safe fixes go in, with `unsafe` all but the manual ones; none for a finding that depends on an unstated release.
    """
    config, result = lint(sources)
    rules = {rule.id: rule for rule in load_rules()}
    applied = 0
    tried: set[str] = set()  # two fixes that undo each other must not alternate for ever
    while finding := next((found for found in result.findings if _may_fix(found, unsafe, tried)), None):
        tried.add(_identity(finding))
        texts = fixes.repaired(config, rules[finding.rule].fix, load_keys())
        edited = [source.with_text(texts.get(source.name, source.text)) for source in sources]
        new_config, new_result = lint(edited) if texts else (config, result)
        changed = rules[finding.rule].fix
        if _is_better(new_result, result, finding) and _same_beside(new_config, config, changed):
            sources, config, result = edited, new_config, new_result
            applied += 1
    return Repaired(tuple(sources), result, applied)


def _may_fix(finding: Finding, unsafe: bool, tried: set[str]) -> bool:
    allowed = {"safe", "unsafe"} if unsafe else {"safe"}
    return finding.fix.applicability in allowed and not finding.depends_on and _identity(finding) not in tried


def _identity(finding: Finding) -> str:
    """Return the mark of a finding that stays while lines move."""
    return f"{finding.rule} {finding.place.file} {sorted(finding.observed.items(), key=str)}"


def _same_beside(after: Config, before: Config, fix: RuleFix) -> bool:
    """Return whether only the keys of `fix` have changed; consequences of a value may."""
    named = {*fix.set, *fix.remove}
    origins = {(each.written, each.place) for key, each in before.settings.items() if key in named}
    kept = {
        key: each.value
        for key, each in before.settings.items()
        if key not in named and (each.written, each.place) not in origins
    }
    return all(key in after.settings and after.settings[key].value == value for key, value in kept.items())


def _is_better(after: LintResult, before: LintResult, fixed: Finding) -> bool:
    """Return whether there are fewer findings of the fixed rule, and no more errors than before."""

    def count(result: LintResult) -> tuple[int, int]:
        same_rule = sum(finding.rule == fixed.rule for finding in result.findings)
        return same_rule, sum(finding.severity is Severity.ERROR for finding in result.findings)

    return count(after)[0] < count(before)[0] and count(after)[1] <= count(before)[1]
