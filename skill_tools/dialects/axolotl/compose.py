# SPDX-License-Identifier: Apache-2.0
"""Reads Axolotl's YAML, the DeepSpeed JSON that it names, and the options of its command line.

The DeepSpeed section is read as `deepspeed.*` keys whether it stands in the YAML or in a file
(`dialects/deepspeed/section.py`). The JSON files that Axolotl itself ships are known facts (`keys.yaml`, `deepspeed`);
any other missing file leaves the section open.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from skill_tools.configs.config import Config, Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.releases import is_before
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import command_line, training_command, write_environment
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import plain
from skill_tools.dialects.axolotl import AXOLOTL
from skill_tools.dialects.axolotl.options import Read, read, value_at
from skill_tools.dialects.deepspeed import DEEPSPEED, EMBEDDED, section

_PRESETS = "deepspeed_configs/"
_OVERRIDES = "<overrides>"
_FSDP_TYPED = "0.13"  # before, fsdp_config was a dictionary of anything
_YAML = (".yml", ".yaml")
_NAMES_A_FILE = ("--cloud", "--sweep")
# Options of its commands beside the keys: the launch, the configurations, the amount of data to show.
_OF_COMMANDS = frozenset(
    {
        "launcher", "cloud", "sweep", "num_processes", "main_process_port", "debug", "debug_text_only",
        "debug_num_examples", "prompter", "shard", "download", "iterable",
    }
)  # fmt: skip


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, then the DeepSpeed file that the result names."""
    draft = Draft(AXOLOTL, embeds=EMBEDDED)
    draft.complete = True
    folders = [source.folder for source in sources if source.folder is not None]
    run = _Run(draft, sources)
    if run.release is not None and is_before(run.release, _FSDP_TYPED):
        draft.as_written = ("fsdp_config.",)
    for source in sources:
        draft.take(source)
        _write_source(run, source)
    run.is_overrides = True
    for text in overrides:
        words = command_line(text, _OVERRIDES)
        _write_settings(draft, [word for word in words if _is_setting(word)], _OVERRIDES)
        _write_options(run, [word for word in words if not _is_setting(word)], _OVERRIDES)
    _settle(draft, folders)
    return draft.finish()


class _Run:
    """A configuration in the making: the draft, the values of its file as the loader has them, and who reads options.

    `is_click`: options are `axolotl train`'s, else Fire's alone. `through_fire`: Fire reads their values.
    `is_overrides`: they are the user's own `--overrides`.
    """

    def __init__(self, draft: Draft, sources: Sequence[Source]) -> None:
        self.draft = draft
        self.file: dict[str, object] = {}
        self.is_click = self.through_fire = True
        self.is_overrides = False
        self._sources = sources

    @cached_property
    def release(self) -> str | None:
        """The release of Axolotl, where it is stated."""
        return next(filter(None, (source.release(AXOLOTL) for source in self._sources)), None)


def _write_source(run: _Run, source: Source) -> None:
    draft = run.draft
    match source.kind:
        case Kind.YAML:
            root = single_document(source, draft=draft)
            run.file |= {name: plain(node) for name, node in entries_of(root).items()}
            write_tree(draft, root, source.name, spell=_without_prefix)
        case Kind.JSON:
            _write_json(draft, source)
        case Kind.SHELL:
            _write_script(run, source)
        case Kind.PYTHON:
            raise source.refused(
                expected="a YAML configuration of Axolotl",
                attempt="the YAML file that `axolotl train` gets",
            )


def _write_json(draft: Draft, source: Source) -> None:
    """Write a JSON source: a DeepSpeed configuration, unless it is Axolotl's own in JSON."""
    root = single_document(source, draft=draft)
    if "base_model" in entries_of(root):
        write_tree(draft, root, source.name)
    else:
        section.write_file(draft, source)


def _is_setting(word: Argument) -> bool:
    return "=" in word.text and not word.text.startswith("-")


def _write_settings(draft: Draft, words: Sequence[Argument], file: str) -> None:
    """Write the user's own `x=y`, whose values are written as in the file."""
    for word in words:
        name, _, text = word.text.partition("=")
        place = Place(file, word.line, word.column)
        spelling = _without_prefix(name.replace("-", "_"))
        if draft.accepts(spelling):
            value = _scalar(text) if word.resolved and word.certain else UNREADABLE
            draft.set_key(draft.canonical(spelling), value, name, place)
        elif spelling not in _OF_COMMANDS:
            draft.note_unknown(name, place)


def _scalar(text: str) -> object:
    from skill_tools.configs.yaml_events import parse

    documents = parse(text, _OVERRIDES)
    return plain(documents[0]) if len(documents) == 1 else text


def _write_script(run: _Run, source: Source) -> None:
    """Write a launch script: its configuration, if that is there, then its options.

    Words before the program and after `--` are the launcher's.
    """
    draft = run.draft
    command = training_command(source, lambda word: word.endswith(_YAML))
    write_environment(draft, command, source.name)
    texts = [word.text for word in command.words]
    start = next((at + 1 for at, text in enumerate(texts) if Path(text).name == AXOLOTL), 0)
    end = texts.index("--", start) if "--" in texts[start:] else len(texts)
    words = command.words[start:end]
    configuration = _configuration(words)
    named = None
    if configuration is not None and configuration.resolved:
        named = find(configuration.text, [source.folder] if source.folder else [])
    if named is not None:
        _write_source(run, named)
        draft.sources[named.name] = named.text
    elif configuration is not None or not source.text.lstrip().startswith("--"):
        draft.may_be_set()  # by a missing file, or by the script's own arguments
    run.is_click = start > 0 or source.text.lstrip().startswith("--")
    run.is_overrides = start == 0 and run.is_click
    run.through_fire = _launched_by(words) != "python"
    _write_options(run, words, source.name)


