# SPDX-License-Identifier: Apache-2.0
"""The report of one lint call, a line a finding and as JSON; `blocks` renders it for people, `ci_findings` for CI.

The JSON has all that is needed to act in one call, and nothing twice. It is described by
`schema/findings.schema.json`; within one major `schema_version` fields are only added. Its field names are the
contract, so they stand here and not in the records of `rules.finding`.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from skill_tools.configs.releases import Stated
from skill_tools.errors import UnusableInput, printable, printable_json
from skill_tools.rules.finding import CONSEQUENCES, Finding, LintResult, Severity, Undecided
from skill_tools.rules.lint import in_order
from skill_tools.rules.values import key_of

SCHEMA_VERSION = "2.1"
_MOST_READ_LINES = 5
_MOST_NAMES = 8  # of rules in the last line


class ReadAs(NamedTuple):
    """The reading of one input: the dialect by name and in words, its proof, and the releases it is held to.

    `proof` is empty if the user named the framework. `releases` maps a distribution to its release and the release's
    source.
    """

    name: str
    framework: str
    label: str
    proof: str
    releases: Mapping[str, Stated] = MappingProxyType({})


class Report(NamedTuple):
    """All runs of one call: findings in order, open rules by input, inputs that could not be used.

    `inputs` counts the linted runs, `rules` the rules asked of them in all. `omitted` counts findings that `--limit`
    left out of `findings`; `counts` counts all of them. `read` has the reading of each run, `passed_over` counts files
    of no framework. `texts` has the text of each file with a finding. `newest_known` has the newest release of each
    framework that the rules know. `accepted` counts the baseline's findings.
    """

    inputs: int
    findings: tuple[Finding, ...]
    undecided: tuple[tuple[str, Undecided], ...]
    errors: tuple[UnusableInput, ...]
    counts: Mapping[Severity, int]
    omitted: int
    read: tuple[ReadAs, ...] = ()
    passed_over: int = 0
    texts: Mapping[str, str] = MappingProxyType({})
    rules: int = 0
    newest_known: Mapping[str, str] = MappingProxyType({})
    accepted: int = 0


def report(
    results: Sequence[tuple[str, LintResult]],
    errors: Sequence[UnusableInput],
    *,
    limit: int | None = None,
    read: Sequence[ReadAs] = (),
    passed_over: int = 0,
    texts: Mapping[str, str] = MappingProxyType({}),
    newest_known: Mapping[str, str] = MappingProxyType({}),
    accepted: int = 0,
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
        texts=texts,
        rules=sum(result.rules for _, result in results),
        newest_known=newest_known,
        accepted=accepted,
    )


def as_concise(report: Report, *, show_undecided: bool = False, quiet: bool = False) -> str:
    """Return a line for each finding; with `show_undecided`, also one for each rule that stays open.

    With `quiet`, the inputs and the last line are left out.
    """
    lines = [] if quiet else read_lines(report)
    lines += [_finding_line(finding, others) for finding, others in folded(report.findings)]
    lines += undecided_lines(report) if show_undecided else []
    return "\n".join(map(printable, lines if quiet else [*lines, summary(report)]))


def as_statistics(report: Report) -> str:
    """Return one line for each rule that was found: how often, its severity, id and title, the most frequent first."""
    found = Counter(finding.rule for finding in report.findings)
    by_rule = {finding.rule: finding for finding in reversed(report.findings)}
    rows = [
        (str(count), str(by_rule[rule].severity), rule, by_rule[rule].title) for rule, count in _most(found)
    ]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:3]]
    return "\n".join(
        f"{count:>{widths[0]}}  {severity:<{widths[1]}}  {rule:<{widths[2]}}  {printable(title)}"
        for count, severity, rule, title in rows
    )


def _most(found: Counter[str]) -> list[tuple[str, int]]:
    return sorted(found.items(), key=lambda each: (-each[1], each[0]))


def read_lines(report: Report) -> list[str]:
    """Return the reading of each input, its proof, and its releases; of many inputs how many each framework has."""
    passed_over = f"; {report.passed_over} passed over, of no known framework" if report.passed_over else ""
    if len(report.read) <= _MOST_READ_LINES and not passed_over:
        return [_read_line(each) for each in report.read]
    counts = Counter(each.label for each in report.read)
    named = ", ".join(f"{count} as {label}" for label, count in counts.most_common())
    return [f"read {named} (--format json has the proofs){passed_over}"]


def _read_line(read: ReadAs) -> str:
    line = f"{read.name} is read as {read.label} ({read.proof or '--framework'})"
    stated = [f"{name} {each.version} ({each.where})" for name, each in read.releases.items()]
    return f"{line}, for {', '.join(stated)}" if stated else line


def undecided_lines(report: Report) -> list[str]:
    """Return one line for each open rule, with the keys that would decide it."""
    return [
        f"{name} undecided {rule.rule} {rule.title} → state {', '.join(rule.missing)}"
        for name, rule in report.undecided
    ]


def folded(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Return the findings to show, each with the number of equal ones that it stands for.

    A dependence on an unstated release is reported once for all inputs: stating the release settles all of them.
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


def summary(report: Report) -> str:
    """Return the last line: counts of findings and omissions, and the extent of the check.

    The extent is the number of rules, their newest releases, and the rules that depend on an unstated release.
    """
    counts = [_counted(report.counts[severity], severity) for severity in Severity if report.counts[severity]]
    parts = [f"{', '.join(counts) or 'no findings'} in {_plural(report.inputs, 'input')}"]
    if report.omitted:
        parts.append(f"{report.omitted} not shown (--limit)")
    if report.accepted:
        parts.append(f"{report.accepted} more in the baseline")
    if report.rules:
        up_to = ", ".join(f"{name} {release}" for name, release in report.newest_known.items())
        parts.append(f"{_plural(report.rules, 'rule')} asked{f', known up to {up_to}' if up_to else ''}")
    if report.undecided:
        parts.append(f"{len(report.undecided)} undecided (--show-undecided)")
    for package, rules in open_releases(report).items():
        more = f" and {len(rules) - _MOST_NAMES} more" if len(rules) > _MOST_NAMES else ""
        depend = "depends" if len(rules) == 1 else "depend"
        parts.append(f"{package} is not stated: {', '.join(rules[:_MOST_NAMES])}{more} {depend} on it")
    if report.errors:
        parts.append(f"{_plural(len(report.errors), 'input')} not usable")
    return "; ".join(parts)


def open_releases(report: Report) -> dict[str, list[str]]:
    """Return the rules that depend on an unstated release, by its distribution."""
    # Of thousands of inputs most leave the same rules open, for the same reasons.
    open_ = {(each.missing, each.rule) for each in {undecided for _, undecided in report.undecided}}
    open_ |= {(each.depends_on, each.rule) for each in report.findings if each.depends_on}
    found: dict[str, set[str]] = {}
    for ranges, rule in open_:
        for range_ in ranges:
            package = key_of(range_)
            if package != range_:
                found.setdefault(package, set()).add(rule)
    return {package: sorted(rules) for package, rules in sorted(found.items())}


def _counted(count: int, severity: Severity) -> str:
    return f"{count} info" if severity is Severity.INFO else _plural(count, str(severity))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def as_json(report: Report, *, show_undecided: bool = False, explain: bool = False) -> str:
    """Return the report as one JSON document, open rules and reasons only where they are asked for."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "summary": {
            "inputs": report.inputs,
            **{str(severity): count for severity, count in report.counts.items()},
            "rules": report.rules,
            "undecided": len(report.undecided),
            "omitted": report.omitted,
            "passed_over": report.passed_over,
            "accepted": report.accepted,
            "newest_known": dict(report.newest_known),
            "open_releases": open_releases(report),
        },
        "read": [_read_data(each) for each in report.read],
        "findings": [finding_data(finding, explain=explain) for finding in report.findings],
        "errors": [error_data("unusable-input", error) for error in report.errors],
    }
    if show_undecided:
        document["undecided"] = [
            {"file": name, "rule": rule.rule, "title": rule.title, "missing": list(rule.missing)}
            for name, rule in report.undecided
        ]
    return _dump(document)


