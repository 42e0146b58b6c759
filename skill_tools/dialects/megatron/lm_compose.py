# SPDX-License-Identifier: Apache-2.0
"""Reads Megatron-LM's inputs: launch scripts and argument strings, test and recipe YAML, `--yaml-cfg` files.

All of them come down to flags with values. The effect of `arguments.py` on the flags, as far as rules see it, is
done here too: a positive number of offloaded layers turns the offload on, for example.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.files import MAX_BYTES, read_bytes
from skill_tools.configs.folder import above
from skill_tools.configs.shell.command import Command
from skill_tools.configs.shell.launch import (
    Flag,
    command_line,
    flags,
    program_end,
    training_command,
    write_environment,
)
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import FULL, entries_of, single_document
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.megatron import LM

_YAML_CFG_SECTIONS = ("language_model", "model_parallel")
_OVERRIDES = "<overrides>"
# The programs without arguments of their own beside those of `_PARSER`, or with known ones only.
_PROGRAMS = re.compile(r"(?:pretrain_(?:gpt|bert|t5|ict|mamba|hybrid|retro|vlm|vision_\w+)|train_rl)\.py")
_PARSER = "megatron/training/arguments.py"
_OF_A_FORK = 3  # flags that are not Megatron-LM's
_LIKENESS = 0.88
_OFF = ("false", "0", "no", "off", "none")


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides` (each a string of arguments), into one configuration."""
    draft = Draft(LM)
    draft.complete = True
    for source in sources:
        draft.take(source)
        _write_source(draft, source)
    for text in overrides:
        _write_flags(draft, flags(command_line(text, _OVERRIDES), _OVERRIDES))
    _settle(draft)
    return draft.finish()


def _write_source(draft: Draft, source: Source) -> None:
    match source.kind:
        case Kind.SHELL:
            command = training_command(source, draft.accepts, whole=True)
            if not command.words or command.words[0].text.startswith(
                "-"
            ):  # for another script, which sources it
                draft.environment_may_be_set()
            write_environment(draft, command, source.name)
            words = command.words[program_end(command) :]
            is_own = _is_own(command, source.text)
            if not is_own:
                draft.may_be_set()
            draft.checks_each = True
            _write_flags(draft, flags(words, source.name), is_closed=is_own, folder=source.folder)
        case Kind.YAML | Kind.JSON:
            _write_yaml(draft, single_document(source, FULL, draft=draft), source.name)
        case Kind.PYTHON:
            raise source.refused(
                expected="a launch script, arguments or YAML of Megatron-LM",
                attempt="the script that starts the training",
            )


def _is_own(command: Command, text: str) -> bool:
    """Return whether a command runs a program of Megatron-LM itself, by its name, or is arguments alone.

    Other programs have flags of their own, and set some of Megatron-LM's themselves.
    """
    end = program_end(command)
    program = command.words[end - 1].text.rpartition("/")[2] if end else ""
    is_named = bool(_PROGRAMS.fullmatch(program)) if end else text.lstrip().startswith("--")
    return is_named and "deepspeed" not in text


def _write_flags(
    draft: Draft, given: Iterable[Flag], *, is_closed: bool = True, folder: Path | None = None
) -> None:
    """Write flags; `is_closed` says that the program adds none of its own to Megatron-LM's.

    A fork may: where its code is a checkout around `folder`, it is asked. Otherwise several flags unlike any of
    Megatron-LM's are a fork's own (MindSpeed's `--swap-attention`).
    """
    unknown: list[Flag] = []
    for flag in given:
        if flag.name in draft.table.by_negative:
            key = draft.table.by_negative[flag.name]
            draft.set_key(key.name, False if flag.known else UNREADABLE, flag.written, flag.place)
            refuse_left_over(draft, key.name, flag, "bool")
        elif draft.accepts(flag.name):
            _write_flag(draft, flag)
        elif (is_closed or "offload" in flag.name) and f'"{flag.name}"' not in _parser_above(folder):
            unknown.append(flag)
    for flag in unknown:
        if len(unknown) < _OF_A_FORK or is_slip(flag.name, load_vocabulary(LM).names):
            draft.note_unknown(flag.written, flag.place)


def is_slip(name: str, names: frozenset[str]) -> bool:
    """Return whether a flag is nearly one of `names`, and so no other program's."""
    from difflib import get_close_matches

    is_part = any(known.startswith(name) for known in names) or name.replace("--", "--no-", 1) in names
    return is_part or bool(get_close_matches(name, names, n=1, cutoff=_LIKENESS))


def _parser_above(folder: Path | None) -> str:
    """Return the text of the parser in the checkout around `folder`, with double quotes only; empty without one."""
    path = above(folder, _PARSER)
    if path is None:
        return ""
    return read_bytes(path, MAX_BYTES, expected="a program text").decode("utf-8", "replace").replace("'", '"')


