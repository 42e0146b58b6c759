# SPDX-License-Identifier: Apache-2.0
"""Compiles the YAML into the JSON in `index/`, which the commands load, and `examples.json`.

A lint loads keys and rules, a plan models and hardware, a diagnosis messages. Compiling also parses each rule's
condition. It finds version ranges that all known releases satisfy, and rules that cannot hold without one of their
keys. So a lint parses no text, evaluates few rules and, without stated versions, compares none. `offload card render`
writes the index; a test fails when it is stale.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skill_tools import knowledge
from skill_tools.bundle import knowledge_path
from skill_tools.configs.keys import DASHED, OWN, Key, key_table, keys_from_data, own_name
from skill_tools.configs.source import Kind
from skill_tools.dialects import registry
from skill_tools.knowledge import profiles
from skill_tools.rules.knowledge import compiled, read_rule_files

# Groups of rules below this size share a file: apart, each costs a zip an entry, and words that the others have.
_SMALL_BYTES, _SHARED_BYTES = 32_000, 120_000
_TINY_BYTES = 8_000  # of a group of several frameworks, each of which loads the shared file for it
# Sections that share a file for the same reason: those of a diagnosis, of a plan, and of each command.
_TOGETHER = (
    (
        "messages", "builds", "changes", "code", "neighbours", "numbers", "offloads", "quiet", "residency", "symptoms",
        "fixes",
    ),
    ("block_swap", "hardware", "host_buffers", "model_names", "models"),
    ("marks", "releases"),
)  # fmt: skip
_RECENT = 2  # vocabularies that a zip still sees, 32 KiB back


def build() -> dict[str, Any]:
    """Return the index's content, read from the YAML and vocabulary files."""
    releases = knowledge.load_yaml("releases.yaml")
    vocabulary = sorted(knowledge_path("vocabulary").glob("*.txt"))
    keys = knowledge.load_keys()
    models, numbers = knowledge.load_yaml("models.yaml"), knowledge.load_yaml("numbers.yaml")
    table = {key.name: key for key in keys_from_data(keys)}
    spellings = key_table(table.values()).by_spelling
    return {
        "releases": releases,
        "keys": [_shortened(entry) for entry in keys],
        "rules": [_indexed(entry, compiled(entry, releases, table)) for entry in read_rule_files()],
        "vocabulary": _by_kin({path.stem: _names_in(path, spellings) for path in vocabulary}),
        "models": {name: _without(entry, "source", "read_in") for name, entry in models["models"].items()},
        "model_names": {part: models[part] for part in ("neutral", "untold", "counted")},
        "traces": {
            path.stem: profiles.folded(json.loads(path.read_text(encoding="utf-8")))
            for path in sorted(knowledge_path("traces").glob("*.json"))
        },
        "hardware": knowledge.load_yaml("hardware.yaml"),
        "block_swap": knowledge.load_yaml("block_swap.yaml"),
        "host_buffers": {
            name: _without(engine, "ref", "quote", "note")
            for name, engine in knowledge.load_yaml("host_buffers.yaml")["engines"].items()
        },
        "messages": [
            _without(entry, "example", "of_text", "of", "versions") for entry in knowledge.load_messages()
        ],
        "changes": knowledge.load_yaml("changes.yaml"),
        "code": knowledge.load_yaml("code.yaml"),
        "builds": knowledge.load_yaml("builds.yaml"),
        "offloads": knowledge.load_yaml("offloads.yaml"),
        "neighbours": knowledge.load_yaml("neighbours.yaml"),
        "symptoms": [
            {**entry, "causes": [_without(cause, "source") for cause in entry["causes"]]}
            for entry in knowledge.load_yaml("symptoms.yaml")
        ],
        "residency": [_without(entry, "quote", "source") for entry in knowledge.load_yaml("residency.yaml")],
        "numbers": {**numbers, "faults": [_without(fault, "fault", "source") for fault in numbers["faults"]]},
        "quiet": {
            part: [_without(entry, "source") for entry in entries]
            for part, entries in knowledge.load_yaml("quiet.yaml").items()
        },
        "fixes": [_without(entry, "fix") for entry in knowledge.load_fixes()],
        "marks": {
            kind.value: {each.name: marks for each in registry.with_files() if (marks := each.marks_in(kind))}
            for kind in Kind
        },
    }


