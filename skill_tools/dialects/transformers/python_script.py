# SPDX-License-Identifier: Apache-2.0
"""Reads a Python script that makes arguments: `SFTConfig(output_dir=.., gradient_checkpointing=True)`.

One recipe is one object of an argument class, or a trainer without arguments, which makes them itself. A script with
several asks for `file.py::SFTConfig`, or, where a class is used more than once, for `file.py::SFTConfig:LINE`.
"""

import ast
from collections import Counter
from collections.abc import Sequence

from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.python.syntax import last_name
from skill_tools.configs.source import Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.transformers import CLASS, CLASSES, PACKAGES, TRAINERS, TRANSFORMERS, arguments
from skill_tools.dialects.transformers.classes import GONE, accepted, nearest
from skill_tools.dialects.transformers.our_line import imported_calls, write_line
from skill_tools.dialects.transformers.parsers import Parser, expected, given
from skill_tools.dialects.unsloth import UNSLOTH
from skill_tools.errors import UnusableInput

_SHOWN = 5


def recipes(source: Source) -> dict[str, Construction]:
    """Return a script's objects of argument classes, each under the name that selects it.

    A trainer that is given none is among them: it makes them with their defaults.
    """
    return _named(source, constructions(source, CLASSES | TRAINERS.keys()))


def _named(source: Source, every: Sequence[Construction]) -> dict[str, Construction]:
    without = {each.place for each in every if _has_defaults(each)}
    if without:
        without &= _called_as_imported(source)
    made = [each for each in every if each.kind in CLASSES or each.place in without]
    times = Counter(each.name for each in made)
    return {each.name if times[each.name] == 1 else f"{each.name}:{each.place.line}": each for each in made}


def _has_defaults(made: Construction) -> bool:
    """Return whether `made` is a trainer without arguments, and no subclass (a subclass may make its own)."""
    given = [value for name, value, _ in made.values() if name == "args"]
    is_trainer = made.kind in TRAINERS and made.name == made.kind
    return (
        is_trainer and not made.is_open and len(made.positional) < 2 and all(each is None for each in given)
    )


def _called_as_imported(source: Source) -> set[Place]:
    """Return the place where a script calls a trainer by its imported name, imported from them alone."""
    nodes = list(ast.walk(source.module))
    theirs: dict[str, bool] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                name = each.asname or each.name
                theirs[name] = theirs.get(name, True) and (node.module or "").partition(".")[0] in PACKAGES
    return {
        Place(source.name, node.lineno, node.col_offset + 1)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and theirs.get(node.func.id)
    }


def write_script(draft: Draft, source: Source, *, launched: bool = False) -> None:
    """Write the arguments that `source` makes; raises `UnusableInput` for several without a choice.

    So does none, unless a launch beside it gives them to the parser of the script.
    """
    ours = imported_calls(source)
    every = constructions(source, CLASSES | TRAINERS.keys() | ours)
    everything = _named(source, every)
    found = everything
    if launched and not found:
        return
    if source.recipe is not None:
        found = {name: each for name, each in found.items() if name == source.recipe}
    if len(found) != 1:
        raise _unclear(source, list(everything))
    (made,) = found.values()
    if made.kind in TRAINERS:
        _write_defaults(draft, source, made)
    else:
        _write_given(draft, source, made)
    if UNSLOTH in source.text:
        from skill_tools.dialects.unsloth.python_script import write_calls

        write_calls(draft, source)
    if len(everything) == 1:
        write_line(draft, source, [each for each in every if each.kind in ours])


def _write_defaults(draft: Draft, source: Source, made: Construction) -> None:
    """Write the settings of a trainer without arguments: its class, and the model if it is a name."""
    draft.set_key(CLASS, TRAINERS[made.kind], "class", made.place)
    models = [value for name, value, _ in made.values() if name == "model"] or [*made.positional]
    for model in models:
        if isinstance(model, str):
            arguments.write(draft, "model_name_or_path", arguments.with_place(model, made.place), source.name)


def _write_given(draft: Draft, source: Source, made: Construction) -> None:
    is_theirs = made.name == made.kind and _comes_from_them(source.module, made.name)
    if is_theirs:
        draft.set_key(CLASS, made.kind, "class", made.place)
    if made.is_open:
        draft.may_be_set()
    keywords = {item.arg for item in _call_of(source, made).keywords if item.arg}
    known = accepted(made.kind) | GONE
    names = load_vocabulary(TRANSFORMERS).names
    if made.positional:
        arguments.write(
            draft, "output_dir", arguments.with_place(made.positional[0], made.place), source.name
        )
    for name, value, place in made.values():
        if name in known or (name in names and name not in keywords):
            node = given(draft, name, arguments.with_place(value, place), Parser.CALL)
            arguments.write(draft, name, node, source.name)
            if (wanted := expected(draft, name, node, Parser.CALL)) and draft.canonical(name) in draft:
                draft.refuse_type(draft.canonical(name), wanted)
        elif name in keywords and is_theirs:
            draft.note_unknown(f"{made.kind}.{name}", place, nearest=nearest(made.kind, name))


def _call_of(source: Source, made: Construction) -> ast.Call:
    """Return the call itself; a later assignment to the object is no argument of it."""
    return next(
        node
        for node in ast.walk(source.module)
        if isinstance(node, ast.Call)
        and Place(source.name, node.lineno, node.col_offset + 1) == made.place
        and last_name(node.func) == made.name
    )


def _comes_from_them(module: ast.Module, name: str) -> bool:
    """Return whether `name` is transformers' or TRL's own class; a script may import a subclass."""
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
