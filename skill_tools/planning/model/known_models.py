"""Looks a model up by name in `knowledge/models.yaml`: for `--model`, a base model or a recipe.

Names are compared word by word (`Qwen/Qwen3-30B-A3B` and `qwen3_30b_a3b_pretrain_config` both name
`qwen3-30b-a3b`); the longest match wins, and a name that says nothing known is answered with the nearest
ones.
"""

import difflib
import re
from functools import cache
from typing import Any

from skill_tools import knowledge
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput

_NOT_SHAPE = ("names", "source", "parameters", "tower")


def entries() -> dict[str, dict[str, Any]]:
    """Return the models as they stand in the knowledge file."""
    models: dict[str, dict[str, Any]] = knowledge.index()["models"]
    return models


def shape(name: str) -> ModelShape:
    """Return the shape of the model called exactly `name` in the knowledge file."""
    entry = entries()[name]
    return ModelShape(name=name, **{key: value for key, value in entry.items() if key not in _NOT_SHAPE})


@cache
def find(text: str) -> str | None:
    """Return the known model that `text` names (a hub id, a recipe, a path), or None."""
    words = re.sub(r"[_/\s]+", "-", text.lower())
    best, best_length = None, 0
    for name, entry in entries().items():
        for alias in (name, *entry["names"]):
            if (
                len(alias) > best_length
                and alias in words
                and re.search(rf"(^|-){re.escape(alias)}($|-)", words)
            ):
                best, best_length = name, len(alias)
    return best


def of_size(parameters: int) -> str | None:
    """Return the known model that has `parameters`, else the only one within a thousandth of them, else None."""
    off_by = {name: abs(entry["parameters"] - parameters) for name, entry in entries().items()}
    for most in (0, parameters // 1000):
        close = [name for name, off in off_by.items() if off <= most]
        if close:
            return close[0] if len(close) == 1 else None
    return None


def require(text: str) -> ModelShape:
    """Return the shape that `text` names, or raise `UnusableInput` with the nearest known names."""
    name = find(text)
    if name is None:
        nearest = difflib.get_close_matches(text.lower(), entries(), n=3, cutoff=0.4) or sorted(entries())[:3]
        raise UnusableInput(
            f"model {text!r} has no known shape",
            expected=f"a known model ({', '.join(nearest)}, ...) or a config.json of the model",
            attempt=f"--model {nearest[0]}, or name the model's Hugging Face config.json as a second file",
        )
    return shape(name)
