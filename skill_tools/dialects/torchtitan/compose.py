# SPDX-License-Identifier: Apache-2.0
"""Reads torchtitan's TOML and the options of its command line, which win over it.

Facts from `torchtitan/config/manager.py::ConfigManager`: an option is `--section.field value`, a switch is
`--section.field` or `--section.no_field`, and `-` stands for `_` anywhere. A module of one's own may add fields.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument, Command
from skill_tools.configs.shell.launch import command_line, commands_of, write_environment
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import as_omegaconf, plain
from skill_tools.dialects.torchtitan import TORCHTITAN
from skill_tools.errors import UnusableInput
from skill_tools.nearest import nearest

_OVERRIDES = "<overrides>"
_FILE, _MODULE = "torchtitan.file", "torchtitan.module"
_CONFIG_OPTION = "job.config_file"
_OWN_FIELDS = frozenset({"custom_config_module", "custom_args_module"})
_PROGRAM = re.compile(r"torchtitan\.train$|torchtitan/train\.py$|run_train\.sh$|torchtitan.*train\.py$")
_OFFLOADS = ("training.enable_cpu_offload", "training.no_enable_cpu_offload")
_DTYPES = {"torchtitan.training.dtype", "torchtitan.training.mixed_precision_param"}
_OF_OPTIONS = ("bfloat16", "float32")  # float16, which the TOML may hold, is none of tyro's choices
_A_SLIP = 0.9
_SHAPES = {
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("llama4", "17bx16e"): "llama-4-scout",
    ("llama4", "17bx128e"): "llama-4-maverick",
}
_NAMED_BY_FLAVOR = ("llama3", "qwen3", "gpt_oss")


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`."""
    draft = Draft(TORCHTITAN, converts_text=False)
    draft.complete = True
    for source in sources:
        match source.kind:
            case Kind.TOML:
                _write_file(draft, source)
            case Kind.SHELL:
                _write_script(draft, source)
            case _:
                raise source.refused(
                    expected="a TOML of torchtitan up to 0.2.2, or a script that starts torchtitan.train",
                    attempt="the file that --job.config_file names; from 0.3 on, the script with --module and --config",
                )
    for text in overrides:
        _write_options(draft, command_line(text, _OVERRIDES), _OVERRIDES)
    draft.take_by_truth()
    draft.model_name = _model_name(draft)
    return draft.finish()


def _write_file(draft: Draft, source: Source) -> None:
    """Write a TOML; where a module adds fields of its own, no name is unknown."""
    draft.take(source)
    root = single_document(source)
    draft.set_key(_FILE, source.name, _FILE, Place(source.name, 1, 1))
    sections = (entries_of(entries_of(root).get(name)) for name in ("job", "experimental"))
    extended = any(section.keys() & _OWN_FIELDS for section in sections)
    write_tree(draft, root, source.name, report_unknown=not extended)


def _write_script(draft: Draft, source: Source) -> None:
    """Write a launch script: its TOML if that is there, then its options."""
    draft.take(source)
    command = next((each for each in commands_of(source) if _starts(each)), None)
    if command is None:
        raise UnusableInput(
            f"{source.name} starts no torchtitan",
            expected="a script with torchtitan.train or run_train.sh",
            attempt="the TOML itself",
        )
    write_environment(draft, command, source.name)
    folders = [source.folder] if source.folder else []
    _follow(draft, _named_file(command), folders)
    _write_options(draft, command.words, source.name)


def _starts(command: Command) -> bool:
    return any(
        _PROGRAM.search(word.text) or word.text.replace("-", "_").startswith(f"__{_CONFIG_OPTION}")
        for word in command.words
    )


def _named_file(command: Command) -> Argument | None:
    """Return the TOML that the command names: by its option, or through the variable of run_train.sh."""
    for position, word in enumerate(command.words):
        name, equals, value = word.text.partition("=")
        if name.replace("-", "_") == f"__{_CONFIG_OPTION}":
            following = command.words[position + 1] if position + 1 < len(command.words) else None
            return word._replace(text=value) if equals else following
    return command.environment.get("CONFIG_FILE")


