# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of `swift` and `megatron`: a script's command, YAML or JSON of the same names, FSDP files.

An argument is a key under its flag; those of `megatron` stand behind that word, because the two programs take different
ones. argparse lets a flag be cut short if it stays unique. The values of --deepspeed, --fsdp and --fsdp_config are a
preset's name, a path, or JSON, whose fields are written under their own keys.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from skill_tools import knowledge
from skill_tools.configs.config import Config, Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.releases import is_before
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
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.values import UNREADABLE, is_template, whole_number
from skill_tools.configs.vocabulary import gone_since, lacking, load_vocabulary
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.deepspeed import EMBEDDED
from skill_tools.dialects.deepspeed import section as deepspeed
from skill_tools.dialects.deepspeed.dialect import is_one as is_deepspeed
from skill_tools.dialects.megatron import BRIDGE, embedded
from skill_tools.dialects.ms_swift import MS_SWIFT
from skill_tools.dialects.transformers.parsers import FALSE, TRUE, TRUTH, meant

_OVERRIDES = "<overrides>"
_OF_RELEASE = "sw-key-release"
_MEGATRON = "megatron"
_PROGRAMS = ("swift", _MEGATRON)
_TASKS = ("sft", "pt", "rlhf")
_LISTS_AS_TEXT_SINCE = "4.6"  # swift/cli/main.py::parse_yaml_args
_RAY_GROUPS = frozenset({"colocate_groups", "rollout"})
_OF_RAY = frozenset(
    {"colocate_groups", "sleep_level", "nnodes", "train", "rollout", "teacher"}
)  # parse_ray_yaml
_PRESETS = {"swift.deepspeed": "DeepSpeed", "swift.fsdp": "FSDP"}


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, each a string of arguments."""
    draft = Draft(MS_SWIFT, embeds=EMBEDDED)
    draft.complete = True
    folders = [source.folder for source in sources if source.folder is not None]
    program = "swift"
    for source in sources:
        draft.take(source)
        match source.kind:
            case Kind.SHELL:
                program = _write_script(draft, source, folders)
            case Kind.JSON if is_deepspeed(source):
                deepspeed.write_file(draft, source)
            case Kind.YAML | Kind.JSON:
                root = single_document(source, draft=draft)
                program = _program_of(draft, entries_of(root))
                _write_file(draft, root, source.name, program, source.release(MS_SWIFT))
            case _:
                raise source.refused(
                    expected="a script, YAML or JSON with arguments of ms-swift",
                    attempt="the script that runs `swift sft` or `megatron sft`",
                )
    for text in overrides:
        _write_flags(draft, flags(command_line(text, _OVERRIDES), _OVERRIDES), program)
    _follow(draft, folders)
    if program == _MEGATRON:
        _hand_on(draft)
    return draft.finish()


def _write_script(draft: Draft, source: Source, folders: Sequence[Path]) -> str:
    """Write the training command of a script; return its program."""
    command = training_command(source, lambda word: _knows(draft, word), whole=True)
    write_environment(draft, command, source.name)
    program, words = _arguments(command.words)
    launcher = words[: program_end(command)] if words is command.words else ()
    if not any(draft.accepts(word.text.partition("=")[0]) for word in launcher):
        words = words[len(launcher) :]
    if words and words[0].text.endswith((".yaml", ".yml", ".json")):
        found = find(words[0].text, folders)
        if found is not None:
            draft.take(found)
            root = single_document(found, draft=draft)
            _write_file(draft, root, found.name, program, source.release(MS_SWIFT) or found.release(MS_SWIFT))
        else:
            place = Place(source.name, words[0].line, words[0].column)
            draft.missing_files.append(Setting("config", words[0].text, "config", place))
            draft.may_be_set()
    _write_flags(draft, flags(words, source.name), program, source.release(MS_SWIFT))
    if any(word.text.rpartition("/")[2] == "swift" for word in command.words):
        _count_devices(draft)
    return program


def _knows(draft: Draft, word: str) -> bool:
    return word in _PROGRAMS or draft.accepts(word) or draft.accepts(f"{_MEGATRON} {word}")


def _arguments(words: Sequence[Argument]) -> tuple[str, Sequence[Argument]]:
    """Return the program, and the words after its task: `swift sft`, or `swift/cli/sft.py` behind a launcher."""
    for position, word in enumerate(words):
        following = words[position + 1].text if position + 1 < len(words) else ""
        if word.text.rpartition("/")[2] in _PROGRAMS and following in _TASKS:
            return word.text.rpartition("/")[2], words[position + 2 :]
        if "swift/cli/" in word.text and word.text.endswith(".py"):
            return _MEGATRON if "_megatron/" in word.text else "swift", words[position + 1 :]
    return "swift", words


def _write_flags(draft: Draft, given: Iterable[Flag], program: str, release: str | None = None) -> None:
    for flag in given:
        spelling = _spelling(draft, flag.name, program)
        _note_release(draft, spelling, flag.place, release)
        if flag.name == "--config":
            draft.may_be_set()  # a file of the Ray pipelines, which is not followed
        elif not draft.accepts(spelling):
            if "$" not in flag.name:
                draft.note_unknown(flag.name, flag.place, spelling=spelling)
        elif not flag.known:
            _set(draft, spelling, UNREADABLE, flag.name, flag.place)
        else:
            _set_texts(draft, spelling, flag.values, flag.name, flag.place)


def _spelling(draft: Draft, flag: str, program: str) -> str:
    """Return the full name of a flag, as the vocabulary has it; argparse knows each with dashes, too."""
    prefix = f"{_MEGATRON} " if program == _MEGATRON else ""
    spelling = f"{prefix}{flag}"
    if draft.accepts(spelling):
        return spelling
    underscored = f"{prefix}--{flag.removeprefix('--').replace('-', '_')}"
    if draft.accepts(underscored):
        return underscored
    start = f"{prefix}--" if program == _MEGATRON else "--"
    names = (name.removeprefix(start) for name in load_vocabulary(MS_SWIFT).names if name.startswith(start))
    return f"{start}{meant(flag.removeprefix('--'), names)}"


def _note_release(draft: Draft, spelling: str, place: Place, release: str | None) -> None:
    """Note an argument that the stated release lacks, yet or no longer, or newer arguments if none is stated."""
    lacks, since = lacking(MS_SWIFT, spelling, release) if release else None, gone_since(MS_SWIFT, spelling)
    if lacks:
        draft.faults.append(Fault(_OF_RELEASE, lacks, place))
    elif since and not release:
        draft.faults.append(
            Fault(_OF_RELEASE, f"{spelling} went in {since}", place, ((MS_SWIFT, f">={since}"),))
        )


def _set(draft: Draft, spelling: str, value: object, written: str, place: Place) -> str:
    """Write a value under the canonical name of an argument, and return that."""
    key = draft.key(spelling)
    name = (
        key.name if key else spelling
    )  # a flag that no rule knows keeps its dashes: its bare name may be another's
    if name == "recompute_granularity" and value == "none":
        value = None
    draft.set_key(name, value, written, place)
    if spelling.endswith("--model") and isinstance(value, str):
        draft.model_name = value
    return name


def _set_texts(draft: Draft, spelling: str, texts: Sequence[str], written: str, place: Place) -> None:
    """Write argparse's value of the words behind an argument, and note words that it does not take."""
    kind, key = argument_kinds().get(spelling), draft.key(spelling)
    expects = "bool" if key is not None and key.type_in(MS_SWIFT) == "bool" else kind
    value: object = texts[0] if len(texts) == 1 else list(texts)
    if not texts and expects in ("bool", None):
        value = True
    elif kind == "list" or (key is not None and key.type_in(MS_SWIFT) == "list"):
        value = list(texts)
    refused = draft.refused(
        key.name if key else spelling
    )  # argparse parses a value that another one overrides, too
    if expects is not None and any(map(is_template, texts)):
        value = UNREADABLE
    elif expects is not None and value is not True:
        value, here = _parsed(expects, texts, value)
        refused = here or refused
    name = _set(draft, spelling, value, written, place)
    if refused and name in draft:
        draft.refuse_type(name, refused)