def _read_data(read: ReadAs) -> dict[str, Any]:
    releases = {name: each._asdict() for name, each in read.releases.items()}
    return {"file": read.name, "framework": read.framework, "proof": read.proof, "releases": releases}


def error_as_json(kind: str, error: Exception) -> str:
    """Return the document for a call that could not even start: `unusable-input` or `internal`."""
    return _dump({"schema_version": SCHEMA_VERSION, "errors": [error_data(kind, error)]})


def finding_data(finding: Finding, *, explain: bool = False) -> dict[str, Any]:
    """Return one finding as plain data, in the field order of the schema; empty fields are left out."""
    place, fix = finding.place, finding.fix
    data: dict[str, Any] = {
        "rule": finding.rule,
        "severity": str(finding.severity),
        "consequence": CONSEQUENCES[finding.effect],
        "message": finding.message,
        "file": place.file,
        "line": place.line,
        "column": place.column,
        "observed": dict(finding.observed),
        "text": list(finding.text),
        "remedy": finding.next,
        "fix": {"applicability": fix.applicability, "options": list(fix.options), "diff": fix.diff},
    }
    further: dict[str, Any] = {
        "after": [each._asdict() for each in finding.after],
        "depends_on": list(finding.depends_on),
        "unless": list(finding.unless),
    }
    data |= {name: value for name, value in further.items() if value}
    if explain:
        data |= {"why": finding.why, "evidence": finding.evidence._asdict()}
    return data


def error_data(kind: str, error: Exception) -> dict[str, str]:
    """Return an error as plain data; expectation and advice only where the error has them."""
    if isinstance(error, UnusableInput):
        return {"kind": kind, "problem": error.problem, "expected": error.expected, "try": error.attempt}
    return {"kind": kind, "problem": f"{type(error).__name__}: {error}"}


def _dump(document: Mapping[str, Any]) -> str:
    """Write a document with each entry of its lists on a line of its own: short, and a finding can be cut out."""
    parts = [f"  {_json(name)}: {_entries(value)}" for name, value in document.items()]
    return printable_json("{\n" + ",\n".join(parts) + "\n}")


def _entries(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"    {_json(each)}" for each in value) + "\n  ]"
    return _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
