"""Compiles the YAML that people write into `index.json`, which the commands load, and `examples.json`.

A lint loads keys and rules, a plan models and hardware, a diagnosis messages. Compiling also parses each rule's
condition, finds the version ranges that every known release satisfies, and finds the rules that cannot hold unless
one of their keys is set. So a lint parses no text, evaluates few rules and, without stated versions, compares none.
`offload card render` writes the index; a test fails when it is stale.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skill_tools import knowledge
from skill_tools.bundle import knowledge_path
from skill_tools.configs.keys import keys_from_data
from skill_tools.rules.knowledge import compiled, read_rule_files


def build() -> dict[str, Any]:
    """Return the index's content, read from the YAML and vocabulary files."""
    releases = knowledge.load_yaml("releases.yaml")
    vocabulary = sorted(knowledge_path("vocabulary").glob("*.txt"))
    keys = knowledge.load_keys()
    models = knowledge.load_yaml("models.yaml")
    table = {key.name: key for key in keys_from_data(keys)}
    return {
        "releases": releases,
        "keys": keys,
        "rules": [_indexed(entry, compiled(entry, releases, table)) for entry in read_rule_files()],
        "vocabulary": {path.stem: _names_in(path) for path in vocabulary},
        "models": models["models"],
        "model_names": {part: models[part] for part in ("neutral", "untold", "counted")},
        "hardware": knowledge.load_yaml("hardware.yaml"),
        "host_buffers": knowledge.load_yaml("host_buffers.yaml"),
        "messages": [_without_example(entry) for entry in knowledge.load_messages()],
        "changes": knowledge.load_yaml("changes.yaml"),
        "code": knowledge.load_yaml("code.yaml"),
        "builds": knowledge.load_yaml("builds.yaml"),
        "offloads": knowledge.load_yaml("offloads.yaml"),
        "symptoms": knowledge.load_yaml("symptoms.yaml"),
        "numbers": knowledge.load_yaml("numbers.yaml"),
        "fixes": knowledge.load_fixes(),
    }


def _names_in(path: Path) -> str:
    return knowledge.folded(knowledge.words(path.read_text(encoding="utf-8")))


def _indexed(entry: Mapping[str, Any], derived: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule as a lint reads it; its examples are in a file of their own, which no lint loads."""
    return {**{name: value for name, value in entry.items() if name != "examples"}, "compiled": derived}


def _without_example(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as `diagnose` reads it; its example is for people and tests."""
    return {name: value for name, value in entry.items() if name != "example"}


def rendered() -> dict[str, str]:
    """Return the text that each compiled file should have: one fact a line, so that a change to it can be read."""
    parts = [f"{_json(name)}:{_lines(content)}" for name, content in build().items()]
    examples = {entry["id"]: entry["examples"] for entry in read_rule_files() if "examples" in entry}
    return {"index.json": "{" + ",\n".join(parts) + "}\n", "examples.json": f"{_lines(examples)}\n"}


def _json(value: object) -> str:
    """Return compact ASCII; a single character beyond it would double the file in memory, and the time to read it."""
    return json.dumps(value, separators=(",", ":"))


def _lines(content: object) -> str:
    if isinstance(content, dict):
        return "{\n" + ",\n".join(f"{_json(name)}:{_json(entry)}" for name, entry in content.items()) + "\n}"
    if isinstance(content, list):
        return "[\n" + ",\n".join(map(_json, content)) + "\n]"
    return _json(content)


def is_stale() -> bool:
    """Return whether a compiled file is missing or differs from what the files would compile to."""
    texts = {knowledge_path(name): text for name, text in rendered().items()}
    return any(not path.is_file() or path.read_text(encoding="utf-8") != text for path, text in texts.items())


def write() -> None:
    """Write the compiled files, and forget what this process has loaded of the old ones."""
    for name, text in rendered().items():
        knowledge_path(name).write_text(text, encoding="utf-8")
    knowledge.forget()
