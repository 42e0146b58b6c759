# SPDX-License-Identifier: Apache-2.0
"""Reads a Python recipe statically: its assignments to the configuration, without importing or running it.

A recipe is the function that returns the configuration, or the script itself without such a function. A file with
several needs `file.py::function`. `configs.python.statements` follows the code; this module chooses the recipe and
writes its sections into the draft.
"""

import ast

from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.statements import Interpreter, takes_config
from skill_tools.configs.python.syntax import FUNCTIONS, Function, dotted_name, last_name
from skill_tools.configs.python.values import Section, plain
from skill_tools.configs.source import Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.errors import Unrecognised, UnusableInput

_CONTAINER = "ConfigContainer"
_SECTIONS = {
    "checkpoint", "comm_overlap", "dataset", "ddp", "dist", "env_vars", "logger", "mixed_precision", "model",
    "optimizer", "peft", "profiling", "rerun_state_machine", "rng", "scheduler", "tokenizer", "train", "validation",
}  # fmt: skip
_OF_OTHERS = ("Config", "Arguments", "Args")  # in the name of the class of a whole configuration
_SHOWN = 5


def write_recipe(draft: Draft, source: Source) -> None:
    """Write the settings of the recipe of `source` into `draft`.

    Raises `UnusableInput` when the file is not Python, holds no recipe, or several and none was asked for.
    """
    module = source.module
    functions = {node.name: node for node in module.body if isinstance(node, FUNCTIONS)}
    name = _chosen(functions, source)
    interpreter = Interpreter(source.name, module)
    root = interpreter.run_function(name) if name else interpreter.run_module()
    if root is None or root.made_by.endswith("Mock"):
        raise Unrecognised(
            f"{source.name} sets no configuration",
            expected="a recipe: a function that returns a ConfigContainer",
            attempt=f"{source.name}::function to name it",
        )
    draft.model_name = interpreter.model_name or name or draft.model_name
    _write(draft, root)


def recipes(source: Source) -> list[Source]:
    """Return one source for each recipe of a Python file; none for a file that sets no configuration."""
    functions = {node.name: node for node in source.module.body if isinstance(node, FUNCTIONS)}
    names = _candidates(functions)
    if names:
        return [source.for_recipe(name) for name in names] if len(names) > 1 else [source]
    return [source] if Interpreter(source.name, source.module).run_module() is not None else []


def _candidates(functions: dict[str, Function]) -> list[str]:
    """Return the recipes among the functions: by their names, else by setting a configuration."""
    own = {name: node for name, node in functions.items() if not _translates(node)}
    names = [name for name, node in own.items() if _returns_container(node)]
    names = names or [name for name, node in own.items() if name != "main" and _sets_config(node)]
    return [name for name in names if not name.startswith("_")] or names


def _chosen(functions: dict[str, Function], source: Source) -> str | None:
    """Return the name of the recipe function, or None for a script that sets its configuration itself."""
    if source.recipe is not None:
        if source.recipe in functions:
            return source.recipe
        raise _ambiguous(source, f"has no function {source.recipe!r}", list(functions))
    public = _candidates(functions)
    if len(public) > 1:
        raise _ambiguous(source, f"holds {len(public)} recipes", public)
    return public[0] if public else None


def _translates(node: Function) -> bool:
    """Return whether a function makes Bridge's configuration of another framework's, so that it is no recipe."""
    required = node.args.args[: len(node.args.args) - len(node.args.defaults)]
    annotations = [each.annotation for each in required if each.annotation is not None]
    kinds = [str(each.value) if isinstance(each, ast.Constant) else last_name(each) for each in annotations]
    return any(kind.endswith(_OF_OTHERS) and not kind.endswith(_CONTAINER) for kind in kinds)


def _returns_container(node: Function) -> bool:
    return node.returns is not None and _CONTAINER in ast.dump(node.returns)


def _sets_config(node: Function) -> bool:
    """Return whether a function without a telling annotation builds a configuration, or is given one to set."""
    parts = list(ast.walk(node))
    set_here = (part for part in parts if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    assigns = any(_SECTIONS & set(dotted_name(part).split(".")[1:-1]) for part in set_here) or any(
        isinstance(part, ast.Call) and dotted_name(part.func) == _CONTAINER for part in parts
    )
    returns = any(isinstance(part, ast.Return) and part.value is not None for part in parts)
    return assigns and (returns or takes_config(node) is not None)


def _ambiguous(source: Source, problem: str, names: list[str]) -> UnusableInput:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    example = names[0] if names else "function"
    return UnusableInput(
        f"{source.name} {problem}",
        expected=f"one of {shown}" if names else "a function that returns a ConfigContainer",
        attempt=f"{source.name}::{example}",
    )


def _write(draft: Draft, root: Section) -> None:
    """Write every field below `root`, all its values in order, so overridden ones are known."""
    pending = [("", root)]
    seen = {id(root)}
    while pending:
        prefix, section = pending.pop()
        if section.is_open:
            draft.may_be_set(f"{prefix}." if prefix else "")
        for name, values in section.fields.items():
            path = f"{prefix}.{name}" if prefix else name
            if name.startswith("_"):
                continue
            for value, place in values:
                _write_value(draft, path, value, place)
            last = values[-1][0]
            is_section = isinstance(last, Section) and path != "env_vars" and not draft.is_leaf(path)
            if is_section and isinstance(last, Section) and id(last) not in seen:
                seen.add(id(last))
                pending.append((path, last))


def _write_value(draft: Draft, path: str, value: object, place: Place) -> None:
    if path == "env_vars" and isinstance(value, Section):
        for variable, values in value.fields.items():
            draft.set_environment(variable, plain(values[-1][0]), values[-1][1])
    if not draft.accepts(path):
        section, dot, _ = path.partition(".")  # at the top a container holds objects of its user's, too
        if dot and section in _SECTIONS and (not isinstance(value, Section) or value.fields):
            draft.note_unknown(path, place)
        return
    key = draft.table.find(draft.framework, path)
    if isinstance(value, Section) and not value.is_literal:
        if key is not None and value.made_by != "?":
            draft.set_key(key.name, _object_value(value, key.implies), path, place)
        return
    draft.set(path, plain(value), place)


def _object_value(section: Section, named: object) -> object:
    """Return the settings of an object: a recipe by its name, a constructor by its fields."""
    if isinstance(named, dict) and section.made_by in named:
        return section.made_by
    if section.made_by[:1].isupper():
        return {name: plain(values[-1][0]) for name, values in section.fields.items()} or section.made_by
    return UNREADABLE
