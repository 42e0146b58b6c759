# SPDX-License-Identifier: Apache-2.0
"""Reads the plugins of a Python script with `Accelerator(fsdp_plugin=..)` as a configuration.

A plugin's field is kept under the key of the file's field that the launcher would hand to it. A plugin takes an unset
field from its launcher's environment, which is not known here. Facts: accelerator.py and utils/dataclasses.py of
accelerate 1.13.0 to 1.15.0.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence

from skill_tools import knowledge
from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.python.syntax import last_name
from skill_tools.configs.python.values import Section, plain
from skill_tools.configs.source import Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.accelerate import (
    ACCELERATE,
    ACCELERATOR,
    DEEPSPEED_PLUGIN,
    FSDP_PLUGIN,
    OUR_MODULE,
    SCRIPT,
)
from skill_tools.dialects.accelerate.section import TYPE, write_value
from skill_tools.dialects.patch import as_keywords
from skill_tools.errors import UnusableInput
from skill_tools.nearest import nearest

_VERSION = "accelerate.fsdp_config.fsdp_version"
_CALL = "accelerate.offload_call"
_PLUGINS = {
    "fsdp_plugin": (FSDP_PLUGIN, "FSDP"),
    "deepspeed_plugin": (DEEPSPEED_PLUGIN, "DEEPSPEED"),
    "deepspeed_plugins": (DEEPSPEED_PLUGIN, "DEEPSPEED"),
}
_FIELDS = {
    (FSDP_PLUGIN, "cpu_offload"): "fsdp_config.fsdp_offload_params",
    (FSDP_PLUGIN, "transformer_cls_names_to_wrap"): "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    (FSDP_PLUGIN, "fsdp_version"): "fsdp_config.fsdp_version",
    (DEEPSPEED_PLUGIN, "hf_ds_config"): "deepspeed_config.deepspeed_config_file",
}
_PREFIXES = {FSDP_PLUGIN: "fsdp_config.fsdp_", DEEPSPEED_PLUGIN: "deepspeed_config."}
_POLICIES = {"CPUOffloadPolicy": True, "OffloadPolicy": False}
_ENUMS = frozenset({"ShardingStrategy", "StateDictType", "BackwardPrefetch"})


def recipes(source: Source) -> dict[str, Construction | None]:
    """Return each `Accelerator` with a plugin in a script, under the name that selects it.

    Where a script gives none to any, its first stands for the script's call of ours; None if there is none to see.
    """
    made = constructions(source, {ACCELERATOR})
    given = [each for each in made if each.section.fields.keys() & _PLUGINS.keys()] or made[:1]
    if len(given) < 2:
        return {ACCELERATOR: given[0] if given else None}
    return {f"{ACCELERATOR}:{each.place.line}": each for each in given}


def write_script(draft: Draft, source: Source) -> None:
    """Write the objects that a script makes; raises `UnusableInput` for several Accelerators without a choice."""
    draft.take(source)
    draft.keys_may_be_set([TYPE])
    draft.launcher_may_set([_VERSION])
    every = constructions(source, {ACCELERATOR, FSDP_PLUGIN, DEEPSPEED_PLUGIN, "offload"})
    draft.set_key(SCRIPT, True, ACCELERATOR, Place(source.name, 1, 1))
    accelerator = _chosen(source, every)
    plugins = [each for each in every if each.kind in _PREFIXES]
    calls = _calls(source)
    if accelerator is not None:
        _write_accelerator(draft, accelerator, plugins, calls)
    elif len(plugins) == 1:
        _write_plugin(draft, plugins[0], calls.get(plugins[0].place))
    if re.search(OUR_MODULE, source.text):
        for each in [each for each in every if each.kind == "offload"][:1]:
            draft.set_key(_CALL, True, "offload", each.place)


def as_plugins(spelled: Mapping[str, object]) -> str:
    """Return settings of the file, or of plugins as a script has them already, as arguments of the plugins."""
    given: dict[str, dict[str, object]] = {}
    for path, value in spelled.items():
        kind, name = _of_a_plugin(path.removeprefix(f"{ACCELERATE}."))
        given.setdefault(kind, {})[name] = value
    return "\n".join(f"{kind}({as_keywords(fields)})" for kind, fields in given.items())


def _of_a_plugin(path: str) -> tuple[str, str]:
    """Return the plugin that a field of the file belongs to, and its name there."""
    if "." not in path:
        return (FSDP_PLUGIN if path in _fields_of(FSDP_PLUGIN) else DEEPSPEED_PLUGIN), path
    for field, renamed in _FIELDS.items():
        if path == renamed:
            return field
    kind = FSDP_PLUGIN if path.startswith("fsdp_config.") else DEEPSPEED_PLUGIN
    return kind, path.removeprefix(_PREFIXES[kind])


def _chosen(source: Source, every: Sequence[Construction]) -> Construction | None:
    found = recipes(source)
    if source.recipe is not None and source.recipe in found:
        found = {source.recipe: found[source.recipe]}
    if len(found) > 1:
        raise UnusableInput(
            f"{source.name} makes {len(found)} Accelerators",
            expected=f"one of {', '.join(found)}",
            attempt=f"{source.name}::{next(iter(found))}",
        )
    (chosen,) = found.values()
    return next((each for each in every if chosen is not None and each.place == chosen.place), None)


def _write_accelerator(
    draft: Draft, made: Construction, plugins: Sequence[Construction], calls: Mapping[Place, ast.Call]
) -> None:
    """Write the precision and the plugins of one Accelerator; DeepSpeed's wins where there are both."""
    for name, value, place in made.values():
        if name == "mixed_precision" and value is not None:
            write_value(draft, name, value, name, place)
    for name, (kind, distributed) in _PLUGINS.items():
        for value, place in made.section.fields.get(name, ())[-1:]:
            linked = [each for each in plugins if each.section is value]
            if not linked and value is not None:
                draft.leave_open(TYPE)
                linked = [each for each in plugins if each.kind == kind]
            elif linked:
                draft.set_key(TYPE, distributed, name, place)
            for each in linked if len(linked) == 1 else ():
                _write_plugin(draft, each, calls.get(each.place))


