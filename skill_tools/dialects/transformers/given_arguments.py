# SPDX-License-Identifier: Apache-2.0
"""The arguments by which a script is launched, as far as they decide about adapters.

A program reads them under names of its own (`--use_peft_lora True`, `--bits 4`). Those that are not given have the
defaults that its fields or its parser declare.
"""

import ast
import re
from collections.abc import Mapping
from typing import NamedTuple

from skill_tools.configs.source import Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.transformers.launch import Launch, Option, holds_more, options, passes_on

_ADAPTERS = re.compile(r"(?:^|_)q?(?:lora|peft)(?:_|$)")
_FOUR_BITS = re.compile(r"4bit|(?:^|_)q_?lora(?:_|$)")
_RANKS = ("lora_r", "lora_rank")
_WORDS: Mapping[str, object] = {"true": True, "yes": True, "false": False, "no": False, "none": None}
_SWITCHES = {"store_true": False, "store_false": True}


class Arguments(NamedTuple):
    """The options of a launch by name; `are_all` says that no unread words may hold more of them."""

    options: Mapping[str, Option]
    are_all: bool

    @classmethod
    def of(cls, launch: Launch, script: Source) -> "Arguments":
        """Return the options of a launch in `script`."""
        found = {each.name: each for each in options(launch.words, script.name)}
        return cls(found, not (holds_more(launch.words) or passes_on(script)))

    def value(self, name: str, module: ast.Module) -> object:
        """Return the value of the argument `name` of the program `module`; `UNREADABLE` if neither says it."""
        if name in self.options:
            return _literal(self.options[name].value)
        return _default(name, module) if self.are_all else UNREADABLE

    def adapters(self) -> Option | None:
        """Return an option that is on and called after adapters."""
        named = (each for name, each in self.options.items() if _ADAPTERS.search(name))
        return next((each for each in named if _literal(each.value) is True), None)

    def rank(self) -> int | None:
        """Return the adapters' rank, if an option says it."""
        said = (_literal(self.options[name].value) for name in _RANKS if name in self.options)
        return next((each for each in said if isinstance(each, int)), None)

    def bits(self) -> int:
        """Return the bits of a weight of the base, by the names of the options."""
        on = [name for name, each in self.options.items() if _literal(each.value) is True]
        bits = _literal(self.options["bits"].value) if "bits" in self.options else None
        if bits == 4 or any(map(_FOUR_BITS.search, on)):
            return 4
        return 8 if bits == 8 or any("8bit" in name for name in on) else 16


def _literal(value: object) -> object:
    """Return an option's value as the program has it: a number, a switch, or a text."""
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"\d{1,9}", value):
        return int(value)
    return _WORDS.get(value.lower(), value)


def _default(name: str, module: ast.Module) -> object:
    """Return the declared default of an argument: of a dataclass's field, or of argparse."""
    for node in ast.walk(module):
        match node:
            case ast.AnnAssign(target=ast.Name(id=field), value=ast.expr() as value) if field == name:
                return _constant(_keywords(value).get("default", value))
            case ast.Call(
                func=ast.Attribute(attr="add_argument"), args=[*_, ast.Constant(value=str(flag))]
            ) if flag.lstrip("-").replace("-", "_") == name:
                given = _keywords(node)
                action = _constant(given["action"]) if "action" in given else None
                if action in _SWITCHES:
                    return _SWITCHES[str(action)]
                return _constant(given["default"]) if "default" in given else None
    return UNREADABLE


def _keywords(node: ast.expr) -> dict[str, ast.expr]:
    """Return the keyword arguments of a call, by name."""
    return {each.arg: each.value for each in node.keywords if each.arg} if isinstance(node, ast.Call) else {}


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else UNREADABLE
