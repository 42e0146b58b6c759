# SPDX-License-Identifier: Apache-2.0
"""Every rule file keeps the schema, speaks the language of conditions and reads known keys."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from for_each import for_each
from shipped import KEY_ENTRIES

from skill_tools.bundle import knowledge_path, schema_path
from skill_tools.dialects import registry
from skill_tools.rules.conditions import parse
from skill_tools.rules.grammar import ConditionError, text_of, tree_of
from skill_tools.rules.knowledge import read_rule_files

SCHEMA = json.loads(schema_path("rules").read_text(encoding="utf-8"))
KNOWN = {entry["key"] for entry in KEY_ENTRIES}

each_file = for_each(sorted(knowledge_path("rules").glob("*.yaml")), lambda path: path.stem)


def entries_of(path: Path) -> list[dict[str, Any]]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) or []


def keys_read(names: tuple[str, ...]) -> set[str]:
    """The keys among a condition's names: `is_set(x)` reads x, and a release is no key."""
    keys = {re.sub(r"^is_set\((.*)\)$", r"\1", name) for name in names}
    return {key for key in keys if not re.search("[<>=~]", key)}


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@each_file
def test_a_file_keeps_the_schema(path: Path) -> None:
    entries = entries_of(path)
    problems = [
        f"{entries[error.path[0]].get('id') if error.path else path.name}: "
        f"{'/'.join(str(part) for part in error.path)}: {error.message[:300]}"
        for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(entries)
    ]
    assert not problems, "\n".join(problems)


@each_file
def test_conditions_are_in_the_language_and_read_known_keys(path: Path) -> None:
    problems = []
    for entry in entries_of(path):
        try:
            unknown = keys_read(parse(entry.get("when", "True")).names) - KNOWN
            problems += [f"{entry['id']}: {key} is not in keys.yaml" for key in sorted(unknown)]
        except ConditionError as error:
            problems.append(f"{entry['id']}: {error}")
    assert not problems, "\n".join(problems)


@each_file
def test_the_index_keeps_a_condition_without_its_text(path: Path) -> None:
    trees = [tree_of(entry["when"]) for entry in entries_of(path) if "when" in entry]
    assert [tree for tree in trees if tree_of(text_of(tree)) != tree] == []


@each_file
def test_fixes_change_known_keys(path: Path) -> None:
    problems = [
        f"{entry['id']}: fix names {key}, which is not in keys.yaml"
        for entry in entries_of(path)
        for key in (*entry["fix"].get("set", {}), *entry["fix"].get("remove", []))
        if key not in KNOWN
    ]
    assert not problems, "\n".join(problems)


@each_file
def test_each_dialect_of_a_rule_has_an_example(path: Path) -> None:
    problems = [
        f"{entry['id']}: no example for {dialect}"
        for entry in entries_of(path)
        for dialect in entry["dialects"]
        if entry.get("check") != "log" and dialect not in entry["examples"]
    ]
    assert not problems, "\n".join(problems)


def test_facts_name_registered_dialects() -> None:
    """The schemas say the form of a name alone, so that a new dialect changes none of them."""
    known = {*registry.names(), "default", "negative"}
    of_keys = {
        (entry["key"], name)
        for entry in KEY_ENTRIES
        for part in ("spelling", "aliases", "default", "type")
        if isinstance(entry.get(part), dict)
        for name in entry[part]
    }
    of_rules = {
        (entry["id"], name)
        for entry in read_rule_files()
        for name in (*entry["dialects"], *entry.get("examples", ()))
    }
    assert sorted(each for each in of_keys | of_rules if each[1] not in known) == []


def test_ids_are_unique() -> None:
    ids = [entry["id"] for entry in read_rule_files()]
    assert sorted(ids) == sorted(set(ids))


def test_sentences_name_the_object() -> None:
    """A clause with `what` stands where the noun should; `tests/test_architecture.py` counts it in code."""
    sentences = [entry[part] for entry in read_rule_files() for part in ("title", "message", "why", "next")]
    vague = [sentence for sentence in sentences if re.search(r"\bwhat\b", sentence, re.IGNORECASE)]
    assert len(vague) <= sum(len(each.split()) for each in sentences) / 10_000, vague
