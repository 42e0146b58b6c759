"""Loads the planner's own knowledge files with the fastest safe YAML loader there is."""

from functools import cache
from typing import Any

import yaml

from skill_tools.bundle import knowledge_path

_Loader: type[yaml.SafeLoader] | type[yaml.CSafeLoader]
try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as _Loader


@cache
def read_knowledge(name: str) -> dict[str, Any]:
    """Return the mapping in `skill_tools/knowledge/<name>`."""
    with knowledge_path(name).open("rb") as stream:
        data: dict[str, Any] = yaml.load(stream, Loader=_Loader)
    return data
