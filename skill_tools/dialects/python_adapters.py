# SPDX-License-Identifier: Apache-2.0
"""Changes of a Python script to its model that no argument states: adapters, a base in 4 bits, Unsloth's checkpointing.

`get_peft_model`, `add_adapter` and a trainer's `peft_config` add adapters (peft); so does Unsloth's
`FastLanguageModel.get_peft_model`, whose `from_pretrained` loads 4 bits unless it is told otherwise (unsloth 2024.8 to
2026.10). A call under an `if` counts where constants of the file, or the arguments of its launch, decide the condition;
else it stays open. Apart because only a plan needs it.
"""

import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from skill_tools.configs.config import Config, Place
from skill_tools.configs.python.syntax import last_name
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.base import Question
from skill_tools.dialects.transformers.given_arguments import Arguments
from skill_tools.dialects.transformers.launch import Launch, program_of, started
from skill_tools.errors import UnusableInput

# Bytes of a base's weight by its bits; NF4's with a byte-sized scale for 64 weights, double-quantized or not.
BASE_BYTES = {4: 0.53, 8: 1.0, 16: 2.0}
_ADD = ("get_peft_model", "add_adapter", "PeftModel", "PeftModelForCausalLM")
_LOADERS = ("from_pretrained", "BitsAndBytesConfig")
_TRAINERS = "peft_config"  # the keyword by which TRL's trainers are given adapters
_RANK, _UNSLOTH_RANK, _UNSLOTH_LENGTH = (
    8,
    16,
    2048,
)  # of LoraConfig, of Unsloth's get_peft_model and from_pretrained
UNKNOWN_RANK = 16  # of a plan, where no file says it
_UNSLOTH_SHORTEST = 512  # tokens; unsloth/models/_utils.py::apply_unsloth_gradient_checkpointing
_WORDS = (*_ADD, _TRAINERS, "load_in_4bit", "load_in_8bit")
_SHOWN = 60


class Added(NamedTuple):
    """The additions of a script: an unreadable `condition` decides them; it is empty if they are certain.

    `bits` are those of a weight of the base. `rank` is None if computed. `recomputes`, `offloads_inputs` and
    `sequence_len` are None without a setting of Unsloth's. `asked_for`: the launch has an option called after adapters.
    `four_bits_if`: the unreadable condition under which the base has 4 bits in place of 16.
    """

    place: Place
    condition: str
    rank: int | None
    bits: int = 16
    recomputes: bool | None = None
    offloads_inputs: bool | None = None
    sequence_len: int | None = None
    asked_for: bool = False
    four_bits_if: str = ""

    @property
    def counts(self) -> bool:
        """Whether a plan counts them, if nobody says otherwise."""
        return self.asked_for or not self.condition

    @property
    def is_unsloths(self) -> bool:
        """Whether Unsloth's loader makes the model; it decides about checkpointing."""
        return self.recomputes is not None


def added(config: Config) -> Added | None:
    """Return the additions to the model of the input's Python scripts, and of the programs that it launches."""
    return next(filter(None, itertools.starmap(_in_file, config.sources.items())), None)


@lru_cache(maxsize=8)
def _in_file(name: str, text: str) -> Added | None:
    source = Source(name, text, Path(name).parent)
    with suppress(UnusableInput):  # no Python, or no commands
        if name.endswith(".py"):
            return _in_script(source)
        if source.kind is Kind.SHELL:
            return next(filter(None, (_by_launch(each, source) for each in started(source)[-1:])), None)
    return None


def _in_script(source: Source, given: Arguments | None = None) -> Added | None:
    return _Script(source, given).added() if any(word in source.text for word in _WORDS) else None


def _by_launch(launch: Launch, script: Source) -> Added | None:
    """Return the additions of the program that `launch` starts; open ones if only its arguments speak of them."""
    if launch.trainer is not None:  # TRL's own command, whose arguments are known
        return None
    given, program = Arguments.of(launch, script), program_of(launch, script)
    found = _in_script(program, given) if program is not None else None
    if found is not None and not found.condition:
        return found
    option = given.adapters()
    if option is None:
        return found
    condition = f"{launch.program.text} does so by --{option.name}"
    return Added(option.place, condition, found and found.rank, given.bits(), asked_for=True)


