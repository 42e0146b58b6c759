# SPDX-License-Identifier: Apache-2.0
"""Documents against the schemas of this project; each schema is checked once a process, not with each document."""

import json
from functools import cache
from typing import Any

import jsonschema

from skill_tools.bundle import schema_path


def assert_follows(document: Any, name: str) -> None:
    """Raise jsonschema's error where `document` breaks the schema `name`."""
    _validator(name).validate(document)


@cache
def _validator(name: str) -> Any:
    schema = json.loads(schema_path(name).read_text(encoding="utf-8"))
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)
