"""The default output: one line a finding, then one line for the whole call.

Made for an agent's context and a terminal alike: everything that is needed to act, nothing twice, no colour.
"""

from skill_tools.reports.findings import Report
from skill_tools.rules.finding import Finding, Severity

_KEYS_NAMED = 4


def as_concise(report: Report, *, show_undecided: bool = False) -> str:
    """Return the lines of `report`; with `show_undecided`, also one line for each rule that stays open."""
    lines = [_finding_line(finding) for finding in report.findings]
    if show_undecided:
        lines += [
            f"{name} undecided {rule.rule} {rule.title} → state {', '.join(rule.missing)}"
            for name, rule in report.undecided
        ]
    return "\n".join([*lines, _summary(report)])


def _finding_line(finding: Finding) -> str:
    depends = f" [depends on {', '.join(finding.depends_on)}]" if finding.depends_on else ""
    return f"{finding.place} {finding.severity} {finding.rule} {finding.message}{depends} → {finding.next}"


def _summary(report: Report) -> str:
    """Return the last line: how many of what, what was left out, and what would decide the open rules."""
    counts = [_counted(report.counts[severity], severity) for severity in Severity if report.counts[severity]]
    parts = [f"{', '.join(counts) or 'no findings'} in {_plural(report.inputs, 'input')}"]
    if report.omitted:
        parts.append(f"{report.omitted} not shown (--limit)")
    if report.undecided:
        parts.append(f"{_plural(len(report.undecided), 'rule')} undecided: {_deciders(report)}")
    if report.errors:
        parts.append(f"{_plural(len(report.errors), 'input')} not usable")
    return "; ".join(parts)


def _deciders(report: Report) -> str:
    """Name the keys that would decide most of the open rules, most useful first."""
    votes: dict[str, int] = {}
    for _, rule in report.undecided:
        for key in rule.missing:
            votes[key] = votes.get(key, 0) + 1
    keys = sorted(votes, key=lambda key: (-votes[key], key))
    named = ", ".join(keys[:_KEYS_NAMED])
    more = f" and {len(keys) - _KEYS_NAMED} more" if len(keys) > _KEYS_NAMED else ""
    return f"state {named}{more} (--show-undecided)"


def _counted(count: int, severity: Severity) -> str:
    return f"{count} info" if severity is Severity.INFO else _plural(count, str(severity))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
