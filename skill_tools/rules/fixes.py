# SPDX-License-Identifier: Apache-2.0
"""Turns a rule's fix into new text for the user's file, or into words where the text cannot be edited.

YAML and JSON files (`yaml_edit`) and launch scripts (`script_edit`) are edited in place; overrides, TOML and Python
get a suggestion in the dialect's own spelling. Choices are never made here: a manual fix has no edit.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.keys import Key
from skill_tools.dialects import registry
from skill_tools.rules.knowledge import RuleFix

Keys = Mapping[str, Key]


class _Step(NamedTuple):
    """One edit of one file, at `place` of its present text; `edit` answers None when it cannot be done."""

    place: Place
    edit: Callable[[str], str | None]


def repaired(config: Config, fix: RuleFix, keys: Keys) -> dict[str, str]:
    """Return the new text of each file that `fix` changes; empty when it cannot be done by editing text."""
    steps = _steps(config, fix, keys)
    files = {step.place.file for step in steps}
    if not steps or not all(_is_editable(file) and file in config.sources for file in files):
        return {}
    texts = {file: config.sources[file] for file in files}
    # From the end to the beginning: the places of later edits stay valid.
    for step in sorted(steps, key=lambda step: (step.place.line, step.place.column), reverse=True):
        edited = step.edit(texts[step.place.file])
        if edited is None:
            return {}
        texts[step.place.file] = edited
    return texts


def diff(config: Config, fix: RuleFix, keys: Keys) -> str:
    """Return the changes of `fix`: a unified diff, or where no file can be edited the settings."""
    if fix.applicability == "manual":
        return ""
    texts = repaired(config, fix, keys)
    if not texts:
        return settings(config, fix, keys)
    return "".join(unified_diff(file, config.sources[file], text) for file, text in texts.items())


def unified_diff(file: str, before: str, after: str) -> str:
    """Return the unified diff of one file, empty when nothing changed."""
    import difflib

    name = file.lstrip("/")
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _is_editable(file: str) -> bool:
    return _is_yaml(file) or _is_script(file) or PurePath(file).suffix == ".json"


def _is_script(file: str) -> bool:
    return PurePath(file).suffix in {".sh", ".bash", ".slurm", ".sbatch"}


def _is_yaml(file: str) -> bool:
    return PurePath(file).suffix in {".yaml", ".yml"}


def _steps(config: Config, fix: RuleFix, keys: Keys) -> list[_Step]:
    """Return every edit that `fix` needs; empty when one of its keys has no place in any input."""
    steps: list[_Step] = []
    sections: dict[tuple[str, str], _Addition] = {}  # new ones of a JSON, by their neighbour and their name
    for key, value in fix.set.items():
        if key in config.settings:
            steps.append(_set_step(config, key, value))
            continue
        addition = _addition(config, keys[key], value)
        if addition is None:
            return []
        if isinstance(addition, _Step):
            steps.append(addition)
            continue
        place = (addition.sibling.key, addition.name)
        sections[place] = _joined(sections[place], addition) if place in sections else addition
    steps += [
        _Step(each.sibling.place, partial(_add, sibling=each.sibling, name=each.name, value=each.value))
        for each in sections.values()
    ]
    for setting in _to_remove(config, fix):
        steps.append(_Step(setting.place, partial(_remove, setting=setting)))
    return steps


def _to_remove(config: Config, fix: RuleFix) -> list[Setting]:
    """Return the settings to remove, with overridden ones: else an older value comes back."""
    return [
        setting for setting in (*config.settings.values(), *config.overridden) if setting.key in fix.remove
    ]


def _set_step(config: Config, key: str, value: object) -> _Step:
    setting = config.settings[key]
    return _Step(setting.place, partial(_set, setting=setting, value=value))


class _Addition(NamedTuple):
    """A new entry: its neighbour, its name, and its value, a mapping where the section is new too."""

    sibling: Setting
    name: str
    value: object


def _joined(one: _Addition, other: _Addition) -> _Addition:
    """Return two entries of one new section as one."""
    return one._replace(value=_both(one.value, other.value))


def _both(one: object, other: object) -> object:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return {
        **one,
        **{name: _both(one[name], value) if name in one else value for name, value in other.items()},
    }


def _addition(config: Config, key: Key, value: object) -> _Addition | _Step | None:
    """Return a new key beside the last setting of its section, or the edit that appends it to the first YAML file.

    In a JSON a section that is not there yet goes beside the file's entries of the section around it.
    """
    spelling = spelled(config, key)
    if spelling is None:
        return None
    section, _, name = spelling.rpartition(".")
    whole, owner = value, config.owner(key.name)
    while True:
        siblings = [
            setting
            for setting in config.settings.values()
            if _is_editable(setting.place.file)
            and config.owner(setting.key) == owner
            and setting.written.rpartition(".")[0] == section
            and setting.written.startswith("--") is name.startswith("--")
            and (whole is value or setting.place.file.endswith(".json"))
        ]
        if siblings:
            last = max(siblings, key=lambda setting: (setting.place.line, setting.place.column))
            return _Addition(last, name, whole)
        if not section:
            break
        section, _, outer = section.rpartition(".")
        name, whole = outer, {name: whole}
    file = next((file for file in config.sources if _is_yaml(file)), None)
    if owner in config.embeds or file is None or not registry.named(config.framework).takes_new_keys:
        return None
    return _Step(Place(file, 10**9, 1), partial(_append, path=tuple(spelling.split(".")), value=value))


def spelled(config: Config, key: Key) -> str | None:
    """Return how the input spells `key`: an embedded dialect's as the file does that holds the rest of its section."""
    owner = config.owner(key.name)
    if owner not in config.embeds:
        return key.spelling.get(config.framework)
    beside = next((each for each in config.settings.values() if each.key.startswith(f"{owner}.")), None)
    prefix = beside.key.removesuffix(beside.written) if beside else ""
    return key.name.removeprefix(prefix)


