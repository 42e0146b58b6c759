"""The report of one lint call, as lines of text and as JSON; `ci_findings` renders the same report for CI.

The lines are the default output, made for an agent's context and a terminal alike: everything that is needed to
act, nothing twice, no colour. The JSON is described by `schema/findings.schema.json`; within one major
`schema_version` fields are only added. Its field names are the contract, so they stand here and not in the
records of `rules.finding`.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from skill_tools.errors import UnusableInput, printable
from skill_tools.rules.finding import Finding, LintResult, Severity, Undecided
from skill_tools.rules.lint import in_order

SCHEMA_VERSION = "1.0"
_KEYS_NAMED = 4


class ReadAs(NamedTuple):
    """What one input was read as: the dialect by name and in words, and what proved it, if the user did not say it."""

    name: str
    framework: str
    label: str
    proof: str


class Report(NamedTuple):
    """All runs of one call: findings in order, open rules by input, inputs that could not be used.

    `inputs` counts the runs that were linted. `omitted` counts findings that `--limit` left out of
    `findings`; `counts` counts all of them. `read` says what each run was read as, `passed_over` how many files were
    nobody's.
    """

    inputs: int
    findings: tuple[Finding, ...]
    undecided: tuple[tuple[str, Undecided], ...]
    errors: tuple[UnusableInput, ...]
    counts: Mapping[Severity, int]
    omitted: int
    read: tuple[ReadAs, ...] = ()
    passed_over: int = 0


def report(
    results: Sequence[tuple[str, LintResult]],
    errors: Sequence[UnusableInput],
    *,
    limit: int | None = None,
    read: Sequence[ReadAs] = (),
    passed_over: int = 0,
) -> Report:
    """Gather the results of all runs, each with its input's name, into one report."""
    findings = in_order([finding for _, result in results for finding in result.findings])
    shown = findings if limit is None else findings[:limit]
    return Report(
        inputs=len(results),
        findings=shown,
        undecided=tuple((name, rule) for name, result in results for rule in result.undecided),
        errors=tuple(errors),
        counts={severity: sum(found.severity is severity for found in findings) for severity in Severity},
        omitted=len(findings) - len(shown),
        read=tuple(read),
        passed_over=passed_over,
    )


def as_concise(report: Report, *, show_undecided: bool = False) -> str:
    """Return the lines of `report`; with `show_undecided`, also one line for each rule that stays open."""
    lines = [_read_line(report)] if report.read else []
    lines += [_finding_line(finding, others) for finding, others in _folded(report.findings)]
    if show_undecided:
        lines += [
            f"{name} undecided {rule.rule} {rule.title} → state {', '.join(rule.missing)}"
            for name, rule in report.undecided
        ]
    return "\n".join(map(printable, [*lines, _summary(report)]))


def _read_line(report: Report) -> str:
    """Say what the inputs were read as: of one also by what, of many how many each framework has."""
    if len(report.read) == 1:
        (only,) = report.read
        return f"{only.name} is read as {only.label} ({only.proof or '--framework'})"
    counts = Counter(each.label for each in report.read)
    named = ", ".join(f"{count} as {label}" for label, count in counts.most_common())
    passed_over = f"; {report.passed_over} passed over, of no known framework" if report.passed_over else ""
    return f"read {named} (--format json says by what){passed_over}"


def _folded(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Return the findings to show, each with the number of those like it that it stands for.

    What depends on a release that nobody stated is said once for all inputs: stating the release settles all of them.
    """
    files: dict[str, dict[str, None]] = {}
    for finding in findings:
        files.setdefault(finding.rule, {})[finding.place.file] = None
    shown = []
    for finding in findings:
        alike = files[finding.rule]
        if not finding.depends_on:
            shown.append((finding, 0))
        elif finding.place.file == next(iter(alike)):
            shown.append((finding, len(alike) - 1))
    return shown


def _finding_line(finding: Finding, others: int) -> str:
    more = f" [and in {_plural(others, 'more input')}]" if others else ""
    unless = (
        f" [unless the recipe or its environment sets {', '.join(finding.unless)}]" if finding.unless else ""
    )
    depends = f" [depends on {', '.join(finding.depends_on)}]" if finding.depends_on else ""
    said = f"{finding.message}{unless}{depends}{more}"
    return f"{finding.place} {finding.severity} {finding.rule} {said} → {finding.next}"


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


def as_json(report: Report) -> str:
    """Return the report as one JSON document."""
    return _dump(
        {
            "schema_version": SCHEMA_VERSION,
            "summary": {
                "inputs": report.inputs,
                **{str(severity): count for severity, count in report.counts.items()},
                "undecided": len(report.undecided),
                "omitted": report.omitted,
                "passed_over": report.passed_over,
            },
            "read": [
                {"file": each.name, "framework": each.framework, "proof": each.proof} for each in report.read
            ],
            "findings": [finding_data(finding) for finding in report.findings],
            "undecided": [
                {"file": name, "rule": rule.rule, "title": rule.title, "missing": list(rule.missing)}
                for name, rule in report.undecided
            ],
            "errors": [error_data("unusable-input", error) for error in report.errors],
        }
    )


def error_as_json(kind: str, error: Exception) -> str:
    """Return the document for a call that could not even start: `unusable-input` or `internal`."""
    return _dump({"schema_version": SCHEMA_VERSION, "errors": [error_data(kind, error)]})


def finding_data(finding: Finding) -> dict[str, Any]:
    """Return one finding as plain data, in the field order of the schema."""
    return {
        "rule": finding.rule,
        "title": finding.title,
        "severity": str(finding.severity),
        "message": finding.message,
        "file": finding.place.file,
        "line": finding.place.line,
        "column": finding.place.column,
        "observed": dict(finding.observed),
        "depends_on": list(finding.depends_on),
        "unless": list(finding.unless),
        "why": finding.why,
        "evidence": {
            "tag": finding.evidence.tag,
            "ref": finding.evidence.ref,
            "quote": finding.evidence.quote,
        },
        "next": finding.next,
        "fix": {
            "applicability": finding.fix.applicability,
            "description": finding.fix.description,
            "options": list(finding.fix.options),
            "diff": finding.fix.diff,
        },
        "docs": finding.docs,
    }


def error_data(kind: str, error: Exception) -> dict[str, str]:
    """Return an error as plain data; what was expected and what to try only where the error says."""
    if isinstance(error, UnusableInput):
        return {"kind": kind, "problem": error.problem, "expected": error.expected, "try": error.attempt}
    return {"kind": kind, "problem": f"{type(error).__name__}: {error}"}


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, default=str)