def _launched_by(words: Sequence[Argument]) -> str:
    texts = [word.text for word in words]
    given = [text.partition("=")[2] for text in texts if text.startswith("--launcher=")]
    given += [after for text, after in pairwise(texts) if text == "--launcher"]
    return given[-1] if given else "accelerate"


def _configuration(words: Sequence[Argument]) -> Argument | None:
    """Return a command's YAML file: the first one that is no option's value."""
    before = (None, *(word.text for word in words))
    named = zip(before, words, strict=False)
    return next((word for option, word in named if _is_yaml(word) and option not in _NAMES_A_FILE), None)


def _is_yaml(word: Argument) -> bool:
    return word.text.endswith(_YAML) and not word.text.startswith("--")


def _write_options(run: _Run, words: Sequence[Argument], file: str) -> None:
    """Write `--fsdp-config.offload-params`, `--no-layer-offloading`, `--x=y`, `--x y`; a plain `x=y` is no option."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        option, equals, text = word.text.partition("=")
        place = Place(file, word.line, word.column)
        known = word.resolved and word.certain
        if not option.startswith("--") or len(option) < 3:
            if equals and option.isidentifier() and run.draft.accepts(option):
                _report(run, word.text, option, place)
            continue
        name = _name_of(run, option)
        if name is None:
            _report(run, option, option.removeprefix("--").replace("-", "_"), place)
        elif run.is_click and _is_flag(run.draft, name):
            given = Read(not option.startswith("--no-") if known else UNREADABLE)
            _write_value(run, name, given, option, place)
        elif equals or position < len(words):
            if not equals:
                text, known = words[position].text, known and words[position].resolved
                position += 1
            _write_value(run, name, _value_of(run, name, text) if known else Read(UNREADABLE), option, place)
        elif run.is_click:
            run.draft.set_key(run.draft.canonical(name), option, option, place)
            run.draft.refuse_type(run.draft.canonical(name), "a value after the option")
        else:
            _write_value(run, name, Read(True), option, place)


def _name_of(run: _Run, option: str) -> str | None:
    """Return an option's key, None if the command does not know it."""
    name = option.removeprefix("--")
    if run.is_click and ("_" in name or not name):
        return None
    name = name.replace("-", "_")
    if run.draft.accepts(name):
        return name
    bare = name.removeprefix("no_" if run.is_click else "no").removeprefix("_")
    is_off = bare != name and run.draft.accepts(bare)
    return bare if is_off and (_is_flag(run.draft, bare) or not run.is_click) else None


def _is_flag(draft: Draft, name: str) -> bool:
    key = draft.key(name)
    return key is not None and key.type_in(AXOLOTL) == "bool"


def _value_of(run: _Run, name: str, text: str) -> Read:
    return read(text, value_at(run.file, name), run.release, through_fire=run.through_fire)


def _write_value(run: _Run, name: str, given: Read, option: str, place: Place) -> None:
    run.draft.set_key(run.draft.canonical(name), given.value, option, place)
    if given.by_release:
        run.draft.faults.append(Fault("ax-option-over-bool", f"{option} is {given.by_release}", place))


def _report(run: _Run, option: str, name: str, place: Place) -> None:
    """Note an option that the command does not know: it goes to the launcher, and Fire takes any name."""
    if name in _OF_COMMANDS:
        return
    if run.is_overrides or not run.is_click:
        run.draft.note_unknown(option, place)
    elif nearest := _nearest_options(run.draft, name):
        run.draft.faults.append(Fault("ax-option-unknown", f"{option}; nearest: {', '.join(nearest)}", place))


def _nearest_options(draft: Draft, name: str) -> list[str]:
    bare = name.removeprefix("no_")
    names = (bare,) if draft.accepts(bare) else load_vocabulary(AXOLOTL).nearest(name)
    return [f"--{each.replace('_', '-')}" for each in names]


def _without_prefix(path: str) -> str:
    """Return `path` without the `fsdp_` that older configurations put before the fields of fsdp_config."""
    section, _, field = path.partition(".")
    if section == "fsdp_config" and field.startswith("fsdp_") and field != "fsdp_version":
        return f"{section}.{field.removeprefix('fsdp_')}"
    return path


def _settle(draft: Draft, folders: Sequence[Path]) -> None:
    """Follow the DeepSpeed file, and let the two places of the FSDP version agree as Axolotl does."""
    base_model = draft.get("base_model")
    if base_model is not None and isinstance(base_model.value, str):
        draft.model_name = base_model.value
    named = draft.get(DEEPSPEED)
    if named is not None and isinstance(named.value, str) and named.value:
        _write_deepspeed_file(draft, named, named.value, folders)
    elif draft.is_open(DEEPSPEED):
        draft.section_may_be_set(DEEPSPEED)
    else:
        section.settle(draft)
    section.take_accumulation(draft)
    top, inner = draft.get("fsdp_version"), draft.get("fsdp_config.fsdp_version")
    if (top is None or top.value is None) and inner is not None:
        draft.set_key("fsdp_version", inner.value, inner.written, inner.place)
    elif top is not None and inner is None and draft.below("fsdp_config."):
        draft.set_key("fsdp_config.fsdp_version", top.value, top.written, top.place)


def _write_deepspeed_file(draft: Draft, named: Setting, path: str, folders: Sequence[Path]) -> None:
    """Write the named file, or its known content if it is missing and Axolotl ships it."""
    if section.follow(draft, named, folders):
        return
    start = path.rfind(_PRESETS)
    preset = draft.table.by_name[DEEPSPEED].implies.get(path[start:]) if start >= 0 else None
    if preset is None:
        section.leave_open(draft, named)
        return
    for name, value in preset.items():
        draft.set_key(name, value, name, named.place)
