# SPDX-License-Identifier: Apache-2.0
"""Explain rules: the meaning of each, its reason, wrong and right examples, and the change.

Of a key, under any of its names (`offload_optimizer.device`, `optimizer-offload-fraction`), it says in a few lines
how each framework spells it, its type, default and releases, and the rules about it.
"""

import argparse
import json
from collections.abc import Sequence

from skill_tools.configs.keys import Key, load_keys
from skill_tools.errors import UnusableInput
from skill_tools.nearest import did_you_mean
from skill_tools.reports.key_lines import key_data, key_lines, keys_named, names_of
from skill_tools.reports.rule_pages import brief, page
from skill_tools.rules.knowledge import Rule, load_rules
from skill_tools.terminal import print_markdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the rules, or `--list`, and the form."""
    parser.add_argument(
        "rules", nargs="*", metavar="NAME", help="the id of a rule, such as la-pp, or a key; repeatable"
    )
    parser.add_argument(
        "--brief",
        action="store_true",
        help="a few lines a rule: consequence, the framework's text, why, change",
    )
    parser.add_argument(
        "--list", action="store_true", help="list every rule: id, severity, frameworks, title"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    """Print the rules, keys or the list; raises `UnusableInput` for a name that neither has."""
    if args.list == bool(args.rules):
        raise UnusableInput(
            "there is nothing to explain" if not args.rules else "a rule and --list are two things",
            expected="RULE, KEY or --list",
            attempt="explain la-pp",
        )
    known = load_rules()
    if args.list:
        print(_list_json(known) if args.format == "json" else _list_text(known))
        return 0
    found = [each for name in dict.fromkeys(args.rules) for each in _find(name, known)]
    if args.format == "json":
        data = [_data(each) if isinstance(each, Rule) else key_data(each, known) for each in found]
        print(json.dumps(data[0] if len(data) == 1 else data, indent=2, ensure_ascii=False))
        return 0
    of_rule = brief if args.brief else page
    rules = [of_rule(each) for each in found if isinstance(each, Rule)]
    print("\n".join(key_lines(each, known) for each in found if isinstance(each, Key)), end="")
    if rules:
        print_markdown("\n".join(rules))
    return 0


def _find(name: str, rules: tuple[Rule, ...]) -> Sequence[Rule | Key]:
    """Return the rule with this id, else the keys of this name."""
    by_id = {rule.id: rule for rule in rules}
    if name in by_id:
        return [by_id[name]]
    keys = load_keys()
    found = keys_named(name, keys)
    if not found:
        raise UnusableInput(
            f"there is no rule and no key {name!r}",
            expected="the id of a rule, or a key",
            attempt=did_you_mean(name, {*by_id, *names_of(keys)}, otherwise="explain --list"),
        )
    return found


def _list_text(rules: tuple[Rule, ...]) -> str:
    width = max(len(rule.id) for rule in rules)
    return "\n".join(
        f"{rule.id:<{width}}  {rule.severity:<7}  {', '.join(rule.dialects)}: {rule.title}" for rule in rules
    )


def _list_json(rules: tuple[Rule, ...]) -> str:
    return json.dumps([_data(rule) for rule in rules], indent=2, ensure_ascii=False)


def _also(rule: Rule) -> dict[str, object]:
    """Return further evidence, from releases with other words."""
    others = [each._asdict() | {"versions": dict(each.versions)} for each in rule.evidence_in]
    return {"also": others} if others else {}


def _data(rule: Rule) -> dict[str, object]:
    """Return the rule in the shape of `schema/rules.schema.json`, with the command that prints its page."""
    return {
        "id": rule.id,
        "title": rule.title,
        "mechanism": rule.mechanism,
        "dialects": list(rule.dialects),
        "when": rule.when,
        "check": rule.check,
        "severity": rule.severity,
        "effect": rule.effect,
        "raises": list(rule.raises),
        "message": rule.message,
        "versions": dict(rule.versions),
        "why": rule.why,
        "evidence": rule.evidence._asdict() | _also(rule),
        "next": rule.next,
        "fix": {
            "applicability": rule.fix.applicability,
            "description": rule.fix.description,
            "set": dict(rule.fix.set),
            "remove": list(rule.fix.remove),
            "options": list(rule.fix.options),
        },
        "examples": {
            framework: {"bad": example.bad, "good": example.good, "filename": example.filename}
            for framework, example in rule.examples.items()
        },
        "docs": rule.docs,
    }
