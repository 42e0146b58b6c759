# SPDX-License-Identifier: Apache-2.0
"""Whether a slip in the rules is noticed: rules taken away, and conditions changed, one at a time.

    python tests/judges/mutations.py --removed 40 --changed 60 --seed 1
    python tests/judges/mutations.py --all

A change is noticed by the rule's examples (the bad one is found, the good one is not) or by its recorded variations
(`variations.json`); a rule that is taken away by its record, and by the judge of a released framework, to which a text
that no rule has is a disagreement (`megatron/judge.py`). Changes that no row of `variations.candidates` tells from the
condition mean the same and are left out.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from conditions_changed import Tree, changes  # noqa: E402
from variations import KEYS, candidates, differing, recorded, says, start_of  # noqa: E402

from skill_tools.configs.source import Source  # noqa: E402
from skill_tools.dialects.read import read, read_sources  # noqa: E402
from skill_tools.rules.conditions import Condition, build  # noqa: E402
from skill_tools.rules.knowledge import Rule, load_rules_yaml  # noqa: E402
from skill_tools.rules.values import Scope  # noqa: E402
from skill_tools.rules.versions import resolve  # noqa: E402

RECORDS = recorded()


class Mutant(NamedTuple):
    """One slip: a rule with the condition `tree` now, or a removed one (None); `word` names the slip."""

    rule: Rule
    word: str
    tree: Tree | None


def removed(rules: list[Rule]) -> list[Mutant]:
    return [Mutant(rule, "taken away", None) for rule in rules]


def changed(rules: list[Rule]) -> list[Mutant]:
    """Return every change of every condition that some row can tell from the condition itself."""
    return [
        mutant
        for rule in rules
        for mutant in (Mutant(rule, word, tree) for word, tree in changes(rule.tree))
        if shows(mutant)
    ]


def shows(mutant: Mutant) -> bool:
    """Return whether any candidate row tells the changed condition from the rule's; if none does, they are the same."""
    assert mutant.tree is not None
    start, other = start_of(mutant.rule), build(mutant.tree)
    if start is None:
        return True
    rows = [{}, *candidates(mutant.rule, start)]
    return any(says(mutant.rule.condition, start | row) is not says(other, start | row) for row in rows)


def noticed_by(mutant: Mutant) -> list[str]:
    """Return the rules and tests that report the slip."""
    condition = None if mutant.tree is None else build(mutant.tree)
    found = []
    if condition is not None and any(wrong_examples(mutant.rule, condition)):
        found.append("examples")
    record = RECORDS.get(mutant.rule.id)
    if record is not None and differing(mutant.rule.id, condition, record):
        found.append("variations")
    return found


def wrong_examples(rule: Rule, condition: Condition) -> Iterator[bool]:
    """Yield for each example whether the changed condition judges it wrongly."""
    for framework, example in rule.examples.items():
        for text, expected in ((example.bad, True), (example.good, False)):
            config = (
                read([], overrides=text.split("\n"), framework=framework)
                if example.filename == "<overrides>"
                else read_sources([Source(example.filename, text)], framework=framework)
            )
            scope = Scope(config, KEYS, resolve(config.versions, example.versions))
            yield (condition.holds(scope) is True) is not expected


def sample(args: argparse.Namespace) -> list[Mutant]:
    rules = [rule for rule in load_rules_yaml() if rule.when]
    draw = random.Random(args.seed)
    if args.all:
        return removed(rules) + changed(rules)
    few = draw.sample(rules, min(len(rules), args.changed * 2))
    return removed(draw.sample(rules, args.removed)) + draw.sample(changed(few), args.changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--removed", type=int, default=40, help="rules to take away")
    parser.add_argument("--changed", type=int, default=60, help="conditions to change")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="every rule and every change")
    mutants = sample(parser.parse_args())
    survivors = 0
    for mutant in mutants:
        by = noticed_by(mutant)
        survivors += not by
        print(f"{mutant.rule.id:32} {mutant.word[:60]:60} {', '.join(by) or 'SURVIVES'}")
    print(f"{len(mutants) - survivors} of {len(mutants)} slips are noticed")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
