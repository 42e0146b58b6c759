# SPDX-License-Identifier: Apache-2.0
"""The folder of all rules as Markdown: a page for each, an index, and the coverage of known constraints.

It is built by `offload card pages`, and for the wheel, and not kept in git. An agent's copy has the single page alone.

The known constraints are `knowledge/coverage/inventory*.txt`, found in the sources of the frameworks before any rule
was written. Each is covered by a rule or has a reason in `knowledge/coverage/*.yaml`; a test compares inventory,
rules and reasons.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from skill_tools.bundle import knowledge_path
from skill_tools.dialects import registry
from skill_tools.knowledge import load_yaml
from skill_tools.reports.rule_pages import page
from skill_tools.rules.knowledge import Rule, load_rules_yaml


def rule_pages() -> dict[str, str]:
    """Return the file name and text of every page: one a rule, the index README.md and coverage.md."""
    rules = load_rules_yaml()
    return {
        **{f"{rule.id}.md": page(rule) for rule in rules},
        "README.md": index_page(rules),
        "coverage.md": coverage_page(rules, load_coverage()),
    }


def write_rule_pages(folder: Path) -> int:
    """Write every page into `folder`, remove pages of rules that are gone, and return how many pages there are."""
    pages = rule_pages()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    return len(pages)


def index_page(rules: Sequence[Rule]) -> str:
    """Return the index: one table of all rules, in the order of their mechanisms."""
    lines = [
        "# Rules",
        "",
        f"{len(rules)} rules. `offload explain RULE` prints a page; `offload lint` finds them."
        " [Coverage](coverage.md) says which known constraints they report.",
    ]
    lines += ["", "| rule | severity | mechanism | frameworks | title |", "|---|---|---|---|---|"]
    for rule in sorted(rules, key=lambda rule: rule.mechanism):
        cells = (f"[{rule.id}]({rule.id}.md)", rule.severity, rule.mechanism, ", ".join(rule.dialects))
        lines.append(f"| {' | '.join(cells)} | {_cell(rule.title)} |")
    return "\n".join(lines) + "\n"


def families(rules: Sequence[Rule]) -> Mapping[str, str]:
    """Return the title of every family of constraints, by the first part of its ids.

    A family without a title of its own is called like the one dialect that its rules are about.
    """
    titles: dict[str, str] = load_yaml("families.yaml")
    about: dict[str, set[str]] = {}
    for rule in rules:
        about.setdefault(_prefix(rule.id), set()).update(rule.dialects)
    own = {
        prefix: registry.named(next(iter(names))).label for prefix, names in about.items() if len(names) == 1
    }
    order = [registry.named(name).label for name in registry.names()]
    ordered = sorted(own.keys() - titles.keys(), key=lambda prefix: (order.index(own[prefix]), prefix))
    return {**titles, **{prefix: own[prefix] for prefix in ordered}}


def _prefix(identifier: str) -> str:
    return identifier.partition("-")[0]


def load_inventory() -> tuple[str, ...]:
    """Return the ids of all known constraints, in the order of their families."""
    paths = sorted(knowledge_path("coverage").glob("inventory*.txt"))
    return tuple(identifier for path in paths for identifier in path.read_text(encoding="utf-8").split())


def load_coverage() -> dict[str, str]:
    """Return the reason of every constraint that no rule reports, by id; raises `ValueError` for a repeated id."""
    reasons: dict[str, str] = {}
    for path in sorted(knowledge_path("coverage").glob("*.yaml")):
        for entry in load_yaml("coverage", path.name):
            if entry["id"] in reasons:
                raise ValueError(f"{entry['id']} has two reasons; keep one of them, see {path.name}")
            reasons[entry["id"]] = " ".join(entry["reason"].split())
    return reasons


def coverage_page(rules: Sequence[Rule], coverage: Mapping[str, str]) -> str:
    """Return the page: counts a family, then every constraint with the rule or the reason."""
    by_id = {rule.id: rule for rule in rules}
    titles = families(rules)
    inventory = [(identifier, titles[_prefix(identifier)]) for identifier in load_inventory()]
    beyond = sorted(by_id.keys() - {identifier for identifier, _ in inventory})
    parts = [
        "# Coverage",
        f"{len(inventory)} constraints on offloading were found in the frameworks' sources, documents and issue"
        " threads. Each is a rule, or stands here with the reason why no rule can report it.",
        _coverage_counts(list(dict.fromkeys(titles.values())), inventory, by_id, coverage),
        *(_family_table(name, inventory, by_id, coverage) for name in dict.fromkeys(titles.values())),
        "## Rules beyond the inventory\n\nFound later, or about the input itself: "
        + (", ".join(f"[{identifier}]({identifier}.md)" for identifier in beyond) or "none")
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _coverage_counts(
    names: Sequence[str],
    inventory: Sequence[tuple[str, str]],
    by_id: Mapping[str, Rule],
    coverage: Mapping[str, str],
) -> str:
    lines = [
        "| family | constraints | from a configuration | from a log | no rule |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in [*names, "all"]:
        ids = [one for one, title in inventory if name in ("all", title)]
        from_log = sum(one in by_id and by_id[one].check == "log" for one in ids)
        from_config = sum(one in by_id for one in ids) - from_log
        without = sum(one in coverage for one in ids)
        lines.append(f"| {name} | {len(ids)} | {from_config} | {from_log} | {without} |")
    return "\n".join(lines)


def _family_table(
    name: str, inventory: Sequence[tuple[str, str]], by_id: Mapping[str, Rule], coverage: Mapping[str, str]
) -> str:
    lines = [f"## {name}", "", "| id | severity | where |", "|---|---|---|"]
    for identifier, title in inventory:
        if title == name:
            lines.append(f"| {identifier} | {_where(identifier, by_id, coverage)} |")
    return "\n".join(lines)


def _where(identifier: str, by_id: Mapping[str, Rule], coverage: Mapping[str, str]) -> str:
    rule = by_id.get(identifier)
    if rule is None:
        return f"none | {_cell(coverage.get(identifier, 'not accounted for'))}"
    seen_in = "; seen in a log" if rule.check == "log" else ""
    return f"{rule.severity} | [{_cell(rule.title)}]({identifier}.md){seen_in}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
