# SPDX-License-Identifier: Apache-2.0
"""Findings for CI: GitHub workflow commands, SARIF 2.1.0, GitLab's Code Quality and JUnit.

GitHub shows workflow commands on the lines of a pull request. Files below the working folder are named from there,
however the call named them. A finding's fingerprint does not contain its line, so that old findings stay old when the
file grows.
"""

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from skill_tools import __version__
from skill_tools.bundle import home
from skill_tools.errors import UnusableInput, printable, printable_json
from skill_tools.reports.baseline import fingerprint
from skill_tools.reports.findings import Report
from skill_tools.rules.finding import Finding, Severity

_GITHUB_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_GITLAB_SEVERITY = {Severity.ERROR: "critical", Severity.WARNING: "minor", Severity.INFO: "info"}
_SARIF_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_github(report: Report) -> str:
    """Return one workflow command a finding, and one for each input that could not be used."""
    lines = [_command(finding) for finding in report.findings]
    lines += [f"::error title=unusable input::{_data(str(error))}" for error in report.errors]
    return "\n".join(map(printable, lines))


def _command(finding: Finding) -> str:
    properties = {
        "file": _path(finding.place.file),
        "line": finding.place.line,
        "col": finding.place.column,
        "title": finding.rule,
    }
    written = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    return f"::{_GITHUB_LEVEL[finding.severity]} {written}::{_data(f'{finding.message} → {finding.next}')}"


def _path(file: str) -> str:
    """Return the name of a file from the working folder, or as the call named it where it lies elsewhere."""
    here, there = Path.cwd(), Path(os.path.abspath(file))
    return (there.relative_to(here) if there.is_relative_to(here) else Path(file)).as_posix()


def _uri(file: str) -> str:
    """Return a file's reference for SARIF, relative below the working folder; bytes of any name are escaped."""
    path = _path(file)
    return Path(path).as_uri() if os.path.isabs(path) else quote(os.fsencode(path))


def _data(text: str) -> str:
    """Escape characters that would end a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape characters that would end a property of a command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(report: Report) -> str:
    """Return one SARIF log with one run; unusable inputs are notifications of its invocation."""
    rules = {finding.rule: finding for finding in report.findings}
    ids = list(rules)
    run = {
        "tool": {
            "driver": {
                "name": "cpu-offloading",
                "informationUri": home(),
                "semanticVersion": __version__,
                "rules": [_rule(finding) for finding in rules.values()],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": not report.errors,
                "toolExecutionNotifications": [_notification(error) for error in report.errors],
            }
        ],
        "results": [_result(finding, ids.index(finding.rule)) for finding in report.findings],
    }
    log = {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return printable_json(json.dumps(log, indent=2, ensure_ascii=False))


def _rule(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.rule,
        "shortDescription": {"text": finding.title},
        "fullDescription": {"text": finding.why},
        "help": {"text": f"{finding.next} `{finding.docs}` prints the rule's page."},
        "helpUri": f"{home()}#{quote(finding.rule)}",
        "defaultConfiguration": {"level": _SARIF_LEVEL[finding.severity]},
    }


def _result(finding: Finding, rule_index: int) -> dict[str, Any]:
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": _SARIF_LEVEL[finding.severity],
        "message": {"text": f"{finding.message}. {finding.next}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(finding.place.file)},
                    "region": {"startLine": finding.place.line, "startColumn": finding.place.column},
                }
            }
        ],
        "partialFingerprints": {"offload/v1": fingerprint(finding, _path(finding.place.file))},
    }


def _notification(error: UnusableInput) -> dict[str, Any]:
    return {"level": "error", "message": {"text": str(error)}}


def as_gitlab(report: Report) -> str:
    """Return a report of GitLab's Code Quality: one issue a finding, and one for each input that could not be used.

    A fingerprint may occur only once, so later ones of equal findings are numbered.
    """
    seen: Counter[str] = Counter()
    issues = [_issue(finding, seen) for finding in report.findings]
    issues += [
        {
            "description": str(error),
            "check_name": "unusable-input",
            "fingerprint": hashlib.sha256(str(error).encode()).hexdigest()[:32],
            "severity": "blocker",
            "location": {"path": ".", "lines": {"begin": 1}},
        }
        for error in report.errors
    ]
    return printable_json(json.dumps(issues, indent=2, ensure_ascii=False))


def _issue(finding: Finding, seen: Counter[str]) -> dict[str, Any]:
    path = _path(finding.place.file)
    mark = fingerprint(finding, path)
    seen[mark] += 1
    return {
        "description": f"{finding.message}. {finding.next}",
        "check_name": finding.rule,
        "fingerprint": mark if seen[mark] == 1 else f"{mark}-{seen[mark]}",
        "severity": _GITLAB_SEVERITY[finding.severity],
        "location": {
            "path": path,
            "lines": {"begin": finding.place.line},
        },
    }


def as_junit(report: Report) -> str:
    """Return JUnit's XML: a suite for each file, in it a case for each finding, which has failed unless it is info.

    A file without findings is a suite with one passed case; an unusable input is an error.
    """
    suites: dict[str, list[str]] = {_path(read.name): [] for read in report.read}
    for finding in report.findings:
        suites.setdefault(_path(finding.place.file), []).append(_case(finding))
    parts = [
        _suite(name, cases or [f"<testcase name={_attribute(name)}/>"]) for name, cases in suites.items()
    ]
    if report.errors:
        unusable = (
            f"<testcase name='unusable input'><error message={_attribute(str(error))}/></testcase>"
            for error in report.errors
        )
        parts.append(_suite("unusable input", list(unusable)))
    body = "\n".join(parts)
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="cpu-offloading">\n{body}\n</testsuites>'
    )


def _suite(name: str, cases: list[str]) -> str:
    failures, errors = sum("<failure" in case for case in cases), sum("<error" in case for case in cases)
    counts = f'tests="{len(cases)}" failures="{failures}" errors="{errors}"'
    return "\n".join([f"<testsuite name={_attribute(name)} {counts}>", *cases, "</testsuite>"])


def _case(finding: Finding) -> str:
    place = finding.place
    head = f'<testcase name={_attribute(finding.rule)} classname={_attribute(_path(place.file))} line="{place.line}">'
    said = f"{place} {finding.message}. {finding.next}"
    if finding.severity is Severity.INFO:
        return f"{head}<system-out>{escape(printable(said))}</system-out></testcase>"
    return f"{head}<failure type={_attribute(str(finding.severity))} message={_attribute(said)}/></testcase>"


def _attribute(text: str) -> str:
    return quoteattr(printable(text))
