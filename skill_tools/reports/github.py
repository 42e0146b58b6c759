"""Findings as GitHub workflow commands, which GitHub shows on the lines of a pull request."""

from skill_tools.reports.findings import Report
from skill_tools.rules.finding import Finding, Severity

_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def as_github(report: Report) -> str:
    """Return one workflow command a finding, and one for each input that could not be used."""
    lines = [_command(finding) for finding in report.findings]
    lines += [f"::error title=unusable input::{_data(str(error))}" for error in report.errors]
    return "\n".join(lines)


def _command(finding: Finding) -> str:
    properties = {
        "file": finding.place.file,
        "line": finding.place.line,
        "col": finding.place.column,
        "title": finding.rule,
    }
    written = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    return f"::{_LEVEL[finding.severity]} {written}::{_data(f'{finding.message} → {finding.next}')}"


def _data(text: str) -> str:
    """Escape what would end a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape what would end a property of a command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
