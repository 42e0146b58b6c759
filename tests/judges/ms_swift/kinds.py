# SPDX-License-Identifier: Apache-2.0
"""Writes the kinds that argparse gives the arguments of `swift sft`: a number, a truth, several words.

    for each in build/ms_swift/4.*; do PYTHONPATH=$each python tests/judges/ms_swift/kinds.py >> all; done

Prints a line an argument of the release on the path, which `tests/judges/rl/fetch.py` has fetched; those that all
releases agree on are `skill_tools/knowledge/vocabulary/ms_swift_kinds.txt`. It needs transformers.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parsers"))

import ms_swift_command
from transformers import HfArgumentParser

_KINDS = {"string_to_bool": "bool", "int": "int", "float": "float", "str": "str"}


def main() -> None:
    """Print the kind of each argument: of each word if it takes several, which is `list`."""
    for action in HfArgumentParser([ms_swift_command.arguments()])._actions:
        name = max(action.option_strings, key=lambda each: (each.startswith("--"), "_" in each))
        kind = _KINDS.get(getattr(action.type, "__name__", "str"))
        if kind is not None and not isinstance(action, argparse._StoreFalseAction | argparse._HelpAction):
            print("list" if action.nargs in ("+", "*") else kind, name)


if __name__ == "__main__":
    main()
