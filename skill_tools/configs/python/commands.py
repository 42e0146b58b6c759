# SPDX-License-Identifier: Apache-2.0
"""Finds the command lines that a Python file passes on: to a process, to an argument parser, in `sys.argv`.

Apart because a file that passes on none is not followed at all.

An unreadable part becomes an unset variable; the shell reader treats it as unknown.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from skill_tools.configs.python.statements import Interpreter
from skill_tools.configs.source import Source

_UNKNOWN = "${UNREADABLE}"
# Without one of each there is none in a file, and it need not be parsed.
_HANDED_ON = ("subprocess", "os.system", "sys.argv", "parse_args(", "parse_args_into_dataclasses(")
_OPTION = ('"--', "'--", " --")


class Word(NamedTuple):
    """One part of a command line, and its place; `is_script`: it is a whole line for a shell."""

    text: str
    line: int
    column: int
    is_script: bool = False


def may_hand_on(text: str) -> bool:
    """Return whether a Python text may hand on a command line at all."""
    return any(mark in text for mark in _HANDED_ON) and any(mark in text for mark in _OPTION)


def command_lines(source: Source) -> Iterator[list[Word]]:
    """Yield each command line of a Python source; raises `UnusableInput` for a text that is no Python."""
    interpreter = Interpreter(source.name, source.module)
    interpreter.run_everything()
    seen = set()
    for node, value in interpreter.commands:
        if id(node) not in seen and (words := list(_words(node, value, source.name))):
            yield words
        seen.add(id(node))


def _words(node: ast.expr, value: object, program: str) -> Iterator[Word]:
    if isinstance(value, str):
        yield Word(value, node.lineno, node.col_offset + 2, is_script=True)
        return
    if not isinstance(value, list):
        return
    if value and isinstance(value[0], str) and value[0].startswith("-"):
        yield Word(
            program, node.lineno, node.col_offset + 1
        )  # an argument parser gets the words behind its program
    parts = node.elts if isinstance(node, ast.List) and len(node.elts) == len(value) else [node] * len(value)
    for part, item in zip(parts, value, strict=True):
        known = isinstance(item, str | int | float)
        yield Word(str(item) if known else _UNKNOWN, part.lineno, part.col_offset + 1)
