"""Reads NeMo-RL's YAML over its parents, then overrides, and passes on what the policy passes on to Megatron.

A parent is looked for beside the file that names it. If it is not there, every key that is not set is unknown. Which
keys reach Megatron was read from `nemo_rl/models/megatron/setup.py`: those with a canonical name of Megatron's
(`knowledge/keys/nemo_rl.yaml`), every key of `optimizer`, and every field of `model_overrides`.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.hydra import looks_like_override, parse_override
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import command_line, training_command, write_environment
from skill_tools.configs.source import Kind, Source, find, load
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import OMEGACONF, Node, plain
from skill_tools.dialects.megatron import BRIDGE, embedded
from skill_tools.dialects.nemo_rl import NEMO_RL
from skill_tools.errors import UnusableInput

_OVERRIDES = "<overrides>"
_MAX_PARENTS = 32
_PROGRAM = re.compile(r"run_\w+\.py")
_MEGATRON = "policy.megatron_cfg"
_SECTIONS = {f"{_MEGATRON}.optimizer": "optimizer", f"{_MEGATRON}.model_overrides": "model"}
_CHECKED = (_MEGATRON, "policy.dtensor_cfg")
# Bridge's own checks run too: the worker calls ConfigContainer.validate.
_CODE = (
    *embedded.SHARED_CODE,
    "src/megatron/bridge/training/config.py::ConfigContainer.validate",
    "src/megatron/bridge/training/config.py::ConfigContainer._validate",
    "src/megatron/bridge/training/config.py::_validate",
    "src/megatron/bridge/utils/cuda_graph.py",
)


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, each a command line of its own."""
    draft = Draft(NEMO_RL, converts_text=False)
    draft.complete = True
    for source in sources:
        match source.kind:
            case Kind.SHELL:
                _write_script(draft, source)
            case Kind.YAML | Kind.JSON:
                _write_file(draft, source, ())
            case _:
                raise UnusableInput(
                    f"{source.name} is {source.kind.value}",
                    expected="a YAML configuration of NeMo-RL, or the script that runs it",
                    attempt="the file after --config",
                )
    for text in overrides:
        _write_words(draft, command_line(text, _OVERRIDES), _OVERRIDES)
    _settle(draft)
    model = draft.get("policy.model_name")
    draft.model_name = str(model.value) if model is not None else None
    return draft.finish()


def goes_to_megatron(path: str) -> bool:
    """Return whether `path` lies in a section that Megatron's own classes take key by key."""
    return path.startswith(tuple(f"{section}." for section in _SECTIONS))


def _write_file(draft: Draft, source: Source, children: tuple[str, ...]) -> None:
    """Write a file over its parents; `children` are the files between it and the one that was asked for."""
    draft.take(source)
    root = single_document(source, OMEGACONF, draft=draft)
    entries = entries_of(root)
    parent = entries.get("defaults")
    for node in [] if parent is None else parent.value if isinstance(parent.value, list) else [parent]:
        _write_parent(draft, source, node, (*children, source.name))
    _clear_overridden(draft, root, "")
    own = Node({name: node for name, node in entries.items() if name != "defaults"}, 1, 1)
    write_tree(draft, own, source.name, value_of=_value, report_unknown=False)
    second = entries_of(entries_of(entries.get("policy")).get("dtensor_cfg")).get("_v2")
    if second is not None:
        draft.set("policy.dtensor_cfg._v2", _value(second), Place(source.name, second.line, second.column))
    _note_unknown(draft, entries.get("policy"), "policy", source.name)


def _write_parent(draft: Draft, source: Source, node: Node, children: tuple[str, ...]) -> None:
    path = str(node.value)
    found = find(path, [source.folder] if source.folder else [])
    if found is not None and len(children) < _MAX_PARENTS and found.name not in children:
        _write_file(draft, found, children)
        return
    place = Place(source.name, node.line, node.column)
    draft.missing_files.append(Setting("defaults", path, "defaults", place))
    _leave_open(draft)


def _clear_overridden(draft: Draft, node: Node, path: str) -> None:
    """Take back what parents set in sections that are marked `_override_`."""
    for name, child in entries_of(node).items():
        below = f"{path}.{name}" if path else name
        marker = entries_of(child).get("_override_")
        if marker is not None and marker.value is True:
            draft.remove(below)
        _clear_overridden(draft, child, below)


def _value(node: Node) -> object:
    text = node.value
    return UNREADABLE if isinstance(text, str) and ("${" in text or text == "???") else plain(node)


def _note_unknown(draft: Draft, node: Node | None, path: str, file: str) -> None:
    """Note the keys of the backends' sections that nothing reads."""
    for name, child in entries_of(node).items():
        below = f"{path}.{name}"
        place = Place(file, child.line, child.column)
        if goes_to_megatron(below):
            _check_field(draft, below, below, place)
        elif _is_dead(draft, below):
            draft.note_unknown(below, place)
        elif _is_near(below):
            _note_unknown(draft, child, below, file)


