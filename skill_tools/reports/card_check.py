"""Everything that `offload card check` looks at, in one list of problems.

The card against its schemas and against the rules and keys it names; the documents against the card, the tree
and the commands; the version against itself.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from skill_tools.card.blocks import Execute
from skill_tools.card.documents import page_problems
from skill_tools.card.load import Card, load_card, schema_problems
from skill_tools.card.references import reference_problems
from skill_tools.card.release import version_problems
from skill_tools.knowledge import load_yaml
from skill_tools.reports.rendered import orphans, pages_with_blocks, rendered_files
from skill_tools.rules import index
from skill_tools.rules.knowledge import read_rule_files


def problems(root: Path, commands: Mapping[str, str], execute: Execute) -> list[str]:
    """Return one line a problem of the checkout at `root`.

    `commands` maps command names to help texts; `execute` runs a command and returns its output.
    """
    card = load_card(root / "card.yaml")
    broken = [f"card.yaml {problem}" for problem in schema_problems(card)]
    if broken:
        return broken
    found = reference_problems(card, raises=_raises(), spellings=_spellings())
    found += _missing_classes(root, card)
    found += _stale(root, card, execute)
    for page in pages_with_blocks(root):
        found += page_problems(page, root, commands)
    return found + version_problems(root)


def _missing_classes(root: Path, card: Card) -> list[str]:
    """Return the PyTorch classes that the card names and that neither `reference_impl` nor a room of it exports."""
    doors = [*root.glob("reference_impl/__init__.py"), *root.glob("reference_impl/*/__init__.py")]
    exports = "".join(path.read_text(encoding="utf-8") for path in doors)
    return [
        f"card.yaml mechanisms/{name}: reference_impl exports no {wanted.partition('(')[0]}"
        for name, mechanism in card["mechanisms"].items()
        if (wanted := mechanism["frameworks"]["pytorch"]) and f'"{wanted.partition("(")[0]}"' not in exports
    ]


def _stale(root: Path, card: Card, execute: Execute) -> list[str]:
    try:
        files = rendered_files(root, card, execute)
    except KeyError as error:
        return [f"a page has a block of an unknown name: {error.args[0]}"]
    stale = [
        f"{path.relative_to(root).as_posix()}: differs from its data; run `offload card render`"
        for path, text in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    orphaned = [
        f"{page.relative_to(root).as_posix()}: no rule renders it; run `offload card render`"
        for page in orphans(root, files)
    ]
    compiled = ["skill_tools/knowledge/index.json: differs from its data; run `offload card render`"]
    return (compiled if index.is_stale() else []) + stale + orphaned


def _raises() -> dict[str, Sequence[str]]:
    texts: dict[str, Sequence[str]] = {}
    for rule in read_rule_files():
        raises = rule.get("raises", [])
        texts[rule["id"]] = [raises] if isinstance(raises, str) else raises
    return texts


def _spellings() -> dict[str, Collection[str]]:
    keys: list[dict[str, Any]] = load_yaml("keys.yaml")
    return {entry["key"]: _ways_to_write(entry) for entry in keys}


def _ways_to_write(entry: Mapping[str, Any]) -> set[str]:
    aliases = entry.get("aliases", {}).values()
    return {entry["key"], *entry.get("spelling", {}).values(), *(one for group in aliases for one in group)}
