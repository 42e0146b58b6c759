# SPDX-License-Identifier: Apache-2.0
"""Reads `card.yaml` and holds it to `schema/card.schema.json`.

The card stays plain data: the schema defines its shape, and every other module here may rely on it once
`schema_problems` finds nothing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from skill_tools.bundle import schema_path
from skill_tools.errors import UnusableInput
from skill_tools.knowledge import load_yaml_file

Card = Mapping[str, Any]


def load_card(path: Path) -> Card:
    """Return the card at `path`; raises `UnusableInput` when it is missing, no YAML, or no mapping."""
    try:
        card = load_yaml_file(path)
    except OSError as error:
        raise UnusableInput(
            f"card {path} cannot be read: {error.strerror}",
            expected="a YAML file",
            attempt="a checkout of the repository",
        ) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UnusableInput(
            f"card {path} is not YAML: {reason}", expected="a mapping", attempt="quoting the value"
        ) from error
    if not isinstance(card, dict):
        raise UnusableInput(
            f"card {path} holds {type(card).__name__}",
            expected="a mapping",
            attempt="the keys of schema/card.schema.json",
        )
    return card


def schema_problems(card: Card, schema: str = "card") -> list[str]:
    """Return one line for each place where the card breaks `schema` (`card`, or `card.base`)."""
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource

    schemas = [json.loads(schema_path(name).read_text(encoding="utf-8")) for name in ("card.base", "card")]
    registry: Any = Registry().with_resources(
        (contents["$id"], Resource.from_contents(contents)) for contents in schemas
    )
    chosen = schemas[0] if schema == "card.base" else schemas[1]
    errors = Draft202012Validator(chosen, registry=registry).iter_errors(card)
    return sorted({f"{_pointer(error.absolute_path)}: {error.message}" for error in errors})


def _pointer(path: Any) -> str:
    return "/".join(str(part) for part in path) or "(top)"