def _is_dead(draft: Draft, path: str) -> bool:
    """Return whether nothing reads a key of a backend that rules know as a field of Megatron's model, or an offload.

    Others are none of our business.
    """
    name = path.rpartition(".")[2]
    means = "offload" in name or draft.table.find(BRIDGE, f"model.{name}") is not None
    return means and path.startswith(_CHECKED) and not draft.accepts(path)


def _is_near(path: str) -> bool:
    """Return whether `path` is on the way to a checked section, or in one."""
    return any(path.startswith(checked) or checked.startswith(f"{path}.") for checked in _CHECKED)


def _check_field(draft: Draft, path: str, written: str, place: Place) -> None:
    """Note a key that Megatron's class does not have."""
    section, bridge = next(item for item in _SECTIONS.items() if path.startswith(f"{item[0]}."))
    spelling = f"{bridge}.{path.removeprefix(f'{section}.')}"
    is_known = draft.table.find(BRIDGE, spelling) is not None or load_vocabulary(BRIDGE).accepts(spelling)
    if not is_known and "." not in path.removeprefix(f"{section}."):
        draft.note_unknown(written, place)


def _write_script(draft: Draft, source: Source) -> None:
    """Write the configuration that a script names, if that is there, then its overrides."""
    draft.take(source)
    command = training_command(source, lambda word: bool(_PROGRAM.search(word)) or draft.accepts(word))
    write_environment(draft, command, source.name)
    named = _config(command.words)
    folders = [source.folder, *list(source.folder.resolve().parents)[:6]] if source.folder else []
    found = find(named.text, folders) if named is not None and named.resolved else None
    if found is not None:
        _write_file(draft, load(Path(found.name)), ())
    else:
        if named is not None:
            place = Place(source.name, named.line, named.column)
            draft.missing_files.append(Setting("config", named.text, "--config", place))
        _leave_open(draft)
    _write_words(draft, command.words, source.name)


def _config(words: Sequence[Argument]) -> Argument | None:
    for position, word in enumerate(words):
        option, equals, value = word.text.partition("=")
        if option == "--config":
            if equals:
                return word._replace(text=value)
            return words[position + 1] if position + 1 < len(words) else None
    return None


def _write_words(draft: Draft, words: Sequence[Argument], file: str) -> None:
    for word in words:
        if looks_like_override(word.text):
            _write_override(draft, word, Place(file, word.line, word.column))


def _write_override(draft: Draft, word: Argument, place: Place) -> None:
    written = word.text.lstrip("+~").partition("=")[0]
    if goes_to_megatron(written):
        _check_field(draft, written, word.text.partition("=")[0], place)
    elif _is_dead(draft, written):
        draft.note_unknown(word.text.partition("=")[0], place)
        return
    if word.text.startswith("~"):
        draft.remove(written)
        return
    value: object = UNREADABLE
    if word.resolved and word.certain:
        with suppress(UnusableInput):
            value = parse_override(word.text).value
    draft.set_key(draft.canonical(written), value, written, place)


def _leave_open(draft: Draft) -> None:
    """Note that a file which is not here may set anything."""
    draft.may_be_set()
    draft.keys_may_be_set(key.name for key in draft.table.by_name.values() if BRIDGE in key.spelling)


def _settle(draft: Draft) -> None:
    """Do what the worker does before it builds Megatron's model, if that is the backend."""
    enabled = draft.get(f"{_MEGATRON}.enabled")
    if enabled is None or enabled.value is not True:
        return
    embedded.share(draft, _CODE)
    for section, bridge in _SECTIONS.items():
        embedded.hand_on_all(draft, section, bridge)
    embedded.hand_on(draft, "use_distributed_optimizer", "ddp.use_distributed_optimizer")
    for name in draft.names_below(f"{_MEGATRON}.env_vars."):
        setting = draft.get(name)
        if setting is not None:
            draft.set_environment(name.rpartition(".")[2], setting.value, setting.place)
    _set_precision(draft)
    _set_recompute(draft)
    fine_grained = draft.get("fine_grained_activation_offloading")
    if fine_grained is not None and fine_grained.value is False:
        embedded.give(draft, {"offload_modules": []}, fine_grained)
    embedded.model_may_set(draft)


def _set_precision(draft: Draft) -> None:
    precision = draft.get("policy.precision")
    if precision is not None:
        is_bf16, is_fp16 = precision.value == "bfloat16", precision.value == "float16"
        embedded.give(draft, {"bf16": is_bf16, "fp16": is_fp16}, precision)


def _set_recompute(draft: Draft) -> None:
    """Recompute is one switch and a granularity here: full means uniform, one layer at a time."""
    switch = draft.get(f"{_MEGATRON}.activation_checkpointing")
    if switch is None or switch.value is not True:
        return
    chosen = draft.get(f"{_MEGATRON}.recompute_granularity")
    granularity = "full" if chosen is None else chosen.value
    embedded.give(draft, {"recompute_granularity": granularity}, chosen or switch)
    modules = draft.get(f"{_MEGATRON}.recompute_modules")
    if granularity == "full":
        embedded.give(draft, {"recompute_method": "uniform", "recompute_num_layers": 1}, switch)
    elif modules is not None and modules.value is not None:
        embedded.give(draft, {"recompute_modules": modules.value}, modules)
