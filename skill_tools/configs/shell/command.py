# SPDX-License-Identifier: Apache-2.0
"""A command as a shell would run it: its words after expansion, and the environment that it gets.

The shell reader makes commands, the readers of command lines take them apart; they share these two types.
"""

from typing import NamedTuple


class Argument(NamedTuple):
    """One word and its place.

    An unresolved one keeps its unexpanded text; one in a branch that may or may not run is
    not certain.
    """

    text: str
    line: int
    column: int
    resolved: bool = True
    certain: bool = True


class Command(NamedTuple):
    """A simple command: its words, and its environment beside the inherited one.

    `missing` are missing files sourced before it: they may set any variable. A branch around it does not make its words
    less certain: they are about the run with this command.
    """

    words: tuple[Argument, ...]
    environment: dict[str, Argument]
    missing: tuple[Argument, ...] = ()
