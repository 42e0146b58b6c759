# SPDX-License-Identifier: Apache-2.0
"""Reads the command of a program that has Megatron-LM's flags beside options of its own.

Megatron-LM's flags get Megatron's canonical names, so that its rules and plans are about them. Values that the program
forces are written over them, and its own decisions are left open. Apart because several frameworks read their commands
with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.launch import (
    Flag,
    command_line,
    flags,
    program_end,
    training_command,
    write_environment,
)
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.megatron import LM
from skill_tools.dialects.megatron.embedded import SHARED_CODE
from skill_tools.dialects.megatron.lm_compose import is_slip, refuse_left_over, taken

_OVERRIDES = "<overrides>"
_RAY_ENVIRONMENT = "runtime-env"  # Ray gives it to the trainer, beside the script's own


class Program(NamedTuple):
    """A framework's program: its launch, in words, and its changes of flags after they are parsed.

    `forced` are values that it sets by itself, `decided` keys with any possible value, `passed_over` the prefixes of
    another parser's options, and `tokens` the key of a micro-batch's most tokens, if it has one. `is_closed`: its
    Megatron-LM is an unchanged release, so there is no further option.
    """

    name: str
    starts: str
    forced: Mapping[str, object]
    decided: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    tokens: str = ""
    is_closed: bool = False


def compose(program: Program, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, each a string of options."""
    draft = Draft(program.name)
    draft.complete = True
    draft.shares = {LM: (*SHARED_CODE, "megatron/training/")}
    place = Place(_OVERRIDES, 1, 1)
    for source in sources:
        draft.take(source)
        if source.kind is not Kind.SHELL:
            raise source.refused(
                expected=f"a script that starts {program.starts}",
                attempt="the script with the command that trains",
            )
        command = training_command(source, lambda word: _is_known(draft, word), whole=True)
        write_environment(draft, command, source.name)
        if _RAY_ENVIRONMENT in source.text:
            draft.environment_may_be_set()
        words = command.words[program_end(command) :]
        place = Place(source.name, words[0].line if words else 1, 1)
        _write(draft, program, flags(words, source.name))
    for text in overrides:
        _write(draft, program, flags(command_line(text, _OVERRIDES), _OVERRIDES))
    _force(draft, program, place)
    draft.keys_may_be_set(program.decided)
    if program.tokens:
        _settle_tokens(draft, program)
    return draft.finish()


def _force(draft: Draft, program: Program, place: Place) -> None:
    for name, value in program.forced.items():
        setting = draft.get(name)
        is_fp16 = name == "bf16" and (draft.get("fp16") is not None or draft.is_open("fp16"))
        if not is_fp16 and (setting is None or setting.value is not value):
            draft.set_key(name, value, f"{program.name}'s own default", place)


def _settle_tokens(draft: Draft, program: Program) -> None:
    """Give a micro-batch its tokens: a GPU's most tokens with dynamic batches, else 4096 by default."""
    tokens, ranks = draft.get(program.tokens), draft.get("context_parallel_size")
    if tokens is not None and isinstance(tokens.value, int):
        each = ranks.value if ranks is not None and isinstance(ranks.value, int) else 1
        draft.set_key("seq_length", tokens.value * each, tokens.written, tokens.place)
    elif "seq_length" not in draft and not draft.is_open("seq_length"):
        draft.set_key("seq_length", 4096, f"{program.name}'s own default", Place(_OVERRIDES, 1, 1))


def _is_known(draft: Draft, word: str) -> bool:
    return draft.accepts(word) or word in load_vocabulary(LM).names


def _write(draft: Draft, program: Program, given: Iterable[Flag]) -> None:
    for flag in given:
        negated = draft.table.by_negative.get(flag.name)
        if negated is not None:
            draft.set_key(negated.name, False if flag.known else UNREADABLE, flag.written, flag.place)
        elif _is_known(draft, flag.name):
            key = draft.key(flag.name) or draft.table.find(LM, flag.name)
            kind = key.type_in(LM) if key else "any"
            name = key.name if key else flag.name
            draft.set_key(name, taken(flag, kind), flag.written, flag.place)
            if program.is_closed and kind != "list":  # other programs drop a word that nobody takes
                refuse_left_over(draft, name, flag, kind)
        elif not flag.name.startswith(program.passed_over or ("---",)) and _is_meant_for_it(
            program, flag.name
        ):
            nearest = load_vocabulary(program.name).nearest(flag.name) + load_vocabulary(LM).nearest(
                flag.name
            )
            draft.note_unknown(flag.written, flag.place, nearest=nearest[:3])


def _is_meant_for_it(program: Program, name: str) -> bool:
    """Return whether an unknown option is a slip: the Megatron-LM that a framework patches has options of its own."""
    names = load_vocabulary(program.name).names | load_vocabulary(LM).names
    return program.is_closed or "offload" in name or is_slip(name, names)
