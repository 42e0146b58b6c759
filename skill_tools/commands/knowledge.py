# SPDX-License-Identifier: Apache-2.0
"""Compare a release of a framework with the records of it. Reads its files, and runs none of them.

  offload knowledge diff transformers==5.24.0 transformers-5.24.0-py3-none-any.whl
  offload knowledge diff transformers==5.24.0 NEW.whl --since OLD.whl

The first names offload fields and flags that are not recorded, recorded defaults that are others now, and rules whose
quote or symbol is gone. With --since it adds the difference of two releases: fields, flags, defaults, messages, log
texts and private names. A source is a wheel, a source archive, a folder, or a file of --save; without one the installed
distribution is read.

Exit codes: 0 nothing differs, 1 something does, 2 unusable input, 3 a fault of this tool.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, the release and its source."""
    parser.add_argument("action", choices=("diff",), help="what to do: diff")
    parser.add_argument("release", metavar="PACKAGE==RELEASE", help="a distribution and its release")
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", type=Path, help="a wheel, an archive or a folder"
    )
    parser.add_argument("--since", type=Path, metavar="SOURCE", help="an earlier release, to compare with")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write what the release says to a JSON file"
    )
    parser.add_argument("--all", action="store_true", help="also changes that do not touch offload")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text (default) or json")


def run(args: argparse.Namespace) -> int:
    """Print the differences."""
    if not (Path(__file__).parent.parent / "upkeep").is_dir():  # which an agent's copy does not have
        raise UnusableInput(
            "this copy of the skill compares no releases",
            expected="the installed package or a checkout",
            attempt="pip install cpu-offloading",
        )
    from skill_tools.rules.versions import parse_target
    from skill_tools.upkeep.difference import between, other_defaults, unknown
    from skill_tools.upkeep.quotes import lost
    from skill_tools.upkeep.release_files import read_release
    from skill_tools.upkeep.summary import summarize

    package, release = parse_target(args.release)
    files = read_release(package, release, args.source)
    summary = summarize(files)
    before = _summary(package, release, args.since) if args.since else None
    if args.save:
        args.save.write_text(json.dumps(summary._asdict(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
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
    print(json.dumps(report, indent=1) if args.format == "json" else _as_text(report), end="\n")
    return int(any(report[part] for part in ("unknown", "defaults", "lost", "changes")))


def _summary(package: str, release: str, source: Path) -> Any:
    """Return the facts of an earlier release: from its files, or from the file that `--save` wrote of it."""
    from skill_tools.upkeep.release_files import read_release
    from skill_tools.upkeep.summary import Summary, summarize

    if source.suffix != ".json":
        return summarize(read_release(package, release, source))
    try:
        loaded = json.loads(source.read_text(encoding="utf-8"))
        return Summary(**{kind: dict(loaded[kind]) for kind in Summary._fields})
    except (OSError, ValueError, KeyError, TypeError):
        raise UnusableInput(
            f"{source} is no summary of a release",
            expected=f"what {COMMAND} knowledge diff --save wrote",
            attempt=f"{COMMAND} knowledge diff {package}=={release} OLD.whl --save {source}",
        ) from None


def _recorded(package: str) -> str | None:
    """Return the newest release of a distribution that the rules know."""
    from skill_tools import knowledge

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
