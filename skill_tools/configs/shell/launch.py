# SPDX-License-Identifier: Apache-2.0
"""Finds the training command in a launch script: its arguments, and the environment that it gets.

It is the only entry to the shell reader, which is loaded only when there is a script or a command line to read.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument, Command
from skill_tools.configs.source import Source, find
from skill_tools.configs.values import UNREADABLE, is_template
from skill_tools.errors import UnusableInput

_OPTIONS = ("ARGS", "OPTS", "OPTION", "FLAGS", "PARAMS", "EXTRA")
_FILES = (".yaml", ".yml", ".json", ".toml")
_DEFAULT = re.compile(r"\$\{\w+:?-([^{}$]+)\}")  # of the script's own arguments
# They handle files and start nothing.
_HANDLERS = frozenset(
    {"cat", "cp", "echo", "grep", "head", "ln", "ls", "mv", "rm", "sed", "tee", "wget", "yq"}
)


class Flag(NamedTuple):
    """A flag with the values after it, as argparse groups them.

    `written` is the text of the input. `known`: all of it is read, with nothing left to fill in. `joined`:
    the first value stands behind an equals sign, so argparse takes no other. `more`: the flag itself is read, and
    unread words behind it may be more options (`--colocate $MODEL_ARGS`, `--tp 8 $MODEL_ARGS`).
    """

    name: str
    values: tuple[str, ...]
    written: str
    place: Place
    known: bool = True
    joined: bool = False
    more: bool = False


def training_command(source: Source, knows: Callable[[str], bool], *, whole: bool = False) -> Command:
    """Return the command of a script with the most words that the framework `knows`, from its program on or `whole`.

    A text of arguments alone, over any number of lines, is one command. Without such a command a script gives
    the one that names a configuration beside it, else all words in its variables. The files beside it that it
    sources are read too.
    """
    *commands, variables = source.commands
    if commands and all(command.words[0].text.startswith("-") for command in commands if command.words):
        words = tuple(word for command in commands for word in command.words)
        return commands[-1]._replace(words=words)
    scored = [(_score(command, knows), -position) for position, command in enumerate(commands)]
    best, position = max(scored, default=(0, 0))
    naming = (command for command in commands if any(_files_of(command, source)))
    command = commands[-position] if best else next(naming, variables)
    return command if whole else command._replace(words=command.words[program_end(command) :])


def program_end(command: Command) -> int:
    """Return where the arguments of the Python program begin; the words before them are the launcher's.

    A launcher may be a module itself, but no script: a second one is a value, as is the script in `reward=x.py`.
    """
    texts = [word.text for word in command.words]
    scripts = [at + 1 for at, text in enumerate(texts) if text.endswith(".py") and "=" not in text]
    modules = [min(at + 2, len(texts)) for at, text in enumerate(texts) if text == "-m"]
    return min(scripts) if scripts else max(modules, default=0)


def commands_of(source: Source) -> list[Command]:
    """Return a script's commands, in order; sourced files beside it are read too."""
    return source.commands[:-1]


def named_files(source: Source) -> Iterator[tuple[Argument, Source]]:
    """Yield each existing configuration file named by a script's commands, with the naming word.

    The default of an argument of the script counts too, though such a word is not resolved.
    """
    if any(suffix in source.script for suffix in _FILES):
        for command in commands_of(source):
            yield from _files_of(command, source)


def _files_of(command: Command, source: Source) -> Iterator[tuple[Argument, Source]]:
    if not command.words or command.words[0].text in _HANDLERS:
        return
    for word in command.words:
        text = _DEFAULT.sub(r"\1", word.text.rpartition("=")[2])
        if text.endswith(_FILES) and "$" not in text:
            with suppress(UnusableInput):  # a file that nobody could read as a configuration
                if found := find(text, [source.folder] if source.folder else []):
                    yield word._replace(text=text), found


def command_line(text: str, name: str) -> tuple[Argument, ...]:
    """Return the words of one command line, such as the value of `--overrides`: `a=b` is a word, not an assignment."""
    from skill_tools.configs.shell.script import run

    commands = run(f": {' '.join(text.splitlines())}", name=name)
    return commands[0].words[1:]


def flags(words: Sequence[Argument], file: str) -> Iterator[Flag]:
    """Group words into flags with their values; words before the first flag belong to nobody."""
    starts = [at for at, word in enumerate(words) if word.text.startswith("--") and len(word.text) > 2]
    for start, end in pairwise([*starts, len(words)]):
        first, *following = words[start:end]
        name, equals, value = first.text.partition("=")
        unread = next((at for at, word in enumerate(following) if not word.resolved), None)
        if unread is not None and (unread or equals):  # no value of this flag
            following = following[:unread]
        values = (*((value,) if equals else ()), *(word.text for word in following))
        known = all(word.resolved and word.certain for word in (first, *following))
        known = known and not is_template(" ".join(values))
        more = unread is not None and first.resolved and first.certain
        yield Flag(name, values, name, Place(file, first.line, first.column), known, bool(equals), more)


def write_environment(draft: Draft, command: Command, file: str) -> None:
    """Write the environment that the script gives to its command.

    A missing sourced file may set any other variable, and any option if the command has words that only such
    a variable can hold.
    """
    for name, argument in command.environment.items():
        known = argument.resolved and argument.certain
        place = Place(file, argument.line, argument.column)
        draft.set_environment(name, argument.text if known else UNREADABLE, place)
    if command.missing:
        draft.environment_may_be_set()
        if any(_holds_options(word) for word in command.words):
            draft.may_be_set()


def _holds_options(word: Argument) -> bool:
    """Return whether a word is one variable with an unknown value and a name for options."""
    name = word.text.removeprefix("${").partition("}")[0].partition("[")[0].upper()
    return not word.resolved and word.text.startswith("${") and any(part in name for part in _OPTIONS)


def _score(command: Command, knows: Callable[[str], bool]) -> int:
    return sum(knows(word.text.lstrip("+~").partition("=")[0]) for word in command.words)