def _follow(draft: Draft, named: Argument | None, folders: Sequence[Path]) -> None:
    """Write the file that `named` is the path of; without it, values beyond options are unknown."""
    found = find(named.text, folders) if named is not None and named.resolved else None
    if found is None:
        draft.complete = False
    else:
        _write_file(draft, found)


def _write_options(draft: Draft, words: Sequence[Argument], file: str) -> None:
    for position, word in enumerate(words):
        if not word.text.startswith("--"):
            continue
        name, equals, text = word.text.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        following = words[position + 1] if position + 1 < len(words) else None
        takes = not equals and following is not None and not following.text.startswith("--")
        known = (
            word.resolved and word.certain and (not takes or (following is not None and following.resolved))
        )
        given = following.text if takes and following is not None else text if equals else None
        value = given if known else UNREADABLE
        place = Place(file, word.line, word.column)
        if name == "module":
            draft.complete = False
            draft.set_key(_MODULE, value, word.text, place)
        elif "." in name and name != _CONFIG_OPTION:
            _write_option(draft, name, value, word.text.partition("=")[0], place)


def _write_option(draft: Draft, name: str, text: object, written: str, place: Place) -> None:
    """Write `section.field`; a name that is neither a field nor a field's `no_` belongs to a model or is misspelt.

    `text` is the option's value, None where it has none.
    """
    section, _, field = name.rpartition(".")
    positive = f"{section}.{field.removeprefix('no_')}"
    is_off = not draft.accepts(name) and draft.accepts(positive)
    spelling = positive if is_off else name
    if draft.accepts(spelling):
        key = draft.key(spelling)
        canonical = draft.canonical(spelling)
        kind = key.type_in(TORCHTITAN) if key is not None else "any"
        draft.checks_each = _is_checked(draft.get(canonical), kind)
        draft.set_key(canonical, _value(kind, text, is_on=not is_off), written, place)
        if expected := _refusal(kind, text, canonical):
            draft.refuse_type(canonical, expected)
    elif "offload" in field or nearest(spelling, _OFFLOADS, likeness=_A_SLIP):
        draft.note_unknown(written, place)


def _is_checked(earlier: Setting | None, kind: str) -> bool:
    """Return whether an option that stood earlier has to fit: tyro converts only the last number."""
    if earlier is None or not earlier.written.startswith("--"):
        return False
    return kind not in ("int", "float") or isinstance(earlier.value, bool)


def _value(kind: str, text: object, *, is_on: bool) -> object:
    """Return tyro's value of an option's text for a field of a type; text that it refuses stays text."""
    if text is None:
        return is_on
    if not isinstance(text, str) or kind == "str":
        return text
    if kind in ("int", "float"):
        with suppress(ValueError):
            return int(text) if kind == "int" else float(text)
        return text
    if kind == "bool":
        return text
    from skill_tools.configs.yaml_events import parse

    documents = parse(text, _OVERRIDES)
    return plain(as_omegaconf(documents[0])) if len(documents) == 1 else text


def _refusal(kind: str, text: object, key: str) -> str | None:
    """Return tyro's expectation: a switch takes no value, and anything else needs one, of its choices."""
    if key in _DTYPES and isinstance(text, str) and text not in _OF_OPTIONS:
        return " or ".join(_OF_OPTIONS)
    if kind == "bool" and isinstance(text, str):
        return "--section.field or --section.no_field, which take no value"
    return "a value after it" if kind in ("int", "float", "str") and text is None else None


def _model_name(draft: Draft) -> str | None:
    """Return the published model that name and flavor stand for, if it is one."""
    name, flavor = draft.get("torchtitan.model.name"), draft.get("torchtitan.model.flavor")
    if name is None or flavor is None:
        return None
    known = _SHAPES.get((str(name.value), str(flavor.value)))
    return known or (f"{name.value}-{flavor.value}" if name.value in _NAMED_BY_FLAVOR else None)