def _shortened(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return a key with signs in its spellings where they have its own name: most are that name, behind a section."""
    if "spelling" not in key:
        return dict(key)
    own = own_name(key["key"])
    dashed = own.replace("_", "-")
    spelling = {
        name: text.replace(own, OWN).replace(dashed, DASHED) for name, text in key["spelling"].items()
    }
    return {**key, "spelling": spelling}


def _names_in(path: Path, spellings: Mapping[str, Mapping[str, Key]]) -> str:
    """Return the names in a file, sorted, without the spellings of keys: readers of a vocabulary join both.

    One whose comments say "kept whole" is asked for its names alone, too.
    """
    text = path.read_text(encoding="utf-8")
    spelt = {} if "kept whole" in text else spellings.get(path.stem.replace("_", "-"), {})
    return knowledge.folded(sorted(name for name in knowledge.words(text) if name not in spelt))


def _by_kin(vocabularies: Mapping[str, str]) -> dict[str, str]:
    """Return the vocabularies in the order that a zip makes least of: each behind those with most of its lines."""
    lines = {name: set(text.splitlines()) for name, text in vocabularies.items()}
    orders = []
    for first in lines:
        order = [first]
        while left := [name for name in lines if name not in order]:
            recent = set().union(*(lines[name] for name in order[-_RECENT:]))
            order.append(max(left, key=lambda name: len(lines[name] & recent)))
        orders.append({name: vocabularies[name] for name in order})
    return min(orders, key=lambda order: len(zlib.compress("".join(order.values()).encode())))


def _indexed(entry: Mapping[str, Any], derived: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule as a lint reads it.

    Its examples are in a file of their own, which no lint loads; the condition's tree says the same as its text. Fields
    that `compiled` leaves out are as for most rules.
    """
    usual = {"quiet": entry["dialects"], "conditional": entry.get("versions", {}), "holds_today": True}
    told = {name: value for name, value in derived.items() if name not in usual or value != usual[name]}
    return {**_without(entry, "examples", "when"), "compiled": told}


def _without(entry: Mapping[str, Any], *parts: str) -> dict[str, Any]:
    """Return a fact without its unread or repeated parts."""
    return {name: value for name, value in entry.items() if name not in parts}


def rendered() -> dict[Path, str]:
    """Return the text that each compiled file should have: one fact a line, so that a change to it can be read."""
    sections = build()
    groups: dict[str, list[dict[str, Any]]] = {}
    for rule in sections.pop("rules"):
        groups.setdefault(knowledge.group_of(rule), []).append(rule)
    names = "".join(f"[{name}]\n{text}\n" for name, text in sections.pop("vocabulary").items())
    rules = {f"rules/{'+'.join(names)}.json": text for names, text in _files(groups)}
    together = {name: names for names in _TOGETHER for name in names}
    files = dict.fromkeys(together.get(name, (name,)) for name in sections)
    others = {
        f"{'+'.join(names)}.json": _sectioned({name: sections[name] for name in names}) for names in files
    }
    examples = {entry["id"]: entry["examples"] for entry in read_rule_files() if "examples" in entry}
    # By framework: its configurations are alike, and a zip sees 32 KiB back.
    examples = dict(sorted(examples.items(), key=lambda item: list(item[1])))
    texts = {knowledge_path("index", name): text for name, text in {**others, **rules}.items()}
    texts[knowledge_path("index", "vocabulary.txt")] = names
    return {**texts, knowledge_path("examples.json"): _lines(examples)}


def _files(groups: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[list[str], str]]:
    """Yield each file of rules, with the names of the groups in it: small ones of one framework share some, by name."""
    names: list[str] = []
    shared: list[dict[str, Any]] = []
    for group, entries in sorted(groups.items()):
        least = _TINY_BYTES if "+" in group else _SMALL_BYTES
        if len(text := _lines(entries)) >= least:
            yield [group], text
            continue
        if shared and len(_lines(shared)) + len(text) > _SHARED_BYTES:
            yield names, _lines(shared)
            names, shared = [], []
        names = list(dict.fromkeys((*names, *group.split("+"))))
        shared += entries
    if shared:
        yield names, _lines(shared)


def _json(value: object) -> str:
    """Return compact ASCII; a single character beyond it would double the file in memory, and the time to read it."""
    return json.dumps(value, separators=(",", ":"))


def _lines(content: object) -> str:
    if isinstance(content, dict):
        entries = ",\n".join(f"{_json(name)}:{_json(entry)}" for name, entry in content.items())
        return f"{{\n{entries}\n}}\n"
    if isinstance(content, list):
        return "[\n" + ",\n".join(map(_json, content)) + "\n]\n"
    return f"{_json(content)}\n"


def _sectioned(sections: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f'"{name}":{_lines(content)}' for name, content in sections.items()) + "}\n"


def is_stale() -> bool:
    """Return whether a compiled file is missing, left over or differs from a compilation of the files."""
    texts = rendered()
    written = {path for path in knowledge_path("index").rglob("*") if path.is_file()}
    return bool(written - texts.keys()) or any(
        not path.is_file() or path.read_text(encoding="utf-8") != text for path, text in texts.items()
    )


def write() -> None:
    """Write the compiled files anew, and forget the loaded old ones."""
    texts = rendered()
    for path in knowledge_path("index").rglob("*"):
        if path.is_file() and path not in texts:
            path.unlink()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    knowledge.forget()
