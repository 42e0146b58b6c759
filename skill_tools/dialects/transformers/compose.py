# SPDX-License-Identifier: Apache-2.0
"""Composes a Trainer's arguments: recipes, launch scripts and Python scripts in order, options above them.

Files named by arguments (DeepSpeed's JSON, `fsdp_config`) are followed last, from the winning value.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.keys import Key
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import command_line, write_environment
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.accelerate.dialect import is_one as is_accelerate
from skill_tools.dialects.deepspeed import section
from skill_tools.dialects.deepspeed.dialect import is_one as is_deepspeed
from skill_tools.dialects.transformers import (
    CLASS,
    EMBEDDED,
    LAUNCHER,
    LENGTH,
    OF_THE_SCRIPT,
    TRANSFORMERS,
    arguments,
)
from skill_tools.dialects.transformers.launch import (
    RECIPE,
    Launch,
    declared,
    given_options,
    holds_more,
    launches,
    names_recipe,
    passes_on,
    recipes,
    started,
    started_ranks,
)
from skill_tools.dialects.transformers.parsers import Parser, expected, given
from skill_tools.errors import UnusableInput

_OVERRIDES = "<overrides>"
_OFFLOAD = "offload"
_OF_THE_PARSER = frozenset({RECIPE, "env"})


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, then the files that the result names."""
    draft = Draft(TRANSFORMERS, embeds=EMBEDDED)
    draft.complete = True
    folders = [source.folder for source in sources if source.folder is not None]
    for source in sources:
        draft.take(source)
        match source.kind:
            case Kind.PYTHON:
                from skill_tools.dialects.transformers.python_script import write_script

                by_launch = any(each.kind is Kind.SHELL and launches(each) for each in sources)
                write_script(draft, source, launched=by_launch)
            case Kind.SHELL:
                has_arguments = any(each.kind is Kind.PYTHON for each in sources)
                _write_launch(draft, source, folders, has_arguments=has_arguments)
            case _ if is_deepspeed(source):
                section.write_file(draft, source)
            case _ if is_accelerate(source):
                _write_launchers_file(draft, source, folders)
            case _:
                _write_file(draft, source)
    for text in overrides:
        _write_overrides(draft, command_line(text, _OVERRIDES))
    arguments.settle(draft, folders)
    return draft.finish()


def _write_overrides(draft: Draft, words: Sequence[Argument]) -> None:
    """Write options, and the script's own length in a plan, whose class may have no argument for it."""
    options = []
    for word in words:
        name, equals, value = word.text.partition("=")
        if equals and name == OF_THE_SCRIPT:
            draft.set_key(LENGTH, value, name, Place(_OVERRIDES, word.line, word.column))
        else:
            options.append(word)
    _write_options(draft, options, _OVERRIDES)


def _write_launchers_file(draft: Draft, source: Source, folders: Sequence[Path]) -> None:
    """Write the file of `accelerate launch` that is given beside the script, without the command that names it."""
    from skill_tools.dialects.accelerate.section import settle, write_file

    write_file(draft, source)
    settle(draft, folders)


def is_fsdp_config(entries: Mapping[str, Node]) -> bool:
    """Return whether a file holds the fields of fsdp_config alone."""
    return bool(entries) and all(
        load_vocabulary(TRANSFORMERS).accepts(arguments.without_prefix(f"{arguments.FSDP_CONFIG}.{name}"))
        for name in entries
    )


def _write_file(draft: Draft, source: Source) -> None:
    """Write a file that no command names: arguments, or a file for `fsdp_config`."""
    root = single_document(source, draft=draft)
    if is_fsdp_config(entries_of(root)):
        draft.may_be_set()
        arguments.write(draft, arguments.FSDP_CONFIG, root, source.name)
    else:
        _write_recipe(draft, root, source.name, Parser.RECIPE)


def _write_recipe(draft: Draft, root: Node, file: str, parser: Parser) -> None:
    for name, node in entries_of(root).items():
        if name == "env":
            for variable, value in entries_of(node).items():
                draft.set_environment(variable, plain(value), Place(file, value.line, value.column))
        else:
            _write_given(draft, name, node, file, parser)


def _write_argument(draft: Draft, name: str, node: Node, file: str) -> None:
    """Write the Trainer's arguments; others are the script's own, unless they look like a slip."""
    place = Place(file, node.line, node.column)
    trainer = draft.get(CLASS)
    if not draft.accepts(name):
        alike = arguments.misspelt(name)
        # TRL's own command has no arguments beside those of its classes; a script is unlikely to have an offload.
        if name not in _OF_THE_PARSER and (alike or trainer is not None or _OFFLOAD in name):
            draft.note_unknown(name, place, nearest=alike)
    elif trainer is not None and _is_refused(name, str(trainer.value)):
        is_length = file == _OVERRIDES and draft.canonical(name) == LENGTH
        nearest = (OF_THE_SCRIPT,) if is_length else ()
        draft.note_unknown(f"{trainer.value}.{name}", place, nearest=nearest)
    else:
        arguments.write(draft, name, node, file)