def _parsed(kind: str, texts: Sequence[str], value: object) -> tuple[object, str | None]:
    """Return the value of `texts` for an argument of `kind`, and argparse's expectation where it ends the run."""
    if kind == "list":
        return value, None if texts else "a value"
    if len(texts) != 1:
        return value, "one value"
    (text,) = texts
    if kind == "bool":
        is_true = text.lower() in TRUE
        return (is_true, None) if is_true or text.lower() in FALSE else (value, TRUTH)
    if kind == "str":
        return value, None
    try:
        return (int(text) if kind == "int" else float(text)), None
    except ValueError:
        return value, "an integer" if kind == "int" else "a number"


@knowledge.derived
def argument_kinds() -> dict[str, str]:
    """Return argparse's treatment of each argument of `swift sft`, if all known releases agree."""
    pairs = (line.split(" ") for line in knowledge.names("ms_swift_kinds"))
    return {name: kind for kind, name in pairs}


def _set_from_file(
    draft: Draft, spelling: str, value: object, written: str, place: Place, release: str | None
) -> None:
    """Write a file's value as its text on the command line that ms-swift makes of the file."""
    is_list = isinstance(value, list)
    if value is UNREADABLE or isinstance(value, dict) or (is_list and _is_refused_list(value, release)):
        name = _set(draft, spelling, value, written, place)
        if is_list and name in draft:
            since = _LISTS_AS_TEXT_SINCE
            text = f"a list of text: before ms-swift {since} no command line holds a number or null of it"
            draft.refuse_type(name, text)
        elif isinstance(value, dict) and argument_kinds().get(spelling) in ("bool", "int", "float"):
            draft.refuse_type(name, "one value, no section")
        return
    texts = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    _set_texts(draft, spelling, texts, written, place)
    key = draft.key(spelling)
    name = key.name if key else spelling
    if value is None and name in draft:
        draft.refuse_type(name, "a value, or no such key: null becomes the text None on the command line")


