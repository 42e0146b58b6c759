# SPDX-License-Identifier: Apache-2.0
"""MaxText as a dialect: the command of one of its trainers, and YAML on top of its base.yml.

A command's `name=value` lies over the file that it names; every name has to be a field. MaxText trains with JAX.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Fault, Place, UnknownKey
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.base import NONE, Dialect, Evidence

if TYPE_CHECKING:
    from skill_tools.configs.keys import Key
    from skill_tools.configs.shell.command import Argument
    from skill_tools.configs.yaml_lines import Node

MAXTEXT = "maxtext"
_PROGRAM = re.compile(
    r"\b[Mm]ax[Tt]ext[./](?:trainers[./](?:pre_train|post_train)[./])?(?:(sft|dpo|rl)[./])?\w*train\w*"
)
_OFFLOAD = re.compile("offload|remat")
_LOCATIONS = ("remat", "device", "offload")
_OVERRIDES = "<overrides>"


class MaxText(Dialect):
    """MaxText. Optimizer and parameters wait in pinned host memory, activations by the name of each tensor."""

    name = MAXTEXT
    label = "MaxText"
    looks_for = "a trainer of maxtext in a command, or base_config: base.yml"
    marks = ("base_config",)
    shell_marks = ("maxtext", "MaxText")
    example_file = "run.sh"
    form = "on the command line"
    assigns = "="
    takes_new_keys = False
    no_plan = "MaxText trains with JAX; its compiler chooses the tensors kept on a device in a step"

    def evidence_in_text(self, text: str) -> Evidence:
        """Take one of its trainers."""
        found = re.search(rf"(?m)^[^#\n]*?(?:-m |/|\s)({_PROGRAM.pattern})", text)
        return Evidence(1, certain=True, proof=found[1]) if found else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a file that is laid over its base.yml."""
        base = entries["base_config"].value if "base_config" in entries else None
        proven = isinstance(base, str) and base.endswith(".yml")
        return Evidence(1, certain=True, proof=f"base_config: {base}") if proven else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files and commands in order, then `NAME=VALUE` on top."""
        from skill_tools.configs.sections import read_tree
        from skill_tools.configs.shell.launch import command_line

        draft = Draft(MAXTEXT)
        draft.complete = True
        for source in sources:
            if source.kind is Kind.SHELL:
                _read_command(draft, source)
            else:
                read_tree(
                    draft, [source], (), expected="a YAML of MaxText", omegaconf=False, reports=_is_an_offload
                )
        for text in overrides:
            _write(draft, command_line(text, _OVERRIDES), _OVERRIDES)
        _gather(draft)
        return draft.finish()

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """The model of the configuration forbids names that it does not have."""
        return "mt-unknown-key"

    def rule_for_type(self, key: "Key | None") -> str:
        """Pydantic reads each value as the type of its field, or refuses it."""
        return "mt-wrong-type"


def _is_an_offload(path: str) -> bool:
    return "." not in path and bool(_OFFLOAD.search(path))


def _read_command(draft: Draft, source: Source) -> None:
    from skill_tools.configs.shell.launch import training_command

    draft.take(source)
    command = training_command(
        source, lambda word: bool(_PROGRAM.search(word)) or draft.accepts(word), whole=True
    )
    for word in command.words:
        if found := _PROGRAM.search(word.text):
            place = Place(source.name, word.line, word.column)
            kind = found[1] if found[1] and not word.text.endswith(("_native", "_native.py")) else "pre_train"
            draft.set_key("maxtext.program", kind, word.text, place)
    _write(draft, command.words, source.name)


def _write(draft: Draft, words: "Sequence[Argument]", file: str) -> None:
    for word in words:
        name, equals, value = word.text.partition("=")
        if not equals or name.startswith("-") or "$" in name:
            continue
        place = Place(file, word.line, word.column)
        if draft.accepts(name):
            given = value if word.resolved and word.certain else UNREADABLE
            draft.set(name, None if value.lower() in ("none", "null") else given, place)
        elif _is_an_offload(name):
            draft.note_unknown(name, place)


def _gather(draft: Draft) -> None:
    """Give the offloaded tensors a key of their own, and refuse an unknown place."""
    tensors = [
        each
        for each in draft.below("")
        if each.key not in draft.table.by_name and not _OFFLOAD.search(each.key)
    ]
    for tensor in tensors:
        if tensor.value not in _LOCATIONS:
            draft.faults.append(Fault("mt-location", f"{tensor.written}: {tensor.value}", tensor.place))
    leaving = [tensor for tensor in tensors if tensor.value == "offload"]
    if leaving:
        names = [tensor.written for tensor in leaving]
        draft.set_key("maxtext.offloaded", names, leaving[0].written, leaving[0].place)


DIALECT = MaxText()