def _set(text: str, *, setting: Setting, value: object) -> str | None:
    from skill_tools.rules import script_edit, yaml_edit

    if _is_script(setting.place.file):
        switched_on = value is True and setting.value is False  # by a flag of another name, such as --no-x
        return None if switched_on else script_edit.set_flag(text, setting.place, setting.written, value)

    pair = yaml_edit.find_pair(text, line=setting.place.line, name=setting.written)
    return None if pair is None else yaml_edit.set_value(text, pair, value)


def _add(text: str, *, sibling: Setting, name: str, value: object) -> str | None:
    from skill_tools.rules import script_edit, yaml_edit

    if _is_script(sibling.place.file):
        return script_edit.add_flag(text, sibling.place, sibling.written, name, value)

    pair = yaml_edit.find_pair(text, line=sibling.place.line, name=sibling.written)
    return None if pair is None else yaml_edit.add_sibling(text, pair, name, value)


def _append(text: str, *, path: tuple[str, ...], value: object) -> str | None:
    from skill_tools.rules import yaml_edit

    return yaml_edit.add_at_end(text, path, value)


def _remove(text: str, *, setting: Setting) -> str | None:
    from skill_tools.rules import script_edit, yaml_edit

    if _is_script(setting.place.file):
        return script_edit.remove_flag(text, setting.place, setting.written)

    pair = yaml_edit.find_pair(text, line=setting.place.line, name=setting.written)
    return None if pair is None else yaml_edit.remove(text, pair)


def settings(config: Config, fix: RuleFix, keys: Keys) -> str:
    """Return the settings to take out and to put in, one a line, as the dialect writes them."""
    gone = [config.settings[key] for key in (*fix.set, *fix.remove) if key in config.settings]
    lines = [f"-{spell(config.framework, setting.written, setting.value)}" for setting in gone]
    for key, value in fix.set.items():
        spelling = spelled(config, keys[key])
        if spelling is not None and not (spelling.startswith("--") and value is False):
            lines.append(f"+{_added(config, key, spelling, value)}")
    return "".join(f"{line}\n" for line in lines)


def _added(config: Config, key: str, spelling: str, value: object) -> str:
    """Write a setting that is new in the input; in a file of an embedded dialect it is one of that file."""
    dialect, owner = registry.named(config.framework), config.owner(key)
    in_own_file = owner in config.embeds and any(
        _is_yaml(each.place.file) and config.owner(each.key) == owner for each in config.settings.values()
    )
    if dialect.scripts and not in_own_file:
        from skill_tools.dialects.patch import script_of

        if script_of(config) in dialect.scripts:
            return dialect.in_form({spelling: value}, config)
    return spell(config.framework, spelling, value)


def spell(framework: str, written: str, value: object) -> str:
    """Write one setting as a script (`--flag value`), an override (`a.b=c`) or a file (`a: b`) has it."""
    if written.startswith("--"):
        items = value if isinstance(value, list) else [value]
        words = [] if isinstance(value, bool) else [str(item) for item in items]
        return " ".join([written, *words])
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"{written}{registry.named(framework).assigns}{text}"
