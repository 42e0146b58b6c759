"""Reads a Python script that makes arguments: `SFTConfig(output_dir=.., gradient_checkpointing=True)`.

One recipe is one object of an argument class. A script with several asks for `file.py::SFTConfig`, or, where a class
is used more than once, for `file.py::SFTConfig:LINE`.
"""

import ast
from collections import Counter

from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.source import Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.transformers import CLASS, CLASSES, PACKAGES, TRANSFORMERS, arguments
from skill_tools.dialects.transformers.classes import GONE, accepted, nearest
from skill_tools.errors import UnusableInput

_SHOWN = 5


def recipes(source: Source) -> dict[str, Construction]:
    """Return the objects of argument classes that a script makes, each under the name that asks for it."""
    made = constructions(source, CLASSES)
    times = Counter(each.name for each in made)
    return {each.name if times[each.name] == 1 else f"{each.name}:{each.place.line}": each for each in made}


def write_script(draft: Draft, source: Source) -> None:
    """Write the arguments that `source` makes; raises `UnusableInput` for none, and for several without a choice."""
    found = recipes(source)
    if source.recipe is not None:
        found = {name: each for name, each in found.items() if name == source.recipe}
    if len(found) != 1:
        raise _unclear(source, list(recipes(source)))
    (made,) = found.values()
    is_theirs = made.name == made.kind and _comes_from_them(source.module, made.name)
    if is_theirs:
        draft.set_key(CLASS, made.kind, "class", made.place)
    if made.is_open:
        draft.may_be_set()
    keywords = _keywords(source, made)
    known = accepted(made.kind) | GONE
    names = load_vocabulary(TRANSFORMERS).names
    if made.positional:
        arguments.write(
            draft, "output_dir", arguments.with_place(made.positional[0], made.place), source.name
        )
    for name, value, place in made.values():
        if name in known or (name in names and name not in keywords):
            arguments.write(draft, name, arguments.with_place(value, place), source.name)
        elif name in keywords and is_theirs:
            draft.note_unknown(f"{made.kind}.{name}", place, nearest=nearest(made.kind, name))


def _keywords(source: Source, made: Construction) -> set[str]:
    """Return the names that the call itself gives; what is assigned to the object later is no argument of it."""
    for node in ast.walk(source.module):
        if isinstance(node, ast.Call) and Place(source.name, node.lineno, node.col_offset + 1) == made.place:
            return {item.arg for item in node.keywords if item.arg}
    return set()


def _comes_from_them(module: ast.Module, name: str) -> bool:
    """Return whether `name` is transformers' or TRL's own class; a script may import one that extends it."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and any(
            (each.asname or each.name) == name for each in node.names
        ):
            return (node.module or "").partition(".")[0] in PACKAGES
    return True


def _unclear(source: Source, names: list[str]) -> UnusableInput:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    problem = f"makes arguments {len(names)} times" if names else "makes no arguments of a Trainer"
    return UnusableInput(
        f"{source.name} {problem}",
        expected=f"one of {shown}" if names else "a call of TrainingArguments, SFTConfig or their like",
        attempt=f"{source.name}::{names[0] if names else 'SFTConfig'}",
    )
