# SPDX-License-Identifier: Apache-2.0
"""Finds the objects of given classes that a Python file makes, with their arguments: `TrainingArguments(lr=2e-5)`.

The file is followed as `statements` follows a recipe: constants, functions and dataclasses of the same file are known;
an import, a command line and a computed value are not. An attribute set on the object afterwards is its field too.
"""

from collections.abc import Collection
from typing import NamedTuple

from skill_tools.configs.config import Place
from skill_tools.configs.python.statements import Interpreter
from skill_tools.configs.python.syntax import last_name
from skill_tools.configs.python.values import Section, plain
from skill_tools.configs.source import Source


class Construction(NamedTuple):
    """One object: `kind` is the class that was asked for, `name` the class as it is called, perhaps a subclass.

    `positional` are the arguments without a name, `UNREADABLE` where they cannot be read.
    """

    kind: str
    name: str
    section: Section
    place: Place
    positional: tuple[object, ...]

    @property
    def is_open(self) -> bool:
        """Whether unfollowed code may set an unset field, so its value is unknown."""
        return self.section.is_open

    def values(self) -> list[tuple[str, object, Place]]:
        """Return every value of every field in the order of the text, the last one counts.

        A field that holds an object is `UNREADABLE`; a dict literal is a dict.
        """
        return [
            (name, plain(value), place)
            for name, given in self.section.fields.items()
            for value, place in given
        ]


def constructions(source: Source, kinds: Collection[str]) -> list[Construction]:
    """Return the objects of the classes `kinds` (`{"TrainingArguments"}`) that the Python `source` makes.

    A repeated call is given once, with its last fields. Raises `UnusableInput` for a
    text that is no Python.
    """
    interpreter = Interpreter(source.name, source.module, kinds)
    interpreter.run_everything()
    last = {id(built.call): built for built in interpreter.built}
    return [
        Construction(
            built.kind,
            last_name(built.call.func),
            built.section,
            Place(source.name, built.call.lineno, built.call.col_offset + 1),
            tuple(plain(argument) for argument in built.positional),
        )
        for built in last.values()
    ]
