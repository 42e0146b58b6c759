"""Composes Megatron Bridge's inputs in its own order: recipe, file, dotted overrides, environment.

The order is the framework's, whatever the order on the command line: a Python recipe first, then YAML files and
launch scripts as they were given, then overrides. The shell's environment wins over `env_vars`, which only sets what is
not set. `bridge_precedence` comes last.
"""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config, Framework, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.launch import command_line, training_command, write_environment
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.stated_versions import stated_versions
from skill_tools.configs.tree import single_document
from skill_tools.dialects.megatron.bridge_inputs import write_file, write_override
from skill_tools.dialects.megatron.bridge_precedence import settle
from skill_tools.dialects.megatron.run_recipe import write_arguments

_OVERRIDES = "<overrides>"
_ORDER = {Kind.PYTHON: 0, Kind.YAML: 1, Kind.JSON: 1, Kind.SHELL: 2}
_OVERRIDE_STARTS = re.compile(r"(?:^|\s)(?:\+\+|\+|~)?[A-Za-z_]\w*(?:\.\w+)*=")


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` and `overrides` into one configuration."""
    draft = Draft(Framework.BRIDGE)
    scripts = []
    for source in sorted(sources, key=lambda source: _ORDER[source.kind]):
        draft.sources[source.name] = source.text
        draft.versions.update(stated_versions(source.text))
        match source.kind:
            case Kind.PYTHON:
                from skill_tools.dialects.megatron.python_recipe import write_recipe

                write_recipe(draft, source)
            case Kind.SHELL:
                command = training_command(source.text, source.name, draft.accepts)
                write_arguments(draft, command.words, source.name, source.folder)
                scripts.append((command, source.name))
            case _:
                write_file(draft, single_document(source, omegaconf=True), source.name)
    for number, text in enumerate(overrides, start=1):
        _write_overrides(draft, text, Place(_OVERRIDES, number, 1))
    for command, name in scripts:
        write_environment(draft, command, name)
    settle(draft)
    return draft.finish()


def _write_overrides(draft: Draft, text: str, place: Place) -> None:
    """Write one override, or a command line that holds several."""
    if len(_OVERRIDE_STARTS.findall(text)) > 1 or text.lstrip().startswith("-"):
        write_arguments(draft, command_line(text, _OVERRIDES), _OVERRIDES, None)
    else:
        write_override(draft, text.strip(), place)