def _is_refused(name: str, trainer: str) -> bool:
    """Return whether TRL's own command for `trainer` refuses an argument that others of its commands take."""
    from skill_tools.dialects.transformers.classes import OF_SCRIPTS, accepted

    return not any(name in accepted(each) for each in (trainer, *OF_SCRIPTS)) and name not in _OF_THE_PARSER


def _write_launch(draft: Draft, source: Source, folders: Sequence[Path], *, has_arguments: bool) -> None:
    """Write the launch of a script, or a text of options alone; a script that `has_arguments` has words of its own."""
    found = launches(source)
    is_own = has_arguments and not found
    if is_own:
        found = started(source)
    if not found:
        words = command_line(source.text, source.name)
        if not words or not words[0].text.startswith("--"):
            raise UnusableInput(
                f"{source.name} starts no training script with arguments of a Trainer",
                expected="a command such as `torchrun train.py --output_dir out`, or `trl sft`",
                attempt="the script with that command",
            )
        _write_options(draft, words, source.name)
        return
    launch = found[-1]
    write_environment(draft, launch.command, source.name)
    _write_launcher(draft, launch, source.name)
    if launch.launcher == "accelerate":
        _write_accelerate(draft, launch, source.name, folders)
    if is_own:
        return
    for recipe in recipes(launch, folders):
        draft.take(recipe)
        parser = Parser.ARGPARSE if names_recipe(launch) else Parser.CALL
        _write_recipe(draft, single_document(recipe, draft=draft), recipe.name, parser)
    if passes_on(source):
        draft.may_be_set()
    _write_options(draft, launch.words, source.name)
    _leave_out_own(draft, source)


def _leave_out_own(draft: Draft, source: Source) -> None:
    """Take out arguments that the Trainer has lost and a class of the program declares: they are the program's own."""
    given = [setting.key for setting in draft.below("") if _is_lost(draft.key(setting.key))]
    for name in declared(source).intersection(given) if given else ():
        draft.remove(name)


def _is_lost(key: Key | None) -> bool:
    return key is not None and key.exists.get(TRANSFORMERS, "").startswith("<")


def _write_accelerate(draft: Draft, launch: Launch, file: str, folders: Sequence[Path]) -> None:
    """Write the words of `accelerate launch` before the script: its file, and its options above it."""
    from skill_tools.dialects.accelerate.launch import launch_words, write_launch
    from skill_tools.dialects.accelerate.section import settle

    write_launch(draft, launch_words((*launch.before, launch.program, *launch.words)), file, folders)
    settle(draft, folders)


def _write_launcher(draft: Draft, launch: Launch, file: str) -> None:
    place = Place(file, launch.program.line, launch.program.column)
    if launch.trainer is not None:
        draft.set_key(CLASS, launch.trainer, "class", place)
    if launch.launcher:
        draft.set_key(LAUNCHER, launch.launcher, LAUNCHER, place)
    else:
        draft.leave_open(LAUNCHER)
    ranks = started_ranks(launch)
    if ranks is not None and "env.WORLD_SIZE" not in draft:
        draft.set_key("env.WORLD_SIZE", str(ranks), "WORLD_SIZE", place)


def _write_options(draft: Draft, words: Sequence[Argument], file: str) -> None:
    if holds_more(words):
        draft.may_be_set()
    for option in given_options(draft, words, file, _names(draft)):
        if not option.is_plain or file == _OVERRIDES:
            _write_given(draft, option.name, option.node, file, Parser.ARGPARSE)
        elif draft.accepts(option.name):
            draft.note_unknown(option.name, option.place, nearest=(f"--{option.name}",))


def _write_given(draft: Draft, name: str, node: Node, file: str, parser: Parser) -> None:
    """Write an argument as `parser` hands it on, and note its refusal."""
    node = given(draft, name, node, parser)
    _write_argument(draft, name, node, file)
    key, wanted = draft.canonical(name), expected(draft, name, node, parser)
    if wanted is not None and key in draft:
        draft.refuse_type(key, wanted)


def _names(draft: Draft) -> frozenset[str]:
    """Return the arguments that the parser of a script knows; TRL's own commands know those of their classes."""
    from skill_tools.dialects.transformers.classes import OF_SCRIPTS, accepted

    trainer = draft.get(CLASS)
    if trainer is None:
        return load_vocabulary(TRANSFORMERS).names
    return frozenset().union(*(accepted(each) for each in (str(trainer.value), *OF_SCRIPTS)))
