# SPDX-License-Identifier: Apache-2.0
"""Follows a shell script statically: its commands, with their words and environment.

Nothing is executed: variables, arrays and defaults are expanded by `variables`, and conditions on known values are
decided by `tests`. An argument from the caller's environment or a command's output is not `resolved`; one in a branch
that may be skipped is not `certain`.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

from skill_tools.configs.files import find_file, read_text
from skill_tools.configs.shell import tests as shell_tests
from skill_tools.configs.shell.command import Argument, Command
from skill_tools.configs.shell.variables import (
    Assignment,
    Variables,
    as_argument,
    behind_c,
    commands_inside,
)
from skill_tools.configs.shell.words import OPAQUE, Word, split
from skill_tools.errors import UnusableInput

MAX_SOURCED = 20

_SOURCED = re.compile(r"^[ \t]*(?:source|\.)[ \t]+([^\n;&|#]+)", re.MULTILINE)
_MOST_SOURCED = 5  # of a script whose commands are not followed
_EXPORTS = {"export", "declare", "typeset", "local", "readonly"}
_CASE_ENDS = {";;", ";&", ";;&"}
_SOURCES = {"source", "."}
_FOLDER = re.compile(r".*[})`]/*", re.DOTALL)  # the script's own folder, worked out by the script
# Files that set up a shell or a Python, and nothing of a training.
_NO_SETTINGS = {"activate", "conda.sh", ".bashrc", ".bash_profile", ".profile", "bashrc", "profile"}
_SKIPPED = {"then", "do", "time"}


class _Block:
    """An open `if`, `case` or loop. `runs` is about the part being read, `earlier_ran` about the parts before it."""

    def __init__(
        self,
        *,
        runs: bool | None,
        reading: str = "",
        earlier_ran: bool | None = False,
        subject: Argument | None = None,
    ) -> None:
        self.reading, self.runs, self.earlier_ran, self.subject = reading, runs, earlier_ran, subject
        self.patterns: list[str] = []

    def decide(self, holds: bool | None) -> None:
        """Enter the next part, whose condition `holds`."""
        self.runs = (
            False
            if self.earlier_ran is True
            else None
            if self.earlier_ran is None and holds is not False
            else holds
        )
        if self.earlier_ran is not True and holds is not False:
            self.earlier_ran = holds
        self.reading = ""


def run(text: str, *, name: str, folder: Path | None = None) -> list[Command]:
    """Return the commands of `text` in order, each with the environment exported up to it.

    Sourced files are read too, from the script's `folder`; their settings stand at the place of the source
    command. The last one is no command of the script: its words are the contents of all variables, for a sourced file
    that only sets variables. Raises `UnusableInput` when expansion has no end in sight.
    """
    script = _Script(name, folder)
    for words, before, after in _statements(split(text, name=name)):
        script.take(words, before, after)
    return [*script.commands, script.variables_alone()]


def _statements(words: list[Word]) -> Iterator[tuple[list[Word], str, str]]:
    """Yield each statement with the operators before and after it."""
    statement: list[Word] = []
    before, depth, in_test = "", 0, False
    for word in words:
        if word.operator == "(" and (depth or (statement and statement[-1].touches_next)):
            depth += 1
        elif word.operator == ")" and depth:
            depth -= 1
        elif not depth and not in_test and word.operator and not _is_redirection(word):
            yield statement, before, word.operator
            statement, before = [], word.operator
            continue
        in_test = in_test if not word.literal else word.literal == "[[" or (in_test and word.literal != "]]")
        statement.append(word)
    yield statement, before, ""


def text_with_sourced(text: str, folder: Path | None) -> str:
    """Return the text of a script in `folder`, and of the files there that it sources: its options may stand there."""
    written = (path.strip().strip("\"'") for path in _SOURCED.findall(text)[:_MOST_SOURCED])
    paths = (re.sub(r"\$(\w+)", r"${\1}", path) for path in written)  # as `Argument.text` shows a variable
    found = [_sourced(path, folder) for path in paths if not _sets_nothing(path)]
    return "\n".join([text, *(each.text for each in found if each is not None)])


class _Sourced(NamedTuple):
    """A file that a script sources: its name as it was found, and its text."""

    name: str
    text: str


def _sets_nothing(path: str) -> bool:
    """Return whether a sourced file sets up a shell or a Python, and nothing of a training."""
    return Path(_FOLDER.sub("", path)).name in _NO_SETTINGS


def _sourced(path: str, folder: Path | None) -> _Sourced | None:
    """Return the file sourced by `path` from a script in `folder`; None if it is missing or no text."""
    found = find_file(_FOLDER.sub("", path), [folder]) if folder else None
    try:
        return None if found is None else _Sourced(str(found), read_text(found))
    except UnusableInput:
        return None


class _Script:
    """The state of a script at one statement."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.commands: list[Command] = []
        self._name, self._folder = name, folder
        self._sourced = 0
        self._missing: list[Argument] = []
        self._variables = Variables(name)
        self._exported: dict[str, Argument] = {}
        self._exports_all = False
        self._blocks: list[_Block] = []
        self._outcome: bool | None = True
        self._was_test = False
        self._braces: list[bool] = []  # the open ones, and whether each begins a function
        self._is_defined = False

    def take(self, words: list[Word], before: str, after: str) -> None:
        """Follow one statement."""
        if (before, after) == ("(", ")") and not words:  # of `name ()`
            self._is_defined = True
        words = self._keywords(words, after)
        block = self._blocks[-1] if self._blocks else None
        if words and block and block.reading == "condition":
            block.runs = shell_tests.combine(before, block.runs, self._test(words))
        elif words and self._runs() is not False:
            self._guarded(words, before)
        if block and block.subject and after in _CASE_ENDS:
            block.reading = "pattern"

    def variables_alone(self) -> Command:
        """Return all that the variables hold as if it were one command."""
        return Command(tuple(self._variables.options()), self._exported, tuple(self._missing))

    def _runs(self) -> bool | None:
        states = [block.runs for block in self._blocks]
        return False if False in states else None if None in states else True

    def _keywords(self, words: list[Word], after: str) -> list[Word]:
        """Act on a statement's leading keywords; return the remaining words."""
        while words:
            block = self._blocks[-1] if self._blocks else None
            keyword = words[0].literal
            if keyword in ("fi", "done", "esac"):
                if block:
                    self._blocks.pop()
            elif block and block.reading == "pattern":
                self._pattern(block, words, after)
                return []
            elif keyword in ("if", "while", "until"):
                self._blocks.append(_Block(reading="condition", runs=True))
                self._blocks[-1].earlier_ran = False if keyword == "if" else None
            elif keyword in ("elif", "else") and block:
                block.reading, block.runs = "condition", True
                if keyword == "else":
                    block.decide(True)
            elif keyword in ("then", "do") and block and block.reading == "condition":
                block.decide(block.runs)
            elif keyword in ("for", "select"):
                self._loop(words)
                return []
            elif keyword == "case":
                words = self._case(words)
                continue
            elif (
                len(words) > 2
                and words[1].operator == "("
                and words[2].operator == ")"
                and "=" not in keyword
            ):
                words, self._is_defined = words[2:], True
            elif keyword == "function":
                words = [words[0], *dropwhile(lambda word: word.operator in ("(", ")"), words[2:])]
                self._is_defined = True
            elif keyword in ("{", "}"):
                self._brace(keyword)
            elif keyword not in _SKIPPED:
                return words
            words = words[1:]
        return []

    def _brace(self, brace: str) -> None:
        """Enter or leave a group of commands, which is the body of a function just named."""
        if brace == "{":
            self._braces.append(self._is_defined)
            self._is_defined = False
            self._variables.has_own_arguments |= self._braces[-1]
        elif self._braces and self._braces.pop():
            self._variables.has_own_arguments = any(self._braces)

    def _case(self, words: list[Word]) -> list[Word]:
        subject = self._variables.argument(words[1]) if len(words) > 1 else None
        self._blocks.append(_Block(reading="pattern", runs=False, subject=subject))
        return words[3:]

    def _pattern(self, block: _Block, words: list[Word], after: str) -> None:
        block.patterns += ["".join(part.text for part in word.parts) for word in words if not word.operator]
        if after != ")":
            return
        holds = None
        if block.subject and block.subject.resolved:
            holds = any(fnmatchcase(block.subject.text, pattern) for pattern in block.patterns)
        block.decide(holds)
        block.patterns = []

    def _loop(self, words: list[Word]) -> None:
        """Open a loop: its body may run any number of times, with a variable that takes many values."""
        if len(words) > 1 and words[1].literal:
            self._variables.forget(words[1].literal)
        self._blocks.append(_Block(reading="condition", runs=None, earlier_ran=None))

    def _guarded(self, words: list[Word], before: str) -> None:
        """Run a command if the `&&` or `||` before it lets it."""
        holds: bool | None = True
        if before == "&&" and self._was_test:
            holds = self._outcome
        elif before == "||":
            holds = None if self._outcome is None or not self._was_test else not self._outcome
        if holds is False:
            return
        command = words[1:] if words[0].literal == "!" else words
        self._was_test = bool(command) and command[0].literal in ("[", "[[", "test")
        if self._was_test:
            self._outcome = self._test(words)
            return
        words = command
        self._blocks.append(_Block(runs=holds))
        self._simple(words)
        self._blocks.pop()

    def _test(self, words: list[Word]) -> bool | None:
        """Decide a test command; `[[ a && b ]]` is two tests, `!` before it turns the answer around."""
        if words and words[0].literal == "!":
            return shell_tests.negate(self._test(words[1:]))
        holds: bool | None = None
        test: list[Argument] = []
        operator = ""
        for word in [*words, Word(operator=";")]:
            if not word.operator:
                test.append(self._variables.argument(word))
            elif word.operator in ("&&", "||", ";"):
                holds = shell_tests.combine(operator, holds, shell_tests.evaluate(test))
                operator, test = word.operator, test[:1]
        return holds

    def _simple(self, words: list[Word]) -> None:
        certain = self._runs() is True
        assignments, rest = self._variables.assignments(_without_redirections(words))
        fields = [field for word in rest for field in self._variables.expand(word)]
        if not fields:
            for assignment in assignments:
                self._variables.assign(assignment, certain=certain)
                if assignment.name in self._exported or self._exports_all:
                    self._export(assignment, certain)
            return
        arguments = [as_argument(field) for field in fields]
        name = arguments[0].text if arguments else ""
        if name in _EXPORTS:
            self._declare(rest[1:], exported=name in ("export", "declare"), certain=certain)
            return
        if name in _SOURCES and len(arguments) > 1:
            self._source(arguments[1])
            return
        if name == "set":
            self._set_options([argument.text for argument in arguments[1:]])
            return
        if name == "unset":
            for argument in arguments[1:]:
                self._exported.pop(argument.text, None)
                self._variables.unset(argument.text)
            return
        inside = name in ("eval", "env") or behind_c(arguments) > 0
        environment = {item.name: as_argument(item.value, certain=certain) for item in assignments}
        for words_of_one in commands_inside(fields) if inside else [arguments]:
            given = {**self._exported, **environment, **_given_by_env(words_of_one)}
            self.commands.append(Command(tuple(words_of_one), given, tuple(self._missing)))

    def _source(self, path: Argument) -> None:
        """Follow a sourced file as if its text stood in place of the command; note a missing one."""
        if _sets_nothing(path.text):
            return
        self._sourced += 1
        found = _sourced(path.text, self._folder) if self._sourced <= MAX_SOURCED else None
        if found is None:
            self._missing.append(path)
            return
        blocks = list(self._blocks)
        for words, before, after in _statements(split(found.text, name=found.name)):
            self.take([word.moved(path.line, path.column) for word in words], before, after)
        self._blocks = blocks

    def _set_options(self, options: list[str]) -> None:
        """Follow `set -a`, from which on each assignment is exported, `set +a`, and the new arguments of `set --`."""
        self._variables.has_own_arguments |= "--" in options
        text = " ".join(options).replace("o allexport", "a")
        for option in text.split():
            if option[0] in "+-" and "a" in option and option[1:].isalpha():
                self._exports_all = option[0] == "-"

    def _declare(self, words: list[Word], *, exported: bool, certain: bool) -> None:
        for word in words:
            assignments, _ = self._variables.assignments([word])
            for assignment in assignments:
                self._variables.assign(assignment, certain=certain)
                if exported:
                    self._export(assignment, certain)
            if not assignments and exported and word.literal in self._variables:
                self._exported[word.literal] = self._variables.value(word.literal)
            elif not assignments and exported and any(part.kind == OPAQUE for part in word.parts):
                self._missing.append(self._variables.argument(word))  # export $(grep -v '^#' .env)

    def _export(self, assignment: Assignment, certain: bool) -> None:
        self._exported[assignment.name] = as_argument(assignment.value, certain=certain)


def _given_by_env(words: list[Argument]) -> dict[str, Argument]:
    """Return the variables that `env A=1 B=2 command` sets, behind `srun` too, or `A=1 command` in a shell's text."""
    texts = [word.text for word in words]
    given: dict[str, Argument] = {}
    start = texts.index("env") + 1 if "env" in texts else behind_c(words) or len(words)
    for word in words[start:]:
        name, equals, value = word.text.partition("=")
        if not (equals and name.isidentifier()):
            break
        given[name] = word._replace(text=value)
    return given


def _is_redirection(word: Word) -> bool:
    return "<" in word.operator or ">" in word.operator


def _without_redirections(words: list[Word]) -> list[Word]:
    """Drop `> file` and its kin."""
    kept: list[Word] = []
    skip = False
    for word in words:
        if skip and not word.operator:
            skip = False
        elif _is_redirection(word):
            skip = "<<" not in word.operator or "<<<" in word.operator
        else:
            kept.append(word)
    return kept
