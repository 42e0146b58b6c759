# SPDX-License-Identifier: Apache-2.0
"""Composes Megatron Bridge's inputs in its own order: recipe, file, dotted overrides, environment.

The order is the framework's, whatever the order on the command line: a Python recipe first, then YAML files and
launch scripts as they were given, then overrides. The shell's environment wins over `env_vars`, which sets only unset
variables.

Last come Bridge's changes of a merged configuration before it trains, as far as a rule can see it: `mixed_precision`
overwrites the fields of the same name in model, optimizer and ddp; `comm_overlap` overwrites its overlap switches; a
distributed optimizer on in one section is turned on in both. The values that lose stay in `Config.overridden`.
"""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import single_document
from skill_tools.configs.yaml_lines import OMEGACONF
from skill_tools.dialects.megatron import BRIDGE
from skill_tools.dialects.megatron.bridge_inputs import Overrides, write_file

_OVERRIDES = "<overrides>"
_ORDER = {Kind.PYTHON: 0, Kind.YAML: 1, Kind.JSON: 1, Kind.SHELL: 2}
_OVERWRITTEN_SECTIONS = ("model", "optimizer", "ddp")
_SYNCHRONIZED = (("use_distributed_optimizer", "ddp.use_distributed_optimizer"),)
_OVERRIDE_STARTS = r"(?:^|\s)(?:\+\+|\+|~)?[A-Za-z_]\w*(?:\.\w+)*="  # compiled when there is an override


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` and `overrides` into one configuration."""
    draft = Draft(BRIDGE, converts_text=False)
    scripts = []
    for source in sorted(sources, key=lambda source: _ORDER[source.kind]):
        draft.take(source)
        match source.kind:
            case Kind.PYTHON:
                from skill_tools.dialects.megatron.python_recipe import write_recipe

                write_recipe(draft, source)
            case Kind.SHELL:
                from skill_tools.configs.shell.launch import training_command
                from skill_tools.dialects.megatron.run_recipe import write_arguments

                command = training_command(source, draft.accepts)
                write_arguments(draft, command.words, source.name, source.folder)
                scripts.append((command, source.name))
            case _:
                write_file(draft, single_document(source, OMEGACONF, draft=draft), source.name)
    written = Overrides(draft)
    for number, text in enumerate(overrides, start=1):
        _write_overrides(draft, written, text, Place(_OVERRIDES, number, 1))
    if scripts:
        from skill_tools.configs.shell.launch import write_environment

        for command, name in scripts:
            write_environment(draft, command, name)
    _settle(draft)
    return draft.finish()


def _write_overrides(draft: Draft, written: Overrides, text: str, place: Place) -> None:
    """Write one override, or a command line that holds several."""
    if len(re.findall(_OVERRIDE_STARTS, text)) > 1 or text.lstrip().startswith("-"):
        from skill_tools.configs.shell.launch import command_line
        from skill_tools.dialects.megatron.run_recipe import write_arguments

        write_arguments(draft, command_line(text, _OVERRIDES), _OVERRIDES, None)
    else:
        written.write(text.strip(), place)


def _settle(draft: Draft) -> None:
    """Apply the changes after all inputs are merged."""
    _overwrite_precision(draft)
    _overwrite_overlap(draft)
    for one, other in _SYNCHRONIZED:
        _synchronize(draft, one, other)
        _synchronize(draft, other, one)


def _overwrite_precision(draft: Draft) -> None:
    recipe = draft.get("mixed_precision")
    key = draft.table.by_name.get("mixed_precision")
    if recipe is not None and key is not None and isinstance(recipe.value, str):
        for field, value in key.implies.get(recipe.value.replace("-", "_"), {}).items():
            if f"mixed_precision.{field}" not in draft:
                _overwrite(draft, field, recipe, value)
    for setting in draft.below("mixed_precision."):
        if setting.value is not None:
            _overwrite(draft, setting.key.removeprefix("mixed_precision."), setting, setting.value)


def _overwrite(draft: Draft, field: str, source: Setting, value: object) -> None:
    """Give `field` its value in every section that has it."""
    for section in _OVERWRITTEN_SECTIONS:
        spelling = f"{section}.{field}"
        if draft.accepts(spelling):
            draft.set_key(draft.canonical(spelling), value, source.written, source.place)


def _overwrite_overlap(draft: Draft) -> None:
    for setting in draft.below("comm_overlap."):
        spelling = f"model.{setting.key.removeprefix('comm_overlap.')}"
        key = draft.table.find(draft.framework, spelling)
        if key is not None and isinstance(setting.value, bool):
            draft.set_key(key.name, setting.value, setting.written, setting.place)


def _synchronize(draft: Draft, source: str, follower: str) -> None:
    on, other = draft.get(source), draft.get(follower)
    if on is not None and on.value is True and (other is None or other.value is not True):
        draft.set_key(follower, True, on.written, on.place)
