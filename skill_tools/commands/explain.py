"""Explain rules: what each means, why it holds, wrong and right examples, and what to do."""

import argparse
import json

from skill_tools.errors import UnusableInput
from skill_tools.reports.rule_pages import brief, page
from skill_tools.rules.knowledge import Rule, load_rules
from skill_tools.terminal import print_markdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the rules, or `--list`, and the form."""
    parser.add_argument(
        "rules", nargs="*", metavar="RULE", help="the id of a rule, such as la-pp; repeatable"
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
    """Print the rules or the list; raises `UnusableInput` for a rule that does not exist."""
    if args.list == bool(args.rules):
        raise UnusableInput(
            "there is nothing to explain" if not args.rules else "a rule and --list are two things",
            expected="RULE or --list",
            attempt="explain la-pp",
        )
    known = load_rules()
    if args.list:
        print(_list_json(known) if args.format == "json" else _list_text(known))
        return 0
    rules = tuple(_find(rule_id, known) for rule_id in dict.fromkeys(args.rules))
    if args.format == "json":
        print(
            json.dumps(_data(rules[0]), indent=2, ensure_ascii=False)
            if len(rules) == 1
            else _list_json(rules)
        )
    else:
        print_markdown("\n".join(map(brief if args.brief else page, rules)))
    return 0


def _find(rule_id: str, rules: tuple[Rule, ...]) -> Rule:
    by_id = {rule.id: rule for rule in rules}
    if rule_id in by_id:
        return by_id[rule_id]
    from difflib import get_close_matches

    nearest = get_close_matches(rule_id, by_id, n=3, cutoff=0.5)
    raise UnusableInput(
        f"there is no rule {rule_id!r}",
        expected="the id of a rule",
        attempt=" or ".join(nearest) if nearest else "explain --list",
    )


def _list_text(rules: tuple[Rule, ...]) -> str:
    width = max(len(rule.id) for rule in rules)
    return "\n".join(
        f"{rule.id:<{width}}  {rule.severity:<7}  {', '.join(rule.dialects)}: {rule.title}" for rule in rules
    )


def _list_json(rules: tuple[Rule, ...]) -> str:
    return json.dumps([_data(rule) for rule in rules], indent=2, ensure_ascii=False)


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
        "evidence": {"tag": rule.evidence.tag, "ref": rule.evidence.ref, "quote": rule.evidence.quote},
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
