# SPDX-License-Identifier: Apache-2.0
"""Compare a release of a framework with the records of it. Reads its files, and runs none of them.

  offload knowledge diff transformers==5.24.0 transformers-5.24.0-py3-none-any.whl
  offload knowledge diff transformers==5.24.0 NEW.whl --since OLD.whl

The first lists unrecorded offload fields and flags, changed defaults, and rules with a missing quote or
symbol. With --since it adds the difference of two releases: fields, flags, defaults, messages, log texts and
private names. A source is a wheel, a source archive, a folder, or a file of --save; without one the installed
distribution is read.

Exit codes: 0 nothing differs, 1 something does, 2 unusable input, 3 a fault of this tool.
"""

import argparse
import json
from pathlib import Path

from skill_tools.errors import UnusableInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, the release and its source."""
    parser.add_argument("action", choices=("diff",), help="the action: diff")
    parser.add_argument("release", metavar="PACKAGE==RELEASE", help="a distribution and its release")
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", type=Path, help="a wheel, an archive or a folder"
    )
    parser.add_argument("--since", type=Path, metavar="SOURCE", help="an earlier release, to compare with")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the release's facts to a JSON file")
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
    from skill_tools.upkeep.report import compare

    report, text = compare(args)
    print(json.dumps(report, indent=1) if args.format == "json" else text)
    return int(any(report[part] for part in ("unknown", "defaults", "lost", "changes")))