def _write_flag(draft: Draft, flag: Flag) -> None:
    key = draft.table.find(LM, flag.name)
    kind = key.type_in(LM) if key else "any"
    name = draft.canonical(flag.name)
    draft.set_key(name, taken(flag, kind), flag.written, flag.place)
    if kind != "list" or flag.joined:
        refuse_left_over(draft, name, flag, kind)


def taken(flag: Flag, kind: str) -> object:
    """Return argparse's value for a flag with a key of `kind`: one word, or all for a list."""
    is_bare = kind == "bool" and flag.more and not flag.joined
    if not (flag.known or is_bare) or (kind == "list" and flag.more) or _is_to_fill_in(flag):
        return UNREADABLE
    if kind == "bool" or not flag.values:
        return True
    return list(flag.values) if kind == "list" or (kind == "any" and len(flag.values) > 1) else flag.values[0]


def _is_to_fill_in(flag: Flag) -> bool:
    """Return whether the words of a flag are a placeholder: `your model path`."""
    return len(flag.values) > 1 and flag.values[0].lower() == "your"


def refuse_left_over(draft: Draft, name: str, flag: Flag, kind: str) -> None:
    """Note the words that argparse does not take for a flag; a switch is plainly meant, unless one says off."""
    is_switch = kind == "bool"
    values = flag.values[not is_switch :]
    if values and flag.known and kind != "any" and not _is_to_fill_in(flag):
        form = "a bare switch" if is_switch else "one word"
        is_known = is_switch and values[0].lower() not in _OFF
        draft.refuse_type(name, f"{form}: {values[0][:40]!r} is left over", is_known=is_known)


def _write_yaml(draft: Draft, root: Node, file: str) -> None:
    """Write one of the YAML forms: flags under MODEL_ARGS, fields under ARGS, or fields and sections at the top."""
    entries = entries_of(root)
    for name, node in entries_of(entries.get("ENV_VARS")).items():
        value = UNREADABLE if "${" in (node.text or "") else node.text
        draft.set_environment(name, value, Place(file, node.line, node.column))
    named = [item for item in entries_of(entries.get("MODEL_ARGS")).items() if item[0].startswith("--")]
    named += entries_of(entries.get("ARGS")).items()
    for name, node in named:
        for loser in node.shadowed:
            draft.shadow(_flag_name(name), loser.value, Place(file, loser.line, loser.column))
    _write_flags(draft, (flag for name, node in named for flag in _entry(name, node, file)))
    if not entries.keys() & {"MODEL_ARGS", "ARGS", "ENV_VARS"}:
        _write_fields(draft, entries, file)


def _entry(name: str, node: Node, file: str) -> Iterator[Flag]:
    """Read `--num-layers: 4` or `num_layers: 4`; true is a switch, and false or null an absent flag."""
    if node.value is False or node.value is None:
        return
    values = [item.text or "" for item in node.value] if isinstance(node.value, list) else [node.text or ""]
    if node.value is True:
        values = []
    elif node.text is not None and node.text.startswith("[") and node.text.endswith("]"):
        values = node.text[1:-1].replace(",", " ").split()
    known = not any("${" in value for value in values)
    yield Flag(_flag_name(name), tuple(values), name, Place(file, node.line, node.column), known)


def _flag_name(name: str) -> str:
    return name if name.startswith("--") else f"--{name.replace('_', '-')}"


def _write_fields(draft: Draft, entries: dict[str, Node], file: str) -> None:
    """Write fields by name: those of a flat recipe become flags, those of a `--yaml-cfg` file need not be any."""
    sections = [entries_of(entries[name]) for name in _YAML_CFG_SECTIONS if name in entries]
    if not sections:
        _write_flags(draft, (flag for name, node in entries.items() for flag in _entry(name, node, file)))
        return
    for name, node in [item for section in (entries, *sections) for item in section.items()]:
        if name in draft.table.by_name:
            draft.set_key(name, plain(node), name, Place(file, node.line, node.column))
        elif draft.accepts(_flag_name(name)):
            _write_flags(draft, _entry(name, node, file))


def _settle(draft: Draft) -> None:
    """Follow `arguments.py` after parsing, for values read by rules."""
    _derive(
        draft,
        "cpu_offloading_num_layers",
        lambda layers: isinstance(layers, int) and layers > 0,
        "cpu_offloading",
        True,
    )
    _derive(draft, "recompute_activations", bool, "recompute_granularity", "selective")
    main_grads = draft.get("main_grads_dtype")
    if "grad_reduce_in_fp32" not in draft and (main_grads is None or main_grads.value == "fp32"):
        _derive(draft, "bf16", bool, "grad_reduce_in_fp32", True)


def _derive(draft: Draft, source: str, holds: Callable[[object], bool], key: str, value: object) -> None:
    """Give `key` its value if that of `source` implies one; leave it open if `source` is open."""
    setting = draft.get(source)
    if setting is not None and holds(setting.value):
        draft.set_key(key, value, setting.written, setting.place)
    elif draft.is_open(source):
        draft.leave_open(key)
