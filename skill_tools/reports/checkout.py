# SPDX-License-Identifier: Apache-2.0
"""The documents of a checkout: the rendered ones with their text, and all problems in them.

`offload card render` writes the rendered ones, `offload card check` compares them. Both first check the data against
its schemas: the card, the keys and the rules. The check also compares the card with its rules and keys, and the pages
with the files and commands in them. The version is `skill_tools.__version__`; four more files have it for other
readers, and are rendered too.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import skill_tools
from skill_tools.bundle import knowledge_path, schema_path
from skill_tools.card.blocks import Execute, bodies, fill, has_blocks
from skill_tools.card.configuration import configuration_page
from skill_tools.card.documents import page_problems
from skill_tools.card.load import Card, load_card, schema_problems
from skill_tools.card.references import reference_problems
from skill_tools.knowledge import load_keys, parsed_yaml
from skill_tools.rules import index
from skill_tools.rules.grammar import ConditionError, tree_of
from skill_tools.rules.knowledge import read_rule_files
from skill_tools.started import COMMAND

# Where an installer of skills, a reader of the card, a plugin market and whoever cites look for the version.
_VERSIONED = {
    "SKILL.md": re.compile(r'(?m)^(  version: ")[^"\n]*(")$'),
    "skill-card.md": re.compile(r"(?m)^(## Skill version\n\n)\S+()$"),
    "CITATION.cff": re.compile(r"(?m)^(version: )\S+()$"),
    ".claude-plugin/marketplace.json": re.compile(r'("version": ")[^"\n]*(")'),
}
_LONGEST_MESSAGE = 200  # characters of jsonschema's message; it may quote a whole rule


def pages_with_blocks(root: Path) -> list[Path]:
    """Return the hand-written pages: those beside SKILL.md and those in docs/, without the rendered one."""
    rendered = {root / "docs" / "configuration.md"}
    return [page for page in sorted([*root.glob("*.md"), *root.glob("docs/*.md")]) if page not in rendered]


def rendered_files(root: Path, card: Card, execute: Execute) -> dict[Path, str]:
    """Return each rendered file's path and text; raises `KeyError` naming a block that no table has.

    `execute` runs one command of the tool and returns its output, for the blocks that show one.
    """
    files = {root / "docs" / "configuration.md": configuration_page(load_keys())}
    tables = bodies(card)
    for page in pages_with_blocks(root):
        text = page.read_text(encoding="utf-8")
        if has_blocks(text):
            files[page] = fill(text, tables, execute)
    for name, pattern in _VERSIONED.items():
        text = files.get(root / name) or (root / name).read_text(encoding="utf-8")
        files[root / name] = pattern.sub(rf"\g<1>{skill_tools.__version__}\g<2>", text)
    return files


def data_problems(root: Path) -> list[str]:
    """Return one line for each place where card, keys or rules break their schemas, or a condition its grammar."""
    problems = [f"card.yaml {problem}" for problem in schema_problems(load_card(root / "card.yaml"))]
    problems += _knowledge_problems("keys", "keys.yaml", name="key")
    for path in sorted(knowledge_path("keys").glob("*.yaml")):
        problems += _knowledge_problems("keys", "keys", path.name, name="key")
    for path in sorted(knowledge_path("rules").glob("*.yaml")):
        problems += _knowledge_problems("rules", "rules", path.name, name="id")
    return problems


def _knowledge_problems(schema: str, *file: str, name: str) -> Iterator[str]:
    """Yield one line for each entry of a knowledge file that breaks `schema`; `name` is the entry's naming field."""
    text = knowledge_path(*file).read_text(encoding="utf-8")
    for problem in _text_problems(schema_path(schema).read_text(encoding="utf-8"), text, name):
        yield f"knowledge/{'/'.join(file)}: {problem}"


@cache
def _text_problems(schema: str, text: str, name: str) -> tuple[str, ...]:
    """Return the problems of a knowledge file's text; cached, as its validation takes a second of what `card` takes."""
    from jsonschema import Draft202012Validator

    try:
        entries = parsed_yaml(text)
    except yaml.YAMLError as error:
        return (f"is not YAML: {' '.join(str(error).split())}",)
    found, broken = [], set()
    for problem in Draft202012Validator(json.loads(schema)).iter_errors(entries):
        index, *place = problem.absolute_path or [None]
        broken.add(index)
        named = entries[index].get(name, f"entry {index}") if isinstance(index, int) else "the file"
        where = f" {'/'.join(map(str, place))}:" if place else ""
        found.append(f"{named}:{where} {_shortened(problem.message)}")
    for index, entry in enumerate(entries if None not in broken else ()):
        if index not in broken and "when" in entry:
            try:
                tree_of(entry["when"])
            except ConditionError as error:
                found.append(f"{entry[name]}: when: {error}")
    return tuple(found)


def _shortened(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]} ..."


def problems(root: Path, commands: Mapping[str, str], execute: Execute) -> list[str]:
    """Return one line a problem of the checkout at `root`.

    `commands` maps command names to help texts; `execute` runs a command and returns its output.
    """
    if broken := data_problems(root):
        return broken
    card = load_card(root / "card.yaml")
    found = reference_problems(card, raises=_raises(), spellings=_spellings())
    found += _missing_classes(root, card)
    found += _stale(root, card, execute)
    for page in pages_with_blocks(root):
        found += page_problems(page, root, commands)
    return found


def _missing_classes(root: Path, card: Card) -> list[str]:
    """Return the card's PyTorch classes that neither `reference_impl` nor a room of it exports."""
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
        f"{path.relative_to(root).as_posix()}: differs from its data; run `{COMMAND} card render`"
        for path, text in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    compiled = [f"skill_tools/knowledge/index: differs from its data; run `{COMMAND} card render`"]
    return (compiled if index.is_stale() else []) + stale


def _raises() -> dict[str, Sequence[str]]:
    texts: dict[str, Sequence[str]] = {}
    for rule in read_rule_files():
        raises = rule.get("raises", [])
        texts[rule["id"]] = [raises] if isinstance(raises, str) else raises
    return texts


def _spellings() -> dict[str, Collection[str]]:
    return {entry["key"]: _ways_to_write(entry) for entry in load_keys()}


def _ways_to_write(entry: Mapping[str, Any]) -> set[str]:
    aliases = entry.get("aliases", {}).values()
    return {entry["key"], *entry.get("spelling", {}).values(), *(one for group in aliases for one in group)}
