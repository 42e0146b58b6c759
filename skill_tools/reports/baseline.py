# SPDX-License-Identifier: Apache-2.0
"""A baseline: findings that a project has accepted for now: only new ones count.

A finding is known again by its rule, its file and the values that the rule observed, not by its line. Files are named
relative to the baseline's own folder, so that it holds wherever lint is called from.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import NamedTuple

from skill_tools.configs.files import read_text
from skill_tools.errors import UnusableInput, printable_json
from skill_tools.rules.finding import Finding, LintResult

VERSION = 1


class Baseline(NamedTuple):
    """How often each fingerprint is accepted, and the folder that the file names are relative to."""

    accepted: Mapping[str, int]
    folder: str


def fingerprint(finding: Finding, file: str) -> str:
    """Return the mark of a finding in `file` that stays while its line moves, 32 hexadecimal digits."""
    identity = json.dumps([finding.rule, file, sorted(finding.observed.items())], default=str)
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def as_baseline(findings: Iterable[Finding], folder: str) -> str:
    """Return the text of a baseline that accepts `findings` and will stand in `folder`, in the order of files."""
    counted = Counter(
        (_file(each, folder), each.rule, fingerprint(each, _file(each, folder))) for each in findings
    )
    entries = [
        {"file": file, "rule": rule, "fingerprint": print_, "count": count}
        for (file, rule, print_), count in sorted(counted.items())
    ]
    text = json.dumps({"version": VERSION, "findings": entries}, indent=1, ensure_ascii=False)
    return f"{printable_json(text)}\n"


def load_baseline(path: str) -> Baseline:
    """Read the baseline at `path`; raises `UnusableInput` for a file that is none."""
    try:
        data = json.loads(read_text(path, expected="a file that lint --write-baseline has written"))
        if data["version"] != VERSION:
            raise _damaged(path, f"its version is {data['version']!r}, not {VERSION}")
        accepted: Counter[str] = Counter()
        for each in data["findings"]:
            if not isinstance(each["fingerprint"], str) or type(each["count"]) is not int:
                raise _damaged(path, "a finding has no fingerprint and count")
            accepted[each["fingerprint"]] += each["count"]
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise _damaged(path, "a part of it is missing") from error
    return Baseline(accepted, os.path.dirname(path))


def without_accepted(result: LintResult, baseline: Baseline) -> tuple[LintResult, int]:
    """Return the result without findings that `baseline` accepts, each as often as it does, and the number of these."""
    left, new = dict(baseline.accepted), []
    for finding in result.findings:
        mark = fingerprint(finding, _file(finding, baseline.folder))
        left[mark] = left.get(mark, 0) - 1
        new += [] if left[mark] >= 0 else [finding]
    return result._replace(findings=tuple(new)), len(result.findings) - len(new)


def _file(finding: Finding, folder: str) -> str:
    """Return a finding's file relative to `folder`; a name in angle brackets is no file."""
    file = finding.place.file
    return file if file.startswith("<") else PurePath(os.path.relpath(file, folder or ".")).as_posix()


def _damaged(path: str, why: str) -> UnusableInput:
    return UnusableInput(
        f"{path} is no baseline: {why}",
        expected="a file that lint has written",
        attempt=f"lint --write-baseline {path} again",
    )