def _is_refused_list(value: object, release: str | None) -> bool:
    """Return whether some possible release hands on an object that no command line holds, instead of its text."""
    is_text = not isinstance(value, list) or all(isinstance(each, str) for each in value)
    return not is_text and (release is None or is_before(release, _LISTS_AS_TEXT_SINCE))


def _program_of(draft: Draft, entries: Mapping[str, Node]) -> str:
    """Return which of the two programs takes a file: `megatron` if that alone has some of its arguments."""
    only_megatron = (
        draft.accepts(f"{_MEGATRON} --{name}") and not draft.accepts(f"--{name}") for name in entries
    )
    return _MEGATRON if _RAY_GROUPS & entries.keys() or any(only_megatron) else "swift"


def _write_file(draft: Draft, root: Node, file: str, program: str, release: str | None) -> None:
    """Write arguments in YAML or JSON as `release` of ms-swift takes them, or a file in the form of --fsdp.

    In a file for Ray the group that trains has its own arguments over the shared ones; the other groups do not train.
    """
    entries = entries_of(root)
    if _RAY_GROUPS & entries.keys():
        shared = {name: node for name, node in entries.items() if name not in _OF_RAY}
        own = {name: node for name, node in entries_of(entries.get("train")).items() if name != "gpus"}
        entries = {**shared, **own}
    if {name for name in entries if not name.startswith("_")} == {"fsdp", "fsdp_config"}:
        _write_fsdp(draft, root, file)
        draft.set_key("swift.fsdp", file, "fsdp", Place(file, entries["fsdp"].line, entries["fsdp"].column))
        return
    for name, node in entries.items():
        spelling = _spelling(draft, f"--{name}", program)
        place = Place(file, node.line, node.column)
        if name == "ENV":
            for variable, value in entries_of(node).items():
                draft.set_environment(variable, plain(value), Place(file, value.line, value.column))
        elif draft.accepts(spelling):
            _note_release(draft, spelling, place, release)
            _set_from_file(draft, spelling, plain(node), name, place, release)
        else:
            draft.note_unknown(name, place, spelling=spelling)


def _write_fsdp(draft: Draft, root: Node, file: str) -> None:
    """Write a file in the form of --fsdp: the words under `fsdp`, the rest under `fsdp_config`."""
    entries = entries_of(root)
    words = entries.get("fsdp")
    if words is not None:
        draft.set_key("swift.fsdp_words", plain(words), "fsdp", Place(file, words.line, words.column))
    section = entries.get("fsdp_config")
    if section is not None:
        write_tree(draft, section, file, prefix="fsdp_config", report_unknown=False)


