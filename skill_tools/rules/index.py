"""Compiles the YAML that people write into the one `index.json` that the commands load.

Keys and rules are a lint's, models and hardware a plan's. Compiling also parses each rule's condition, and answers
which of its version ranges are no condition at all and where it cannot hold unless somebody sets one of its keys, so
that a lint parses no text, asks few of the rules and, without stated versions, compares none. `offload card render`
writes the index; a test fails when it is stale.
"""

import json
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
    table = {key.name: key for key in keys_from_data(keys)}
    return {
        "releases": releases,
        "keys": keys,
        "rules": [{**entry, "compiled": compiled(entry, releases, table)} for entry in read_rule_files()],
        "vocabulary": {path.stem: knowledge.words(path.read_text(encoding="utf-8")) for path in vocabulary},
        "models": knowledge.load_yaml("models.yaml")["models"],
        "hardware": knowledge.load_yaml("hardware.yaml"),
    }


def rendered() -> str:
    """Return the text that `index.json` should have: one fact a line, so that a change to it can be read."""
    parts = [f"{_json(name)}:{_lines(content)}" for name, content in build().items()]
    return "{" + ",\n".join(parts) + "}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _lines(content: object) -> str:
    if isinstance(content, dict):
        return "{\n" + ",\n".join(f"{_json(name)}:{_json(entry)}" for name, entry in content.items()) + "\n}"
    if isinstance(content, list):
        return "[\n" + ",\n".join(map(_json, content)) + "\n]"
    return _json(content)


def is_stale() -> bool:
    """Return whether `index.json` is missing or differs from what the files would compile to."""
    path = knowledge_path("index.json")
    return not path.is_file() or path.read_text(encoding="utf-8") != rendered()


def write() -> None:
    """Write `index.json`, and forget what this process has loaded of the old one."""
    knowledge_path("index.json").write_text(rendered(), encoding="utf-8")
    knowledge.forget()