def question(config: Config, switch: str = "use_peft") -> Question | None:
    """Return the question of adapters, if a script adds them under an unreadable condition, or of their base's bits.

    `switch` is the setting that says them: TRL's, or the rank of a script without such a switch.
    """
    found = added(config) if config.value(switch) is None else None
    if found is None or not found.condition:
        return _of_bits(config, found) if found is not None and switch == "use_peft" else None
    adapted: dict[str, object] = {switch: found.rank or UNKNOWN_RANK}
    if switch == "use_peft":
        adapted = {switch: True, "load_in_4bit": found.bits == 4, "load_in_8bit": found.bits == 8}
        if found.rank is not None:
            adapted["lora_r"] = found.rank
    answers: list[tuple[str, dict[str, object]]] = [
        (f"with adapters (--overrides {switch}={str(adapted[switch]).lower()})", adapted),
        ("without adapters", {switch: False}),
    ]
    text = f"{found.place} adds adapters only if {found.condition}"
    return Question(text, dict(reversed(answers) if found.asked_for else answers))


def _of_bits(config: Config, found: Added) -> Question | None:
    """Return the question of the base's bits, if a script computes them."""
    if not found.four_bits_if or config.value("load_in_4bit") is not None:
        return None
    answers: dict[str, dict[str, object]] = {
        "in 4 bits (--overrides load_in_4bit=true)": {"load_in_4bit": True},
        "in 16 bits": {"load_in_4bit": False},
    }
    return Question(f"the base of {found.place}'s adapters has 4 bits only if {found.four_bits_if}", answers)


