# SPDX-License-Identifier: Apache-2.0
"""Reads values by dotted names from the configuration that a framework has composed."""

from collections.abc import Iterable
from typing import Any


def values_at(tree: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of dotted `names` in a tree of mappings; one that is not there is left out."""
    found = {}
    for name in names:
        *sections, last = name.split(".")
        node = tree
        for part in sections:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            found[name] = node[last]
    return found
