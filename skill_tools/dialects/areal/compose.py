# SPDX-License-Identifier: Apache-2.0
"""Reads AReaL's YAML with Hydra's overrides, as OmegaConf merges both into the dataclasses.

Hydra composes the file itself, so an override without a plus changes only fields that stand in the file;
the dataclasses come after it. They are closed and typed: a name missing in a section's class ends the run, and so does
null for a required value. Names at the top may be those of a class that somebody derived.
"""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config, Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.entries import Entries
from skill_tools.configs.hydra import Override, looks_like_override, parse_override
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import command_line, training_command, write_environment
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import single_document
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import OMEGACONF
from skill_tools.dialects.areal import AREAL
from skill_tools.errors import UnusableInput

ROLES = ("actor", "critic", "ref", "teacher")
_OVERRIDES = "<overrides>"
_REFUSED = "areal-override-refused"
_ENGINE = re.compile(r"(fsdp|megatron|archon)\s*[:\[(]")


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, each a command line of its own."""
    draft = Draft(AREAL)
    draft.complete = True
    entries = Entries()
    for source in sources:
        draft.take(source)
        match source.kind:
            case Kind.SHELL:
                _read_script(draft, entries, source)
            case Kind.YAML:
                entries.write_tree(single_document(source, OMEGACONF, draft=draft), source.name)
            case _:
                raise source.refused(
                    expected="a YAML configuration of AReaL, or the script that runs it",
                    attempt="the file after --config",
                )
    for text in overrides:
        _override(draft, entries, command_line(text, _OVERRIDES), _OVERRIDES)
    _write(draft, entries)
    _say_what_follows(draft, entries)
    return draft.finish()


def _read_script(draft: Draft, entries: Entries, source: Source) -> None:
    """Read a script's configuration, if it is there, then its overrides."""
    command = training_command(source, draft.accepts)
    write_environment(draft, command, source.name)
    words = command.words
    named = next((words[at + 1] for at, word in enumerate(words[:-1]) if word.text == "--config"), None)
    folders = [source.folder, *list(source.folder.resolve().parents)[:6]] if source.folder else []
    found = find(named.text, folders) if named is not None and named.resolved else None
    if found is not None:
        draft.take(found)
        entries.write_tree(single_document(found, OMEGACONF, draft=draft), found.name)
    else:
        if named is not None:
            place = Place(source.name, named.line, named.column)
            draft.missing_files.append(Setting("config", named.text, "--config", place))
        draft.may_be_set()
    _override(draft, entries, words, source.name)


def _override(draft: Draft, entries: Entries, words: Sequence[Argument], file: str) -> None:
    """Lay the overrides among `words` over the file's values; note Hydra's refusals."""
    is_open = not draft.sources or bool(draft.missing_files)
    for word in words:
        if not looks_like_override(word.text) or word.text.startswith("-"):
            continue
        place, bare = Place(file, word.line, word.column), word.text.lstrip("+~")
        given = Override(word.text[: len(word.text) - len(bare)], bare.partition("=")[0], UNREADABLE)
        if word.resolved and word.certain:
            try:
                given = parse_override(word.text)
            except UnusableInput as error:
                draft.faults.append(Fault(_REFUSED, f"{word.text}: expected {error.expected}", place))
                continue
        refused = entries.override(given, given.value, place, is_open=is_open or not word.certain)
        if refused and word.resolved:
            draft.faults.append(Fault(_REFUSED, refused, place))


def _write(draft: Draft, entries: Entries) -> None:
    """Write the merged values into the draft, and note the names that no class has."""
    for loser in entries.lost:
        draft.shadow(loser.written, loser.value, loser.place)
    unknown: set[str] = set()
    for path, place in sorted(entries.sections.items()):
        if not path.startswith(tuple(f"{each}." for each in unknown)) and _is_no_field(draft, path):
            unknown.add(path)
            draft.note_unknown(path, place)
    for path, entry in entries:
        if path.startswith(tuple(f"{each}." for each in unknown)):
            continue
        if _is_no_field(draft, path):
            draft.note_unknown(path, entry.place)
            continue
        value = UNREADABLE if entry.value == "???" else entries.resolved(entry.value)
        key = draft.key(path)
        draft.set_key(draft.canonical(path), value, entry.written, entry.place)
        if value is None and key is not None and key.default.get(AREAL) is not None:
            draft.refuse_type(key.name, "a value, not null")


def _is_no_field(draft: Draft, path: str) -> bool:
    """Return whether the class of the section that a name stands in lacks it."""
    if draft.accepts(path):
        return False
    section = path.rpartition(".")[0]
    return section in load_vocabulary(AREAL).names if section else "offload" in path


def _say_what_follows(draft: Draft, entries: Entries) -> None:
    """Give the kind of run and the engine of each role keys of their own."""
    start = next(iter(entries.top().values()), Place(next(iter(draft.sources), _OVERRIDES), 1, 1))
    top = entries.top().keys()
    if draft.sources and not draft.missing_files:
        kind = "ppo" if top & {"rollout", "gconfig"} else "dpo" if "ref" in top else "train"
        draft.set_key("areal.kind", kind, "the sections of the file", start)
    shared = draft.get("areal.allocation_mode")
    for role in ROLES:
        stated = draft.get(f"areal.{role}.backend") or shared
        engine = _ENGINE.search(str(stated.value)) if stated is not None else None
        if stated is not None and engine is not None:
            draft.set_key(f"areal.{role}.engine", engine[1], stated.written, stated.place)
        else:
            draft.keys_may_be_set((f"areal.{role}.engine",))
