"""Findings for code review in CI: GitHub workflow commands, and SARIF 2.1.0 for code scanning.

GitHub shows workflow commands on the lines of a pull request. In SARIF, uris are relative where the user named the
file so, and a finding's fingerprint does not contain its line, so that old findings stay old when the file grows.
"""

import hashlib
import json
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from skill_tools import __version__
from skill_tools.errors import UnusableInput, printable, printable_json
from skill_tools.reports.findings import Report
from skill_tools.rules.finding import Finding, Severity

_GITHUB_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_SARIF_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_github(report: Report) -> str:
    """Return one workflow command a finding, and one for each input that could not be used."""
    lines = [_command(finding) for finding in report.findings]
    lines += [f"::error title=unusable input::{_data(str(error))}" for error in report.errors]
    return "\n".join(map(printable, lines))


def _command(finding: Finding) -> str:
    properties = {
        "file": finding.place.file,
        "line": finding.place.line,
        "col": finding.place.column,
        "title": finding.rule,
    }
    written = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    return f"::{_GITHUB_LEVEL[finding.severity]} {written}::{_data(f'{finding.message} → {finding.next}')}"


def _data(text: str) -> str:
    """Escape what would end a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape what would end a property of a command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(report: Report) -> str:
    """Return one SARIF log with one run; unusable inputs are notifications of its invocation."""
    rules = {finding.rule: finding for finding in report.findings}
    ids = list(rules)
    run = {
        "tool": {
            "driver": {
                "name": "cpu-offloading",
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
                    "artifactLocation": {"uri": quote(PurePath(finding.place.file).as_posix())},
                    "region": {"startLine": finding.place.line, "startColumn": finding.place.column},
                }
            }
        ],
        "partialFingerprints": {"offload/v1": _fingerprint(finding)},
    }


def _fingerprint(finding: Finding) -> str:
    identity = json.dumps([finding.rule, finding.place.file, sorted(finding.observed.items())], default=str)
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _notification(error: UnusableInput) -> dict[str, Any]:
    return {"level": "error", "message": {"text": str(error)}}