def _follow(draft: Draft, folders: Sequence[Path]) -> None:
    """Write the settings that --deepspeed, --fsdp and --fsdp_config stand for."""
    for name in _PRESETS:
        named = draft.get(name)
        if draft.is_open(name):
            _leave_open(draft, name)
        elif named is not None and named.value and not named.place.file.endswith(".json"):
            _write_named(draft, named, folders)
    deepspeed.take_accumulation(draft)
    config = draft.get("--fsdp_config")
    if config is not None and isinstance(config.value, str):
        _write_named(draft, config._replace(key="fsdp_config"), folders)


def _write_named(draft: Draft, named: Setting, folders: Sequence[Path]) -> None:
    key = draft.table.by_name.get(named.key)
    preset = key.implies.get(str(named.value)) if key else None
    inline = named.value if isinstance(named.value, dict) else _json(named.value)
    found = None if preset or inline is not None else find(str(named.value), folders)
    if preset:
        written = (
            f"{named.value} of {named.written}"  # no setting of the preset's stands in a file of the user's
        )
        for name, value in preset.items():
            draft.set_key(name, value, written, named.place)
    elif inline is not None:
        _write_inline(draft, named, inline)
    elif found is None and named.key == "swift.deepspeed" and not _is_path(str(named.value)):
        draft.refuse_type(named.key, f"one of {', '.join(key.implies if key else ())}, a JSON file or JSON")
        _leave_open(draft, named.key)
    elif found is None:
        draft.missing_files.append(named)
        _leave_open(draft, named.key)
    elif named.key == "swift.deepspeed":
        deepspeed.write_file(draft, found)
    else:
        draft.take(found)
        _write_fsdp(draft, single_document(found, draft=draft), found.name)


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith(".json")


def _write_inline(draft: Draft, named: Setting, value: dict[str, object]) -> None:
    """Write JSON that stands on the command line; every value has the place of its argument."""
    if named.key == "fsdp_config":
        value = {"fsdp_config": value}
    root = _node(value, named.place)
    if named.key == "swift.deepspeed":
        write_tree(draft, root, named.place.file, spell=lambda path: f"deepspeed.{path}")
        deepspeed.settle(draft)
    else:
        _write_fsdp(draft, root, named.place.file)


def _node(value: object, place: Place) -> Node:
    if isinstance(value, dict):
        children = {str(name): _node(child, place) for name, child in value.items()}
        return Node(children, place.line, place.column)
    return Node(value, place.line, place.column)


def _json(value: object) -> dict[str, object] | None:
    """Return the object that a text holds as JSON, or None."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _leave_open(draft: Draft, name: str) -> None:
    if name == "swift.deepspeed":
        draft.section_may_be_set("deepspeed")
    else:
        draft.may_be_set("fsdp_config")
        draft.keys_may_be_set(("swift.fsdp_words",))


def _count_devices(draft: Draft) -> None:
    """Count visible devices a process, where the script states them: ms-swift starts one process unless it is told."""
    devices, processes = draft.get("env.CUDA_VISIBLE_DEVICES"), draft.get("env.NPROC_PER_NODE")
    if devices is None or draft.is_open("env.NPROC_PER_NODE") or "env.LOCAL_WORLD_SIZE" in draft:
        return
    visible = [each for each in str(devices.value).split(",") if each.strip()]
    count = whole_number(str(processes.value)) if processes is not None else 1
    if count:
        draft.set_key(
            "swift.devices_per_process", len(visible) // count, "CUDA_VISIBLE_DEVICES", devices.place
        )


def _hand_on(draft: Draft) -> None:
    """Let Megatron's own rules read the arguments of `megatron`; --megatron_extra_kwargs goes to the model as it is."""
    embedded.share(draft)
    embedded.hand_on(draft, "use_distributed_optimizer", "ddp.use_distributed_optimizer")
    embedded.hand_on(draft, "use_megatron_fsdp", "ddp.use_megatron_fsdp")
    extra = draft.get("megatron --megatron_extra_kwargs")
    fields = (_json(extra.value) or {}) if extra is not None else {}
    for name, value in fields.items():
        key = draft.table.find(BRIDGE, f"model.{name}")
        if key is not None and extra is not None:
            draft.set_key(key.name, value, extra.written, extra.place)
    embedded.model_may_set(draft)
