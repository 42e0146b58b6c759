# SPDX-License-Identifier: Apache-2.0
"""The report of a release beside its records, and its text, as `offload knowledge diff` prints them."""

import argparse
import json
from pathlib import Path
from typing import Any

from skill_tools import knowledge
from skill_tools.configs.files import write_text
from skill_tools.errors import UnusableInput
from skill_tools.rules.versions import parse_target
from skill_tools.started import COMMAND
from skill_tools.upkeep.difference import between, other_defaults, unknown
from skill_tools.upkeep.quotes import lost
from skill_tools.upkeep.release_files import read_release
from skill_tools.upkeep.summary import Summary, summarize


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the report of the release in `args`, and its text; `--save` also writes its summary."""
    package, release = parse_target(args.release)
    files = read_release(package, release, args.source)
    summary = summarize(files)
    before = _summary(package, release, args.since) if args.since else None
    if args.save:
        write_text(args.save, json.dumps(summary._asdict(), indent=1, sort_keys=True) + "\n")
    changes = [*between(before, summary)] if before else []
    report = {
        "schema_version": "1.0",
        "package": package,
        "release": release,
        "recorded_until": _recorded(package),
        "unknown": [each._asdict() for each in unknown(summary, package)],
        "defaults": [each._asdict() for each in other_defaults(summary, package)],
        "lost": [each._asdict() for each in lost(files, package, release)],
        "changes": [each._asdict() for each in changes if args.all or each.touches_offload],
    }
    return report, _as_text(report)


def _summary(package: str, release: str, source: Path) -> Any:
    """Return the facts of an earlier release: from its files, or from the file that `--save` wrote of it."""
    if source.suffix != ".json":
        return summarize(read_release(package, release, source))
    try:
        loaded = json.loads(source.read_text(encoding="utf-8"))
        return Summary(**{kind: dict(loaded[kind]) for kind in Summary._fields})
    except (OSError, ValueError, KeyError, TypeError):
        raise UnusableInput(
            f"{source} is no summary of a release",
            expected=f"a file of {COMMAND} knowledge diff --save",
            attempt=f"{COMMAND} knowledge diff {package}=={release} OLD.whl --save {source}",
        ) from None


def _recorded(package: str) -> str | None:
    """Return the newest release of a distribution that the rules know."""
    known = knowledge.index()["releases"]["known"].get(package, ())
    return next((each for each in reversed(known) if "dev" not in each), None)


def _as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['package']} {report['release']}, recorded until {report['recorded_until'] or 'nothing'}"
    ]
    for each in report["unknown"]:
        lines.append(f"  not recorded  {each['kind'][:-1]} {each['name']} = {each['now']}")
    for each in report["defaults"]:
        lines.append(f"  default       {each['name']}: recorded {each['was']}, is {each['now']}")
    for each in report["lost"]:
        lines.append(f"  {each['what']} gone".ljust(16) + f"{each['id']}: {each['ref']}{_now(each['now'])}")
    for each in report["changes"]:
        value = f"{each['was']} -> {each['now']}" if each["how"] == "default" else each["now"] or each["was"]
        lines.append(f"  {each['how']}".ljust(16) + f"{each['kind']}: {each['name']} ({value})")
    parts = ("unknown", "defaults", "lost", "changes")
    lines.append(", ".join(f"{len(report[part])} {part}" for part in parts))
    return "\n".join(lines)


def _now(path: str) -> str:
    return f" (now in {path})" if path else ""
