"""Renders docs/rules/coverage.md: for every known constraint, the rule that reports it or the reason why none does.

The list of constraints is `knowledge/coverage/inventory.txt`, found in the sources of the frameworks before any rule
was written; reasons stand in `knowledge/coverage/*.yaml`, one file a family. Nothing here decides what is covered: a
test holds inventory, rules and reasons to each other.
"""

from collections.abc import Mapping, Sequence

from skill_tools.bundle import knowledge_path
from skill_tools.knowledge import load_yaml
from skill_tools.rules.knowledge import Rule

FAMILIES: Mapping[str, str] = {
    "la": "Layer-level activation offload",
    "fg": "Fine-grained activation offload",
    "oc": "Optimizer CPU offload",
    "os": "Optimizer-state offload",
    "mlm": "Megatron-LM command line",
    "br": "Megatron Bridge",
    "ax": "Axolotl",
    "ds": "DeepSpeed and FSDP from Axolotl",
    "fsdp": "DeepSpeed and FSDP from Axolotl",
}


def family(identifier: str) -> str:
    """Return the name of the family that an id belongs to, by its first part."""
    return FAMILIES[identifier.partition("-")[0]]


def load_inventory() -> tuple[str, ...]:
    """Return the ids of all known constraints, in the order of their families."""
    return tuple(knowledge_path("coverage", "inventory.txt").read_text(encoding="utf-8").split())


def load_coverage() -> dict[str, str]:
    """Return the reason of every constraint that no rule reports, by id; raises `ValueError` for a repeated id."""
    reasons: dict[str, str] = {}
    for path in sorted(knowledge_path("coverage").glob("*.yaml")):
        for entry in load_yaml("coverage", path.name):
            if entry["id"] in reasons:
                raise ValueError(f"{entry['id']} has two reasons; keep one of them, see {path.name}")
            reasons[entry["id"]] = " ".join(entry["reason"].split())
    return reasons


def render(rules: Sequence[Rule], coverage: Mapping[str, str]) -> str:
    """Return the page: counts a family, then every constraint with the rule or the reason."""
    by_id = {rule.id: rule for rule in rules}
    inventory = load_inventory()
    beyond = sorted(by_id.keys() - set(inventory))
    parts = [
        "# Coverage",
        f"{len(inventory)} constraints on offloading were found in the frameworks' sources, documents and issue"
        " threads. Each is a rule, or stands here with the reason why no rule can report it.",
        _counts(inventory, by_id, coverage),
        *(_table(name, inventory, by_id, coverage) for name in dict.fromkeys(FAMILIES.values())),
        "## Rules beyond the inventory\n\nFound later, or about the input itself: "
        + (", ".join(f"[{identifier}]({identifier}.md)" for identifier in beyond) or "none")
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _counts(inventory: Sequence[str], by_id: Mapping[str, Rule], coverage: Mapping[str, str]) -> str:
    lines = [
        "| family | constraints | from a configuration | from a log | no rule |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in [*dict.fromkeys(FAMILIES.values()), "all"]:
        ids = [one for one in inventory if name in ("all", family(one))]
        from_log = sum(one in by_id and by_id[one].check == "log" for one in ids)
        from_config = sum(one in by_id for one in ids) - from_log
        without = sum(one in coverage for one in ids)
        lines.append(f"| {name} | {len(ids)} | {from_config} | {from_log} | {without} |")
    return "\n".join(lines)


def _table(
    name: str, inventory: Sequence[str], by_id: Mapping[str, Rule], coverage: Mapping[str, str]
) -> str:
    lines = [f"## {name}", "", "| id | severity | where |", "|---|---|---|"]
    for identifier in inventory:
        if family(identifier) == name:
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