def _write_plugin(draft: Draft, made: Construction, call: ast.Call | None) -> None:
    known = _fields_of(made.kind)
    keywords = {item.arg: item.value for item in call.keywords if item.arg} if call is not None else {}
    for name, given in made.section.fields.items():
        value, place = given[-1]
        if name not in known:
            if name in keywords and made.name == made.kind:
                draft.note_unknown(f"{made.kind}.{name}", place, nearest=_nearest(made.kind, name))
            continue
        spelling = _FIELDS.get((made.kind, name), f"{_PREFIXES[made.kind]}{name}")
        read = _read(value, keywords.get(name))
        if read is not None and draft.accepts(f"{ACCELERATE}.{spelling}"):
            write_value(draft, spelling, read, name, place)


def _read(value: object, node: ast.expr | None) -> object:
    """Return a plugin's value as the file has it: policies as truths, members of enums by name, a dict as JSON."""
    if isinstance(value, Section):
        if value.made_by in _POLICIES:
            return _POLICIES[value.made_by]
        if value.made_by == "CPUOffload" and "offload_params" in value.fields:
            return _read(value.fields["offload_params"][-1][0], None)
    if value is UNREADABLE and isinstance(node, ast.Attribute) and last_name(node.value) in _ENUMS:
        return node.attr
    read = plain(value)
    if isinstance(read, dict):
        return json.dumps(read)
    return ",".join(map(str, read)) if isinstance(read, list) else read


def _calls(source: Source) -> dict[Place, ast.Call]:
    """Return every call of a script by its beginning; a later assignment to its object is no argument of it."""
    return {
        Place(source.name, node.lineno, node.col_offset + 1): node
        for node in ast.walk(source.module)
        if isinstance(node, ast.Call)
    }


def _nearest(kind: str, name: str) -> tuple[str, ...]:
    return tuple(nearest(name, _fields_of(kind)))


def _fields_of(kind: str) -> frozenset[str]:
    """Return the fields that the class of a plugin has in any known release."""
    names = knowledge.names("accelerate_plugins")
    return frozenset(name.partition(".")[2] for name in names if name.startswith(f"{kind}."))
