# SPDX-License-Identifier: Apache-2.0
"""The arguments of a launch, as far as they decide about adapters.

A program has names of its own for them (`--use_peft_lora True`, `--bits 4`), and declares defaults of those not given.
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
_WORDS: Mapping[str, object] = {"true": True, "false": False, "none": None}


class Arguments(NamedTuple):
    """The options of a launch by name; `are_all` says that no unread words may hold more of them."""

    options: Mapping[str, Option]
    are_all: bool

    @classmethod
    def of(cls, launch: Launch, script: Source) -> "Arguments":
        """Return the options of a launch in `script`."""
        found = {each.name: each for each in options(launch.words, script.name)}
        return cls(found, not (holds_more(launch.words) or passes_on(script)))

    def value(self, name: str, program: ast.Module) -> object:
        """Return the value of an argument of `program`; `UNREADABLE` if neither says it."""
        if name in self.options:
            return _literal(self.options[name].value)
        return _default(name, program) if self.are_all else UNREADABLE

    def adapters(self) -> Option | None:
        """Return an option that is on and called after adapters."""
        return next((self.options[name] for name in self._on() if _ADAPTERS.search(name)), None)

    def bits(self) -> int:
        """Return the bits of a weight of the base, by the names of the options."""
        return 4 if any(map(_FOUR_BITS.search, self._on())) else 16

    def _on(self) -> list[str]:
        return [name for name, each in self.options.items() if _literal(each.value) is True]


def _literal(value: object) -> object:
    """Return an option's value as the program has it: a number, a switch, or a text."""
    if not isinstance(value, str):
        return value
    return int(value) if re.fullmatch(r"\d{1,9}", value) else _WORDS.get(value.lower(), value)


def _default(name: str, program: ast.Module) -> object:
    """Return the declared default of an argument: of a dataclass's field, or of argparse."""
    for node in ast.walk(program):
        match node:
            case ast.AnnAssign(target=ast.Name(id=field), value=ast.expr() as value) if field == name:
                return _constant(_keywords(value).get("default", value))
            case ast.Call(
                func=ast.Attribute(attr="add_argument"), args=[*_, ast.Constant(value=str(flag))]
            ) if flag.lstrip("-").replace("-", "_") == name:
                given = _keywords(node)
                is_switch = "action" in given and _constant(given["action"]) == "store_true"
                return _constant(given.get("default", ast.Constant(False if is_switch else None)))
    return UNREADABLE


def _keywords(node: ast.expr) -> dict[str, ast.expr]:
    return {each.arg: each.value for each in node.keywords if each.arg} if isinstance(node, ast.Call) else {}


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else UNREADABLE
