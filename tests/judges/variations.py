# SPDX-License-Identifier: Apache-2.0
"""Each rule's verdict one or a few keys away from its own example; recorded, so that a slip in a condition is seen.

    python tests/judges/variations.py            compare, list the differences
    python tests/judges/variations.py RULE ..    record these rules again, after their new verdicts were read

`variations.json` has, for each rule, the values that its bad example gives to the names of the condition, and rows of
changed values with the verdict. The rows are few: each tells the condition from a change of `conditions_changed`.
A recorded verdict is no proof that the rule is right; the judges of released frameworks are for that.
"""

import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]

from conditions_changed import changes as changes_of  # noqa: E402
from conditions_changed import constants, leaves  # noqa: E402
from shipped import KEYS, RULES  # noqa: E402

from skill_tools.configs.source import Source  # noqa: E402
from skill_tools.dialects.read import read, read_sources  # noqa: E402
from skill_tools.rules.conditions import Condition, build  # noqa: E402
from skill_tools.rules.knowledge import Rule  # noqa: E402
from skill_tools.rules.operations import UNKNOWN  # noqa: E402
from skill_tools.rules.values import Scope  # noqa: E402
from skill_tools.rules.versions import resolve  # noqa: E402

FILE = HERE / "variations.json"
SAMPLES = 400
Values = dict[str, Any]


def recorded() -> dict[str, dict[str, Any]]:
    """Return the record, by rule."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return found


def differing(rule_id: str, condition: Condition | None, record: Mapping[str, Any]) -> list[str]:
    """Return the recorded rows on which `condition` says something else; a rule that is gone differs in itself."""
    if condition is None:
        return [f"{rule_id} is gone"]
    start: Values = record["start"]
    rows = [({}, True), *((changed, False) for changed in record["silent"])]
    rows += [(changed, True) for changed in record["fires"]]
    return [
        f"{rule_id} says {says(condition, start | changed)} of {changed or 'its example'}"
        for changed, expected in rows
        if says(condition, start | changed) is not expected
    ]


def says(condition: Condition, values: Mapping[str, Any]) -> bool:
    """Return whether the condition holds; a name that is not recorded is not set."""
    return condition.holds(Unset(values)) is True


class Unset(dict[str, Any]):
    """Values by name, None for any other."""

    def __missing__(self, name: str) -> None:
        return None


def start_of(rule: Rule) -> Values | None:
    """Return the values that the rule's first bad example gives to the names of its condition."""
    for framework, example in rule.examples.items():
        config = (
            read([], overrides=example.bad.split("\n"), framework=framework)
            if example.filename == "<overrides>"
            else read_sources([Source(example.filename, example.bad)], framework=framework)
        )
        scope = Scope(config, KEYS, resolve(config.versions, example.versions), as_written=True)
        values = {name: scope[name] for name in rule.condition.names}
        values = {name: value for name, value in values.items() if value is not UNKNOWN}
        if says(rule.condition, values):
            return values
    return None


def record(rule: Rule) -> dict[str, Any] | None:
    """Return a record of `rule`: the fewest rows that tell its condition from each visible change."""
    start = start_of(rule)
    if start is None:
        return None
    alive = [condition for _, tree in changes_of(rule.tree) if (condition := build(tree))]
    alive = [condition for condition in alive if says(condition, start)]
    silent: list[Values] = []
    fires: list[Values] = []
    for changed in candidates(rule, start):
        if not alive:
            break
        verdict = says(rule.condition, start | changed)
        left = [condition for condition in alive if says(condition, start | changed) is verdict]
        if len(left) < len(alive):
            (fires if verdict else silent).append(changed)
            alive = left
    return {"start": start, "silent": silent, "fires": fires}


def candidates(rule: Rule, start: Values) -> Iterator[Values]:
    """Yield changes of one name, then of two to four, drawn with the rule's name as seed."""
    pools = {name: pool(rule, name) for name in rule.condition.names}
    for name, values in pools.items():
        for value in values:
            if value != start.get(name) or type(value) is not type(start.get(name)):
                yield {name: value}
    draw = random.Random(rule.id)
    names = sorted(pools)
    for _ in range(SAMPLES if len(names) > 1 else 0):
        chosen = draw.sample(names, min(len(names), draw.randint(2, 4)))
        yield {name: draw.choice(pools[name]) for name in chosen}


def pool(rule: Rule, name: str) -> list[Any]:
    """Return the values of `name` that the condition tells apart: its constants, and their neighbours."""
    if name.startswith("is_set(") or any(sign in name for sign in "<>="):
        return [True, False]
    values: list[Any] = [True, False, None, "other", []]
    for leaf in leaves(rule.tree):
        if name not in build(leaf).names:
            continue
        for constant in constants(leaf):
            if isinstance(constant, str):
                values += [constant, [constant], {constant: True}, f"{constant}_", f"_{constant}"]
            elif isinstance(constant, int | float) and not isinstance(constant, bool):
                values += [constant, constant - 1, constant + 1]
    return list({json.dumps(value): value for value in values}.values())


def main(again: list[str]) -> None:
    rules = {rule.id: rule for rule in RULES if rule.when}
    records = recorded()
    for identifier in again or sorted(rules.keys() - records.keys()):
        found = record(rules[identifier]) if identifier in rules else None
        records.pop(identifier, None)
        if found is not None:
            records[identifier] = found
    lines = (f" {json.dumps(name)}: {json.dumps(records[name], default=str)}" for name in sorted(records))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    problems = [
        line
        for name, one in records.items()
        for line in differing(name, rules[name].condition if name in rules else None, one)
    ]
    print("\n".join(problems) or f"{len(records)} rules give their recorded answers")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main(sys.argv[1:])
