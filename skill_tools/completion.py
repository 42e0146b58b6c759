# SPDX-License-Identifier: Apache-2.0
"""Completes words of the command line in a shell that argcomplete serves: `register-python-argcomplete offload`.

Commands, options and their choices come from the parsers themselves. Here are the names that no parser lists.
Apart because no other run of the command needs any of this.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping

from skill_tools import knowledge


def _rules() -> Iterable[str]:
    from skill_tools.rules.knowledge import load_rules

    return (rule.id for rule in load_rules())


# Names that an argument takes, by the argument's name. argcomplete shows a dict's values as their meanings.
NAMES: Mapping[str, Callable[[], Iterable[str]]] = {
    "rules": _rules,
    "model": lambda: list(knowledge.index()["models"]),
    "gpu": lambda: list(knowledge.index()["hardware"]["gpus"]),
}


def complete(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Print the words that fit at the cursor and end this process; return if no shell asks."""
    import argcomplete

    parser = argparse.ArgumentParser(prog="offload")
    below = parser.add_subparsers()
    for name, command in commands.items():
        for argument in command._actions:
            if argument.dest in NAMES:
                argument.completer = lambda names=NAMES[argument.dest], **_: names()  # type: ignore[attr-defined]
        below.add_parser(name, parents=[command], add_help=False)
    argcomplete.autocomplete(parser)
