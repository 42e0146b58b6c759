# SPDX-License-Identifier: Apache-2.0
"""Composes Accelerate's own configuration: files, a script that launches with one, options above them.

Apart because a lint that only asks for evidence loads no reader.
"""

from collections.abc import Sequence

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument, Command
from skill_tools.configs.shell.launch import command_line, commands_of, write_environment
from skill_tools.configs.source import Kind, Source
from skill_tools.dialects.accelerate import ACCELERATE, EMBEDDED
from skill_tools.dialects.accelerate.launch import launch_words, write_launch, write_options
from skill_tools.dialects.accelerate.section import settle, write_file
from skill_tools.dialects.deepspeed import section
from skill_tools.dialects.deepspeed.dialect import is_one as is_deepspeed

_OVERRIDES = "<overrides>"
_OF_THE_SCRIPT = frozenset({"lora_rank", "recompute_granularity"})
_BATCH, _CHECKPOINTS = ("--per_device_train_batch_size", "--train_batch_size"), "--gradient_checkpointing"
_MODEL = ("--model_name_or_path", "--model", "--model_id", "--pretrained_model_name_or_path")


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, options of the launcher each."""
    draft = Draft(ACCELERATE, embeds=EMBEDDED)
    draft.complete = True
    folders = [source.folder for source in sources if source.folder is not None]
    for source in sources:
        match source.kind:
            case Kind.JSON if is_deepspeed(source):
                section.write_file(draft, source)
            case Kind.YAML | Kind.JSON:
                write_file(draft, source)
            case Kind.SHELL:
                _write_script(draft, source)
            case Kind.PYTHON:
                from skill_tools.dialects.accelerate.python_script import write_script

                write_script(draft, source)
            case _:
                raise source.refused(
                    expected="its YAML or JSON, or the script with `accelerate launch`",
                    attempt="the file that --config_file names",
                )
    for text in overrides:
        _write_override(draft, text)
    settle(draft, folders)
    return draft.finish()


def _write_override(draft: Draft, text: str) -> None:
    """Write options of the launcher, or the script's settings in a plan: `seq_length=4096`, a size of the model."""
    words = command_line(text, _OVERRIDES)
    for word in words:
        name, equals, value = word.text.partition("=")
        key = draft.table.by_name.get(name)
        if equals and (name in _OF_THE_SCRIPT or (key is not None and key.mechanism == "model")):
            draft.set_key(name, value, name, Place(_OVERRIDES, word.line, word.column))
    write_options(draft, words, _OVERRIDES)


def _write_script(draft: Draft, source: Source) -> None:
    """Write the last launch of a script; one command a configuration."""
    draft.take(source)
    launches = [command for command in commands_of(source) if launch_words(command.words)]
    for command in launches[-1:]:
        write_environment(draft, command, source.name)
        folders = [source.folder] if source.folder else []
        rest = write_launch(draft, launch_words(command.words), source.name, folders)
        draft.model_name = _value_of(_MODEL, rest) or draft.model_name
        _write_own(draft, command, rest, source.name)


def _write_own(draft: Draft, command: Command, words: Sequence[Argument], file: str) -> None:
    """Write the batch and the recomputation that the script's own arguments say under their usual names."""
    place = Place(file, command.words[0].line, command.words[0].column)
    batch = _value_of(_BATCH, words) or ""
    if batch.isdecimal():
        draft.set_key("micro_batch_size", batch, _BATCH[0], place)
    if any(word.text == _CHECKPOINTS for word in words):
        draft.set_key("recompute_granularity", "full", _CHECKPOINTS, place)


def _value_of(options: Sequence[str], words: Sequence[Argument]) -> str | None:
    """Return the value of the first of `options` among the script's arguments."""
    for position, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if name in options and (equals or position + 1 < len(words)):
            named = word._replace(text=value) if equals else words[position + 1]
            return named.text if named.resolved else None
    return None