class _Script:
    """One script, parsed, with the parents of its nodes and the names that are one constant."""

    def __init__(self, source: Source, given: Arguments | None = None) -> None:
        self._source, self._arguments = source, given
        self._parents = {
            child: node for node in ast.walk(source.module) for child in ast.iter_child_nodes(node)
        }
        self._constants = dict(self._single_constants())

    def added(self) -> Added | None:
        """Return the first call that may add adapters; a base in few bits alone is trained by adapters too."""
        bits = self._bits()
        unsloth = next(filter(_is_unsloths, self._calls_of("from_pretrained")), None)
        for call in self._calls():
            conditions = self._open_conditions(call)
            if conditions is None:
                continue
            place = Place(self._source.name, call.lineno, call.col_offset + 1)
            open_bits = self._four_bits_if() if bits == 16 else ""
            found = Added(place, " and ".join(conditions), self._rank(call), bits, four_bits_if=open_bits)
            return self._by_unsloth(found, call, unsloth) if unsloth is not None else found
        return None

    def _calls(self) -> Iterator[ast.expr]:
        """Yield the additions of adapters, in the order of the text: calls, and a trainer's `peft_config`."""
        calls = [node for node in ast.walk(self._source.module) if isinstance(node, ast.Call)]
        for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
            if last_name(node.func) in _ADD:
                yield node
            given = next((item.value for item in node.keywords if item.arg == _TRAINERS), None)
            if given is not None and not (isinstance(given, ast.Constant) and given.value is None):
                yield self._value(given)

    def _value(self, given: ast.expr) -> ast.expr:
        """Return the value assigned to a name, if assigned once."""
        if not isinstance(given, ast.Name):
            return given
        assigned = [node for node in ast.walk(self._source.module) if _assigns(node, given.id)]
        values = [node.value for node in assigned if isinstance(node, ast.Assign)]
        return values[0] if len(values) == 1 else given

    def _open_conditions(self, node: ast.expr) -> list[str] | None:
        """Return the unreadable conditions around `node`; None if it is never reached."""
        found = []
        if isinstance(node, ast.IfExp):
            decided = self._decide(node.test)
            none_is_else = isinstance(node.orelse, ast.Constant) and node.orelse.value is None
            if decided is not None:
                return [] if decided is none_is_else else None
            found.append(_shown(node.test, negated=not none_is_else))
        elif not isinstance(node, ast.Call):
            found.append(_shown(node))
        elif (
            last_name(node.func) == "get_peft_config"
        ):  # TRL's, which makes none unless the command line asks for it
            found.append(f"{_shown(node)} makes any")
        inner: ast.AST = node
        while (outer := self._parents.get(inner)) is not None:
            if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
                wanted = inner is outer.body if isinstance(outer, ast.IfExp) else inner in outer.body
                decided = self._decide(outer.test)
                if decided is not None and decided is not wanted:
                    return None
                if decided is None:
                    found.append(_shown(outer.test, negated=not wanted))
            inner = outer
        return found

    def _decide(self, test: ast.expr) -> bool | None:
        """Return a condition's value by the file's constants and the launch's arguments; None if they say nothing."""
        value = self._known(test)
        return None if value is UNREADABLE else bool(value)

    def _known(self, node: ast.expr) -> object:
        """Return the value of an expression, or `UNREADABLE`."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name) if name in self._constants:
                return self._constants[name]
            case ast.Name(id=name) | ast.Attribute(attr=name) if self._arguments is not None:
                return self._arguments.value(name, self._source.module)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                decided = self._decide(operand)
                return UNREADABLE if decided is None else not decided
            case ast.BoolOp(op=op, values=values):
                every = [self._decide(value) for value in values]
                stops = isinstance(op, ast.Or)
                if stops in every:
                    return stops
                return UNREADABLE if None in every else not stops
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                sides = self._known(left), self._known(right)
                return UNREADABLE if UNREADABLE in sides else sides[0] == sides[1]
            case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.List() | ast.Tuple() as right]):
                among = [self._known(each) for each in right.elts]
                sought = self._known(left)
                return UNREADABLE if UNREADABLE in (sought, *among) else sought in among
        return UNREADABLE

    def _single_constants(self) -> Iterator[tuple[str, object]]:
        """Yield the names that are bound once, to a literal."""
        nodes = list(ast.walk(self._source.module))
        bound = Counter(
            [node.arg for node in nodes if isinstance(node, ast.arg)]
            + [node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
        )
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and bound[target.id] == 1:
                        yield target.id, node.value.value

    def _rank(self, call: ast.expr) -> int | None:
        """Return the rank that Unsloth's `call`, or the LoraConfig of the script, is given; None for several."""
        if isinstance(call, ast.Call) and _is_unsloths(call):
            given = {self._given(call, "r", _UNSLOTH_RANK)}
        else:
            given = {self._given(made, "r", _RANK) for made in self._calls_of("LoraConfig")}
        rank = given.pop() if len(given) == 1 else None
        return rank if isinstance(rank, int) else None

    def _bits(self) -> int:
        """Return the bits of a weight of the base: the precision of any load that is surely reached."""
        bits = 16
        for load in self._calls_of(*_LOADERS):
            if self._open_conditions(load) != []:
                continue
            eight = self._given(load, "load_in_8bit", False) is True
            other = eight or any(
                self._given(load, name, False) for name in ("load_in_16bit", "full_finetuning")
            )
            four = self._given(load, "load_in_4bit", _is_unsloths(load) and not other) is True
            bits = min(bits, 4 if four else 8 if eight else 16)
        return bits

    def _four_bits_if(self) -> str:
        """Return the unreadable condition under which a load has 4 bits; "" if each says surely whether it has."""
        for load in self._calls_of(*_LOADERS):
            conditions = self._open_conditions(load)
            given = next((value for key, value in self._keywords(load) if key == "load_in_4bit"), None)
            if conditions is None or given is None:
                continue
            known = self._known(given)
            if known is UNREADABLE:
                conditions = [*conditions, _shown(given)]
            if known and conditions:
                return " and ".join(conditions)
        return ""

    def _by_unsloth(self, found: Added, call: ast.expr, loader: ast.Call) -> Added:
        """Return `found` with the checkpointing and the sequence of Unsloth's calls."""
        length = self._given(loader, "max_seq_length", _UNSLOTH_LENGTH)
        own = call if isinstance(call, ast.Call) else loader
        checkpointing = self._given(own, "use_gradient_checkpointing", "unsloth")
        return found._replace(
            sequence_len=length if isinstance(length, int) else None,
            recomputes=checkpointing in (True, "unsloth", "true", "True"),
            # Of shorter sequences Unsloth makes ordinary checkpointing.
            offloads_inputs=checkpointing == "unsloth"
            and not (isinstance(length, int) and length < _UNSLOTH_SHORTEST),
        )

    def _calls_of(self, *names: str) -> list[ast.Call]:
        nodes = ast.walk(self._source.module)
        return [node for node in nodes if isinstance(node, ast.Call) and last_name(node.func) in names]

    def _keywords(self, call: ast.Call) -> Iterator[tuple[str | None, ast.expr]]:
        """Yield the keyword arguments of `call`, those of a dictionary that is assigned once too: `**kwargs`."""
        for item in call.keywords:
            match self._value(item.value) if item.arg is None else None:
                case ast.Call(func=ast.Name(id="dict")) as made:
                    yield from self._keywords(made)
                case ast.Dict(keys=keys, values=values):
                    named = zip(keys, values, strict=True)
                    yield from (
                        (str(key.value), each) for key, each in named if isinstance(key, ast.Constant)
                    )
                case _:
                    yield item.arg, item.value

    def _given(self, call: ast.Call, name: str, otherwise: object) -> object:
        """Return the known argument `name` of `call`; None if computed."""
        value = next((value for key, value in self._keywords(call) if key == name), None)
        known = otherwise if value is None else self._known(value)
        return None if known is UNREADABLE else known


def _is_unsloths(call: ast.Call) -> bool:
    """Return whether `call` is one of Unsloth's classes' (FastLanguageModel, FastModel, FastVisionModel)."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner is not None and last_name(owner).startswith("Fast")


def _assigns(node: ast.AST, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _shown(test: ast.expr, *, negated: bool = False) -> str:
    text = ast.unparse(test)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"not ({text})" if negated else text
