# SPDX-License-Identifier: Apache-2.0
"""The key files keep their schema, and no spelling means two keys."""

import json
from collections import Counter

import jsonschema
from shipped import KEY_ENTRIES

from skill_tools.bundle import schema_path

SCHEMA = json.loads(schema_path("keys").read_text(encoding="utf-8"))


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_file_keeps_the_schema() -> None:
    problems = [
        f"{KEY_ENTRIES[error.path[0]].get('key')}: {'/'.join(map(str, error.path))}: {error.message[:200]}"
        for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(KEY_ENTRIES)
    ]
    assert not problems, "\n".join(problems)


def test_keys_and_spellings_are_unique() -> None:
    names = Counter(entry["key"] for entry in KEY_ENTRIES)
    spellings = Counter(
        (dialect, spelling)
        for entry in KEY_ENTRIES
        for dialect, spelling in entry.get("spelling", {}).items()
    )
    assert [name for name, count in (names + spellings).items() if count > 1] == []


def test_a_default_that_is_a_number_is_no_text() -> None:
    """YAML takes `1e-08` for a text, which equals no number."""
    texts = [
        entry["key"]
        for entry in KEY_ENTRIES
        for default in entry.get("default", {}).values()
        if entry["type"] in ("int", "float") and isinstance(default, str)
    ]
    assert texts == []
