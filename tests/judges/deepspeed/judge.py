# SPDX-License-Identifier: Apache-2.0
"""Holds the rules to DeepSpeed itself: generated configurations, one release a process, both directions.

    python tests/judges/deepspeed/judge.py --configurations 5000 [--without RULE ..] [0.17.0 0.19.8 ..]

A release raises an error while it loads a configuration exactly when a rule with the severity error and the effect
`raises` fires for that version. `--without` leaves rules out, to show that their loss is seen.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

from configurations import Generator  # noqa: E402
from fetch import EXTRAS, ROOT, trees  # noqa: E402

from skill_tools.dialects.read import read_text  # noqa: E402
from skill_tools.rules.finding import Severity  # noqa: E402
from skill_tools.rules.knowledge import Rule, load_rules_yaml  # noqa: E402
from skill_tools.rules.lint import lint  # noqa: E402

SHOWN = 12
UNCHECKED_PRECISION = {"0.17.0"}


def load_rules(without: list[str]) -> tuple[Rule, ...]:
    """Return all rules of the files but those that are left out."""
    return tuple(rule for rule in load_rules_yaml() if rule.id not in without)


def raised_by(tree: Path, configurations: list[dict[str, Any]]) -> list[str]:
    """Return the error of each configuration in one release, "" where it loads."""
    command = [sys.executable, str(HERE / "witness.py"), str(tree), str(EXTRAS)]
    text = "".join(f"{json.dumps(each)}\n" for each in configurations)
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{tree.name} cannot be asked: {result.stderr[-2000:]}")
    return [json.loads(line) for line in result.stdout.splitlines()]


def predicted(configuration: dict[str, Any], version: str, rules: tuple[Rule, ...]) -> list[str]:
    """Return the rules that say a configuration does not load."""
    config = read_text(json.dumps(configuration), "ds_config.json", framework="deepspeed")
    raising = {rule.id for rule in rules if rule.effect == "raises" and "deepspeed" in rule.dialects}
    found = lint(config, rules=rules, versions={"deepspeed": version}).findings
    return sorted({each.rule for each in found if each.severity is Severity.ERROR} & raising)


def disagreements(
    tree: Path, count: int, seed: int, rules: tuple[Rule, ...]
) -> tuple[list[str], Counter[str]]:
    """Return one line for each configuration on which release and rules differ, and how often each rule was right."""
    generator = Generator(seed, checks_precision=tree.name not in UNCHECKED_PRECISION)
    configurations = [generator.next() for _ in range(count)]
    lines, right = [], Counter[str]()
    for configuration, error in zip(configurations, raised_by(tree, configurations), strict=True):
        said = predicted(configuration, tree.name, rules)
        if bool(error) != bool(said):
            lines.append(
                f"{json.dumps(configuration)}\n    release: {error or 'loads'}\n    rules: {said or 'silent'}"
            )
        else:
            right.update(said)
            right["loads"] += not said
    return lines, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("releases", nargs="*", help="default: all that are unpacked")
    parser.add_argument("--configurations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[], metavar="RULE")
    args = parser.parse_args()
    rules = load_rules(args.without)
    failed = 0
    for tree in [ROOT / each for each in args.releases] or trees():
        lines, right = disagreements(tree, args.configurations, args.seed, rules)
        print(f"{tree.name}: {args.configurations} configurations, {len(lines)} disagreements, {dict(right)}")
        print("".join(f"  {line}\n" for line in lines[:SHOWN]), end="")
        failed += bool(lines)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
