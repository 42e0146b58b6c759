# SPDX-License-Identifier: Apache-2.0
"""Compares the rules of trainers with their releases' own answers, in both directions.

    python tests/judges/sources/judge.py --configurations 5000 [NAME ...]

For each release fetched by `fetch.py`: an error raised by it must be among our findings, in its own words. If it raises
none, we may find none. Where a module names rules in `PRINTED`, the printed text is compared as well. The exit code is
1 if any configuration disagrees.
"""

import argparse
import contextlib
import importlib
import io
import logging
import random
import re
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from skill_tools.configs.source import Source
from skill_tools.dialects.read import read_sources
from skill_tools.rules.knowledge import Rule, load_rules_yaml
from skill_tools.rules.lint import lint

ROOT = Path(__file__).parents[3]
PARSERS = ROOT / "build" / "parsers_of_trainers"
sys.path.append(str(PARSERS))
FRAMEWORKS = (
    *("musubi", "sd_scripts", "onetrainer", "ai_toolkit", "openrlhf", "slime", "radix_miles", "sky_rl"),
    *(
        "a_real",
        "mind_speed",
        "un_sloth",
        "simple_tuner",
        "auto_model",
        "ou_mi",
        "ro_ll",
        "ve_omni",
        "max_text",
        "x_tuner",
    ),
)


def main() -> int:
    """Judge every release that is there; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("frameworks", nargs="*", default=FRAMEWORKS)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    total = 0
    for module in map(importlib.import_module, given.frameworks):
        for release in module.RELEASES:
            folder = ROOT / "build" / module.NAME / release
            if not folder.is_dir():
                print(f"{module.NAME} {release}: not fetched (python tests/judges/sources/fetch.py)")
                continue
            count = min(given.configurations, getattr(module, "MOST", given.configurations))
            total += judged(module, folder, release, count, given.seed)
    return int(total > 0)


def judged(module: Any, folder: Path, release: str, count: int, seed: int) -> int:
    """Print the answers of one release and the rules to `count` inputs, and return how often they disagree."""
    rules = [
        rule
        for rule in load_rules_yaml()
        if (module.NAME in rule.dialects and rule.id not in module.NOT_JUDGED)
        or rule.id in getattr(module, "ALSO_JUDGED", ())
    ]
    printed_rules = getattr(module, "PRINTED", set())
    witness, chance = module.Witness(folder), random.Random(f"{module.NAME} {seed}")
    counts: Counter[str] = Counter()
    shown: dict[str, str] = {}
    for _ in range(count):
        question = module.asked(chance, release)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                witness.ask(*question)
            raised = ""
        except (Exception, SystemExit) as error:
            raised = str(error) or failed_line(error)
        counts["raised"] += bool(raised)
        text = module.command(*question)
        file = getattr(module, "FILENAME", "run.sh")
        told = {rule.id: says(rule, printed.getvalue()) for rule in rules if rule.id in printed_rules}
        overrides = module.overrides(*question) if hasattr(module, "overrides") else ()
        for problem in disagreements(
            module.NAME, release, Source(file, text), overrides, raised, rules, told
        ):
            counts[problem] += 1
            counts["disagree"] += 1
            shown.setdefault(problem, text)
    print(f"{module.NAME} {release}: {count} asked, {counts['raised']} raised, {counts['disagree']} disagree")
    for problem, text in list(shown.items())[:8]:
        print(f"  {counts[problem]} x {problem}\n    {text}")
    return counts["disagree"]


def failed_line(error: BaseException) -> str:
    """Return the line that raised an error without words, as a traceback shows it."""
    return traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__


def disagreements(
    name: str,
    release: str,
    source: Source,
    overrides: tuple[str, ...],
    raised: str,
    rules: list[Rule],
    told: dict[str, bool],
) -> list[str]:
    """Return the errors that the release has and the rules have not, and the other way round."""
    config = read_sources([source], overrides=overrides)
    verdict = lint(config, rules=rules, versions={name: release})
    mistyped = {wrong.setting.key for wrong in config.wrong_types}  # which is said of them
    problems = [
        f"undecided: {each.rule}" for each in verdict.undecided if not mistyped.issuperset(each.missing)
    ]
    found = {each.rule for each in verdict.findings}
    errors = {
        rule.id for rule in rules if rule.effect in ("raises", "raises-at-build", "crashes-later")
    } & found
    said = {rule.id for rule in rules if raised and says(rule, raised)}
    if raised and not said & errors:
        problems.append(f"raised, not found: {raised.splitlines()[0][:140]} (found {sorted(errors)})")
    if not raised:
        problems += [f"found, not raised: {each}" for each in sorted(errors)]
        problems += [
            f"{'printed, not found' if is_told else 'found, not printed'}: {rule}"
            for rule, is_told in told.items()
            if is_told != (rule in found)
        ]
    return problems


def says(rule: Rule, text: str) -> bool:
    """Whether `text` holds the text that the framework prints by the rule; `{..}` stands for anything."""
    patterns = (re.escape(one).replace(re.escape("{..}"), ".*") for one in rule.raises)
    return any(re.search(pattern, text) for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
