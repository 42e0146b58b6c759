# SPDX-License-Identifier: Apache-2.0
"""Reads a Python script's configuration for `deepspeed.initialize`: a dict in the script, or a path.

`config` counts, and `config_params`, its older name, where `config` is None. A configuration that the script reads or
computes is not known; an engine with one is left out. Source: deepspeed/__init__.py, initialize, of 0.17.0 to 0.19.8.
"""

import ast

from skill_tools.configs.config import Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import constructions
from skill_tools.configs.python.syntax import dotted_name
from skill_tools.configs.python.values import Section, plain
from skill_tools.configs.source import Source
from skill_tools.configs.tree import write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import Node
from skill_tools.dialects.deepspeed import DEEPSPEED, MAKES_ENGINE, section
from skill_tools.errors import Unrecognised

_ARGUMENTS = ("config", "config_params")
_Given = tuple[object, Place]


def engines(source: Source) -> dict[str, _Given]:
    """Return each readable configuration of an engine in a script, by the name that selects it."""
    ours = {
        (node.lineno, node.col_offset + 1)
        for node in ast.walk(source.module)
        if isinstance(node, ast.Call) and dotted_name(node.func) == MAKES_ENGINE
    }
    found = {}
    for made in constructions(source, {MAKES_ENGINE.rpartition(".")[2]}):
        given = [made.section.fields[name][-1] for name in _ARGUMENTS if name in made.section.fields]
        stated = next((each for each in given if each[0] is not None), None)
        if (made.place.line, made.place.column) in ours and stated is not None and _is_readable(stated[0]):
            found[f"{made.kind}:{made.place.line}"] = stated
    return found


def write(draft: Draft, source: Source) -> None:
    """Write the configuration of the one engine; raises `Unrecognised` where none, or several without a choice, is."""
    draft.take(source)
    found = engines(source)
    chosen = source.recipe if source.recipe in found else next(iter(found), None)
    if chosen is None or (len(found) > 1 and chosen != source.recipe):
        raise Unrecognised(
            f"{source.name} makes {len(found)} engines of a configuration that stands in it",
            expected=f"one of {', '.join(found)}" if found else f"{MAKES_ENGINE}(config={{..}})",
            attempt=f"{source.name}::{chosen}" if chosen else "the JSON that the script reads",
        )
    config, place = found[chosen]
    if isinstance(config, Section):
        write_literal(draft, config, place)
        return
    named = Setting(DEEPSPEED, config, "config", place)
    if not section.follow(draft, named, [source.folder] if source.folder else []):
        section.leave_open(draft, named)


def write_literal(draft: Draft, config: Section, place: Place) -> None:
    """Write a dict of a Python script; a dict that unfollowed code may change is left open."""
    if plain(config) is UNREADABLE:
        draft.section_may_be_set(DEEPSPEED)
        return
    write_tree(draft, _node(config, place), place.file, spell=lambda path: f"{DEEPSPEED}.{path}")
    section.settle(draft)


def _is_readable(config: object) -> bool:
    return isinstance(config, str) or (
        isinstance(config, Section) and config.is_literal and bool(config.fields)
    )


def _node(value: object, place: Place) -> Node:
    """Return a value of a script as a tree; parts that cannot be read are `UNREADABLE`."""
    if isinstance(value, Section) and value.is_literal and not value.is_open:
        below = {name: _node(*given[-1]) for name, given in value.fields.items()}
        return Node(below, place.line, place.column)
    if isinstance(value, list) and plain(value) is not UNREADABLE:
        return Node([_node(each, place) for each in value], place.line, place.column)
    return Node(plain(value), place.line, place.column)
