"""Reads Axolotl's YAML, the DeepSpeed JSON that it names, and the options of its command line.

The DeepSpeed section is read as `deepspeed.*` keys whether it stands in the YAML or in a file
(`dialects/deepspeed/section.py`). The JSON files that Axolotl itself ships are known facts (`keys.yaml`, `deepspeed`);
any other file that is not there leaves the section open.
"""

from collections.abc import Sequence
from pathlib import Path

from skill_tools.configs.config import Config, Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import command_line, training_command, write_environment
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import parse, plain
from skill_tools.dialects.axolotl import AXOLOTL
from skill_tools.dialects.deepspeed import DEEPSPEED, EMBEDDED, section
from skill_tools.errors import UnusableInput

_PRESETS = "deepspeed_configs/"
_OVERRIDES = "<overrides>"
_YAML = (".yml", ".yaml")
_NAMES_A_FILE = ("--cloud", "--sweep")
# Options of its commands that are no keys: how to launch, over which configurations, what to show of the data.
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
    for source in sources:
        draft.take(source)
        _write_source(draft, source)
    for text in overrides:
        _write_options(draft, command_line(text, _OVERRIDES), _OVERRIDES)
    _settle(draft, folders)
    return draft.finish()


def _write_source(draft: Draft, source: Source) -> None:
    match source.kind:
        case Kind.YAML:
            write_tree(draft, single_document(source), source.name, spell=_without_prefix)
        case Kind.JSON:
            _write_json(draft, source)
        case Kind.SHELL:
            _write_script(draft, source)
        case Kind.PYTHON:
            raise UnusableInput(
                f"{source.name} is Python",
                expected="a YAML configuration of Axolotl",
                attempt="the YAML file that `axolotl train` gets",
            )


def _write_json(draft: Draft, source: Source) -> None:
    """Write a JSON source: a DeepSpeed configuration, unless it is Axolotl's own in JSON."""
    root = single_document(source)
    if "base_model" in entries_of(root):
        write_tree(draft, root, source.name)
    else:
        section.write_file(draft, source)


def _write_script(draft: Draft, source: Source) -> None:
    """Write a launch script: the configuration that it names, if that is there, then its options.

    What stands before the program and after `--` is the launcher's.
    """
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
        _write_source(draft, named)
        draft.sources[named.name] = named.text
    elif configuration is not None or not source.text.lstrip().startswith("--"):
        draft.may_be_set()  # by a file that is not here, or that the script itself is told
    _write_options(draft, words, source.name, hands_on=start > 0)


def _configuration(words: Sequence[Argument]) -> Argument | None:
    """Return the YAML file that a command runs: the first that no option of its own names."""
    before = (None, *(word.text for word in words))
    named = zip(before, words, strict=False)
    return next((word for option, word in named if _is_yaml(word) and option not in _NAMES_A_FILE), None)


def _is_yaml(word: Argument) -> bool:
    return word.text.endswith(_YAML) and not word.text.startswith("--")


def _write_options(draft: Draft, words: Sequence[Argument], file: str, *, hands_on: bool = False) -> None:
    """Write `--fsdp-config.offload-params true`, `--no-layer-offloading`, `--x=y`, and plain `x=y`.

    `hands_on` says that the command gives options that it does not know to the launcher.
    """
    for position, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        is_option = name.startswith("--") and len(name) > 2
        if not is_option and not (equals and not name.startswith("-")):
            continue
        following = words[position + 1] if position + 1 < len(words) else None
        known = word.resolved and word.certain
        if name.startswith("--") and not equals:
            takes = (
                following is not None and not following.text.startswith("--") and "=" not in following.text
            )
            value = following.text if following is not None and takes else "true"
            known = known and (following is None or not takes or following.resolved)
        place = Place(file, word.line, word.column)
        _write_option(draft, name, value if known else None, place, hands_on=hands_on)


def _write_option(draft: Draft, option: str, text: str | None, place: Place, *, hands_on: bool) -> None:
    name = _without_prefix(option.removeprefix("--").replace("-", "_"))
    negated = name.startswith("no_") and not draft.accepts(name)
    name = name.removeprefix("no_") if negated else name
    if draft.accepts(name):
        value = UNREADABLE if text is None else False if negated else _scalar(text)
        draft.set_key(draft.canonical(name), value, option, place)
    elif name in _OF_COMMANDS:
        return
    elif not hands_on:
        draft.note_unknown(option, place)
    elif nearest := load_vocabulary(AXOLOTL).nearest(name):
        draft.faults.append(Fault("ax-option-unknown", f"{option}; nearest: {', '.join(nearest)}", place))


def _scalar(text: str) -> object:
    documents = parse(text, _OVERRIDES)
    return plain(documents[0]) if len(documents) == 1 else text


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
    top, inner = draft.get("fsdp_version"), draft.get("fsdp_config.fsdp_version")
    if (top is None or top.value is None) and inner is not None:
        draft.set_key("fsdp_version", inner.value, inner.written, inner.place)
    elif top is not None and inner is None and draft.below("fsdp_config."):
        draft.set_key("fsdp_config.fsdp_version", top.value, top.written, top.place)


def _write_deepspeed_file(draft: Draft, named: Setting, path: str, folders: Sequence[Path]) -> None:
    """Write the file that is named, or where Axolotl ships it and it is not here, what is known to be in it."""
    if section.follow(draft, named, folders):
        return
    start = path.rfind(_PRESETS)
    preset = draft.table.by_name[DEEPSPEED].implies.get(path[start:]) if start >= 0 else None
    if preset is None:
        section.leave_open(draft, named)
        return
    for name, value in preset.items():
        draft.set_key(name, value, name, named.place)
