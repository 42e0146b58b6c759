# SPDX-License-Identifier: Apache-2.0
"""Reads the command of one of SkyRL's programs, and writes the input of Megatron's engine to Megatron's keys.

The words `a.b=c` are OmegaConf's and the dataclasses are closed: a name that no class has ends the run, and so does a
plus. The SFT trainer has the policy's sections at the top: its names stand in the vocabulary behind `sft.`. No class
looks at the type of a value, so that any text but an empty one is true.
"""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config, Fault, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import (
    command_line,
    program_end,
    training_command,
    write_environment,
)
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import as_omegaconf, plain
from skill_tools.dialects.megatron import embedded
from skill_tools.dialects.skyrl import SKYRL
from skill_tools.errors import UnusableInput

_OVERRIDES = "<overrides>"
_SFT = "sft."
_OWN = re.compile(r"skyrl\.train\.(?:entrypoints\.)?(?:main_\w+|serve)")
_EXAMPLE = re.compile(
    r"examples\.[\w.]+|skyrl_train\.entrypoints\.main_base"
)  # they extend SkyRL's own classes
_TAKES_OVER = "trainer.override_entrypoint="
_POLICY = frozenset({"model", "optimizer_config", "fsdp_config", "megatron_config", "torch_profiler_config"})
_ENGINE = "trainer.policy.megatron_config"


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, each a string of words `a.b=c`."""
    draft = Draft(SKYRL, converts_text=False)
    draft.complete = True
    program = ""
    for source in sources:
        draft.take(source)
        if source.kind is not Kind.SHELL:
            raise source.refused(
                expected="a script that starts a program of SkyRL",
                attempt="the script with `-m skyrl.train.entrypoints.main_base`",
            )
        command = training_command(source, lambda word: _knows(draft, word), whole=True)
        write_environment(draft, command, source.name)
        end = program_end(command)
        program = command.words[end - 1].text.removesuffix(".py").replace("/", ".") if end else ""
        program = _taking_over(command.words[end:]) or program
        _write_program(draft, program, source.name, command.words[end - 1] if end else None)
        _write(draft, command.words[end:], source.name, program)
    for text in overrides:
        _write(draft, command_line(text, _OVERRIDES), _OVERRIDES, program)
    _hand_on_to_megatron(draft)
    model = draft.get("trainer.policy.model.path")
    draft.model_name = str(model.value) if model is not None else None
    return draft.finish()


def _knows(draft: Draft, word: str) -> bool:
    return word.startswith("skyrl") or draft.accepts(word) or draft.accepts(_SFT + word)


def _taking_over(words: Sequence[Argument]) -> str:
    """Return the module that the program hands all words on to, before it looks at them."""
    named = (word.text for word in words if word.text.startswith(_TAKES_OVER))
    return next(named, "").removeprefix(_TAKES_OVER)


def _is_sft(program: str) -> bool:
    return program.rpartition(".")[2].startswith("main_sft")


def _write_program(draft: Draft, program: str, file: str, word: Argument | None) -> None:
    """Write the program's own decisions; a program of somebody else may have other defaults."""
    place = Place(file, word.line, word.column) if word else Place(file, 1, 1)
    kind = "sft" if _is_sft(program) else "fully-async" if "fully_async" in program else "rl"
    draft.set_key("skyrl.program", kind, program or "the program", place)
    if kind == "sft":
        for name, value in (("colocate_all", False), ("strategy", "megatron"), ("use_kl_loss", False)):
            draft.set_key(f"skyrl.{name}", value, "the SFT trainer's own default", place)
    if not _OWN.search(program) and not _EXAMPLE.search(program):
        draft.may_be_set()


def _write(draft: Draft, words: Sequence[Argument], file: str, program: str) -> None:
    is_closed = bool(_OWN.search(program)) or not program
    for word in words:
        name, equals, text = word.text.partition("=")
        place = Place(file, word.line, word.column)
        if name.startswith("-") or not equals or "$" in name:
            continue
        if name.startswith("+"):
            if is_closed and not _is_sft(program):
                draft.faults.append(Fault("sky-plus", name, place))
            name = name if _is_sft(program) else name.lstrip("+")
        value = _value(text, file) if word.resolved and word.certain else UNREADABLE
        _write_value(draft, name, value, place, sft=_is_sft(program), is_closed=is_closed)


def _value(text: str, file: str) -> object:
    """Return a value as `OmegaConf.from_cli` loads it."""
    if "${" in text:
        return UNREADABLE
    try:
        from skill_tools.configs.yaml_events import parse

        documents = parse(text, file)
    except UnusableInput:
        return UNREADABLE
    return plain(as_omegaconf(documents[0])) if len(documents) == 1 else None


def _write_value(draft: Draft, name: str, value: object, place: Place, *, sft: bool, is_closed: bool) -> None:
    spelling = _SFT + name if sft else name
    if not draft.accepts(spelling):
        section, _, field = spelling.rpartition(".")
        if is_closed or ("offload" in field and _has_section(section)):
            nearest = tuple(each.removeprefix(_SFT) for each in load_vocabulary(SKYRL).nearest(spelling))
            draft.note_unknown(name, place, spelling=spelling, nearest=nearest)
        return
    canonical = draft.canonical(_in_policy(name) if sft else name)
    if isinstance(value, dict) and canonical not in draft.table.by_name:
        for part, each in value.items():
            _write_value(draft, f"{name}.{part}", each, place, sft=sft, is_closed=is_closed)
        return
    key = draft.table.by_name.get(canonical)
    if key is not None and key.type_in(SKYRL) == "bool" and isinstance(value, str):
        draft.faults.append(Fault("sky-text-is-true", f"{name}={value}", place))
        value = bool(value) or None
    draft.set_key(canonical, value, name, place)


def _has_section(section: str) -> bool:
    """Return whether a section is SkyRL's, not added by the program's own classes."""
    return any(name.startswith(f"{section}.") for name in load_vocabulary(SKYRL).names)


def _in_policy(name: str) -> str:
    """Return where the RL trainer has a name of the SFT trainer."""
    if name == "strategy":
        return "trainer.strategy"
    return f"trainer.policy.{name}" if name.partition(".")[0] in _POLICY else name


def _hand_on_to_megatron(draft: Draft) -> None:
    """Let Megatron's own rules read the policy, if Megatron trains it."""
    strategy = draft.get("skyrl.strategy")
    if strategy is None or strategy.value != "megatron":
        return
    embedded.share(draft)
    embedded.hand_on_all(draft, f"{_ENGINE}.transformer_config_kwargs", "model")
    embedded.hand_on_all(draft, f"{_ENGINE}.optimizer_config_kwargs", "optimizer")
    embedded.hand_on_all(draft, f"{_ENGINE}.ddp_config", "ddp")
    parallel = draft.get("tensor_model_parallel_size")
    if parallel is not None and isinstance(parallel.value, int):
        embedded.give(draft, {"sequence_parallel": parallel.value > 1}, parallel)
    elif not draft.is_open("tensor_model_parallel_size"):
        embedded.give(draft, {"sequence_parallel": False}, strategy)
    checkpointing = draft.get("skyrl.gradient_checkpointing")
    if checkpointing is not None and checkpointing.value is False:
        names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        embedded.give(draft, dict.fromkeys(names), checkpointing)
    embedded.model_may_set(draft)
