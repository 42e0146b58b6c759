# SPDX-License-Identifier: Apache-2.0
"""The slips of somebody who edits a condition: each small change of its tree, one at a time.

A change drops a term of an `and` or `or`, flips an operator, negates a key, moves a number by one, or drops an
element of a list. Trees are those of `skill_tools.rules.grammar`.
"""

from collections.abc import Iterator
from typing import Any

Tree = list[Any]
Change = tuple[str, Tree]

FLIPPED = {
    "==": ["!="], "!=": ["=="], "is": ["is not"], "is not": ["is"], "in": ["not in"], "not in": ["in"],
    "<": [">=", "<=", ">"], ">=": ["<", ">", "<="], ">": ["<=", ">=", "<"], "<=": [">", "<", ">="],
    "and": ["or"], "or": ["and"], "-": ["&"], "&": ["-"],
}  # fmt: skip


def changes(tree: Tree) -> Iterator[Change]:
    """Yield each change of `tree`, with a word for it."""
    kind, *parts = tree
    if kind == "value":
        if isinstance(parts[0], int | float) and not isinstance(parts[0], bool):
            yield f"{parts[0]} + 1", ["value", parts[0] + 1]
            yield f"{parts[0]} - 1", ["value", parts[0] - 1]
        return
    if kind == "name":
        return
    for other in FLIPPED.get(kind, ()):
        yield f"{kind} to {other}", [other, *parts]
    if kind == "not":
        yield "without not", parts[0]
    if kind in ("and", "or", "list") and len(parts) > 1:
        for index in range(len(parts)):
            left = [*parts[:index], *parts[index + 1 :]]
            yield (
                f"without {brief(parts[index])}",
                left[0] if kind != "list" and len(left) == 1 else [kind, *left],
            )
    for index, part in enumerate(parts):
        if not isinstance(part, list):
            continue
        if part[0] == "name" and kind in ("and", "or"):
            yield f"not {part[1]}", [kind, *parts[:index], ["not", part], *parts[index + 1 :]]
        for word, changed in changes(part):
            yield word, [kind, *parts[:index], changed, *parts[index + 1 :]]


def brief(tree: Tree) -> str:
    """Return a tree in a few words."""
    kind, *parts = tree
    if kind in ("name", "value"):
        return str(parts[0])
    if kind == "list":
        return f"[{', '.join(map(brief, parts))}]"
    words = [brief(part) for part in parts if isinstance(part, list)]
    if kind == "call":
        return f"{parts[0]}({', '.join(words)})"
    return f" {kind} ".join(words) if len(words) > 1 else f"{kind} {words[0]}"


def constants(tree: Tree) -> Iterator[Any]:
    """Yield every constant in `tree`."""
    if tree[0] == "value":
        yield tree[1]
        return
    for part in tree[1:]:
        if isinstance(part, list):
            yield from constants(part)


def leaves(tree: Tree) -> Iterator[Tree]:
    """Yield the parts of `tree` that are no `and`, `or` or `not`."""
    if tree[0] in ("and", "or", "not"):
        for part in tree[1:]:
            yield from leaves(part)
    else:
        yield tree
