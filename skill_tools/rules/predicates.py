# SPDX-License-Identifier: Apache-2.0
"""Named predicates for conditions that operators cannot express. Keep them few.

A predicate takes plain values and returns one; it is never called with an unknown value, because the engine answers
`UNKNOWN` itself then. It must accept every type, because user input may hold anything.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType


def length(value: object) -> int | None:
    """Return the length of text, a list or a mapping; nothing else has one."""
    return len(value) if isinstance(value, str | list | dict) else None


def starts_with(value: object, prefix: object) -> bool:
    """Return whether the text `value` begins with `prefix`; False for anything but text."""
    return isinstance(value, str) and isinstance(prefix, str) and value.startswith(prefix)


def ends_with(value: object, suffix: object) -> bool:
    """Return whether the text `value` ends with `suffix`; False for anything but text."""
    return isinstance(value, str) and isinstance(suffix, str) and value.endswith(suffix)


def names(value: object, name: object) -> bool:
    """Return whether `value`, a list or comma-separated text, names `name` as a whole word of it.

    CUDA graph scopes come in both forms, and `moe` is not in `moe_router`.
    """
    parts = value.split(",") if isinstance(value, str) else value
    return isinstance(parts, list | tuple) and any(
        name == (part.strip() if isinstance(part, str) else part) for part in parts
    )


def any_inside(parts: object, wholes: object) -> bool:
    """Return whether a text of the list `parts` occurs in one of `wholes`: a list, or a mapping's keys."""
    if not isinstance(parts, list) or not isinstance(wholes, list | dict):
        return False
    texts = [whole for whole in wholes if isinstance(whole, str)]
    return any(isinstance(part, str) and part in whole for part in parts for whole in texts)


def last_part(entries: object, names: object) -> bool:
    """Return whether an entry's part after its last dot is one of `names`; either may be a pattern (`*`, `?`, `[`).

    Axolotl scopes selective checkpointing by such entries: `layers.0`, `self_attn.o_proj`, `*_proj`.
    """
    if not isinstance(entries, list) or not isinstance(names, list):
        return False
    parts = [entry.rpartition(".")[2] for entry in entries if isinstance(entry, str)]
    return any(fnmatchcase(name, part) or fnmatchcase(part, name) for part in parts for name in names)


PREDICATES: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "len": length,
        "starts_with": starts_with,
        "ends_with": ends_with,
        "names": names,
        "any_inside": any_inside,
        "last_part": last_part,
    }
)
