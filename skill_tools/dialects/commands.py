# SPDX-License-Identifier: Apache-2.0
"""Reads the command that starts a program with argparse options.

`NAME.program` is the script or module, without its suffix. In programs with --config_file, the named TOML fills in
options missing in the command. Its sections are flattened one level, and an unknown name is silently dropped. Apart
because several dialects read their commands with it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from skill_tools import knowledge
from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import (
    Flag,
    command_line,
    flags,
    program_end,
    training_command,
    write_environment,
)
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import Node, plain

_OVERRIDES = "<overrides>"


def compose(name: str, sources: Sequence[Source], overrides: Sequence[str], *, programs: str = "") -> Config:
    """Read `sources` in order, then `overrides`, each a string of options, for the dialect called `name`.

    `programs` is a pattern of a program's word, where a script among the options' values could be taken
    for it.
    """
    draft = Draft(name)
    draft.complete = True
    folders = [source.folder for source in sources if source.folder is not None]
    for source in sources:
        draft.take(source)
        match source.kind:
            case Kind.SHELL:
                _write_script(draft, source, folders, programs)
            case Kind.TOML:
                _write_toml(draft, single_document(source), source.name)
                draft.keys_may_be_set((f"{_section(name)}.program",))
            case _:
                raise source.refused(
                    expected=f"a script that starts a program of {name}, or the file of its --config_file",
                    attempt="the script that starts the program",
                )
    for text in overrides:
        _write_flags(draft, flags(command_line(text, _OVERRIDES), _OVERRIDES))
    return draft.finish()


def _section(name: str) -> str:
    return name.partition("-")[0]


def _write_script(draft: Draft, source: Source, folders: Sequence[Path], programs: str) -> None:
    def is_program(word: str) -> bool:
        return bool(programs) and re.search(programs, word) is not None

    command = training_command(source, lambda word: draft.accepts(word) or is_program(word), whole=True)
    write_environment(draft, command, source.name)
    named = (at for at, word in enumerate(command.words, 1) if is_program(word.text))
    end = next(named, program_end(command))
    if end:
        _write_program(draft, command.words[end - 1], source.name)
    given = list(flags(command.words[end:], source.name))
    for flag in given:
        if full_name(draft, flag.name) == "--config_file" and flag.values:
            _follow(draft, flag, folders)
    _write_flags(draft, given)


def _write_program(draft: Draft, word: Argument, file: str) -> None:
    """Write the script's or module's own name: `src/musubi_tuner/wan_train.py` and `musubi_tuner.wan_train` are one."""
    path = word.text.removesuffix(".py").rpartition("/")[2]
    value = path.rpartition(".")[2] if word.resolved else UNREADABLE
    draft.set_key(
        f"{_section(draft.framework)}.program", value, word.text, Place(file, word.line, word.column)
    )


def _follow(draft: Draft, flag: Flag, folders: Sequence[Path]) -> None:
    """Write the TOML that --config_file names; without it any option may be set."""
    path = flag.values[0] if flag.values[0].endswith(".toml") else f"{flag.values[0]}.toml"
    found = find(path, folders) if flag.known else None
    if found is None:
        draft.missing_files.append(Setting("config_file", path, flag.written, flag.place))
        draft.may_be_set("--")
        return
    draft.take(found)
    _write_toml(draft, single_document(found), found.name)


def _write_toml(draft: Draft, root: Node, file: str) -> None:
    for name, node in entries_of(root).items():
        section = entries_of(node).items() if isinstance(node.value, dict) else [(name, node)]
        for option, value in section:
            spelling, place = f"--{option}", Place(file, value.line, value.column)
            if draft.accepts(spelling):
                key = draft.key(spelling)
                draft.set_key(key.name if key else spelling, plain(value), option, place)
            else:
                draft.note_unknown(option, place, spelling=spelling)


def _write_flags(draft: Draft, given: Iterable[Flag]) -> None:
    for flag in given:
        spelling = full_name(draft, flag.name)
        if not draft.accepts(spelling) or _is_of_others(draft, spelling):
            if "$" not in flag.name:
                nearest = _with_section(draft, flag.name) or None
                draft.note_unknown(flag.name, flag.place, spelling=spelling, nearest=nearest)
            continue
        key = draft.key(spelling)
        value: object = flag.values[0] if len(flag.values) == 1 else list(flag.values)
        if not flag.known:
            value = UNREADABLE
        elif not flag.values:
            value = True
        draft.set_key(key.name if key else spelling, value, flag.name, flag.place)


def full_name(draft: Draft, flag: str) -> str:
    """Return the full name of an option: argparse accepts any unique abbreviation."""
    if draft.accepts(flag):
        return flag
    names = (name for name in load_vocabulary(draft.framework).names if name.startswith(flag))
    longer = [name for name in names if not _is_of_others(draft, name)]
    return longer[0] if len(longer) == 1 else flag


def _with_section(draft: Draft, flag: str) -> tuple[str, ...]:
    """Return the options that are `flag` below a section, or with dots for underscores, as earlier releases had it."""
    own = flag.removeprefix("--")
    names = [name for name in load_vocabulary(draft.framework).names if "." in name]
    dotted = (name for name in names if name.endswith(f".{own}") or name[2:].replace(".", "_") == own)
    return tuple(dotted)[:3]


def _is_of_others(draft: Draft, option: str) -> bool:
    """Return whether an option belongs to other programs than the running one, as far as known."""
    setting = draft.get(f"{_section(draft.framework)}.program")
    having = _programs_of(draft.framework)
    if setting is None or option not in having or setting.value not in having[""]:
        return False
    return setting.value not in having[option]


@knowledge.derived
def _programs_of(name: str) -> Mapping[str, frozenset[str]]:
    """Return the programs of each option that not all have; under an empty name, all programs."""
    lines = knowledge.names(f"{name.replace('-', '_')}_programs")
    having = {option: frozenset(programs) for option, *programs in map(str.split, lines)}
    return {**having, "": frozenset().union(*having.values())}
