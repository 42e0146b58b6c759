# SPDX-License-Identifier: Apache-2.0
"""Reads NeMo-RL's YAML over its parents, then overrides, and passes on the policy's settings of Megatron.

A parent is looked for beside the file that names it. If it is not there, every key that is not set is unknown. Which
keys reach Megatron was read from `nemo_rl/models/megatron/setup.py`: those with a canonical name of Megatron's
(`knowledge/keys/nemo_rl.yaml`), every key of `optimizer`, and every field of `model_overrides`.
"""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config, Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.entries import Entries
from skill_tools.configs.hydra import Override, looks_like_override, parse_override
from skill_tools.configs.releases import is_before
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import command_line, training_command, write_environment
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import OMEGACONF, Node
from skill_tools.dialects.megatron import BRIDGE, embedded
from skill_tools.dialects.nemo_rl import NEMO_RL
from skill_tools.errors import UnusableInput

_OVERRIDES = "<overrides>"
_MAX_PARENTS = 32
_OVERRIDE_SINCE = "0.6"  # nemo_rl/utils/config.py::merge_with_override
_REFUSED = "nr-override-refused"
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
    entries = Entries()
    for source in sources:
        match source.kind:
            case Kind.SHELL:
                _read_script(draft, entries, source)
            case Kind.YAML | Kind.JSON:
                _read_file(draft, entries, source, ())
            case _:
                raise source.refused(
                    expected="a YAML configuration of NeMo-RL, or the script that runs it",
                    attempt="the file after --config",
                )
    for text in overrides:
        _override(draft, entries, command_line(text, _OVERRIDES), _OVERRIDES)
    _write(draft, entries)
    _settle(draft)
    model = draft.get("policy.model_name")
    draft.model_name = str(model.value) if model is not None else None
    return draft.finish()


def goes_to_megatron(path: str) -> bool:
    """Return whether `path` lies in a section that Megatron's own classes take key by key."""
    return path.startswith(tuple(f"{section}." for section in _SECTIONS))


def _read_file(draft: Draft, entries: Entries, source: Source, children: tuple[str, ...]) -> None:
    """Read a file over its parents; `children` are the files between it and the requested one."""
    draft.take(source)
    root = single_document(source, OMEGACONF, draft=draft)
    own = dict(entries_of(root))
    parent = own.pop("defaults", None)
    for node in [] if parent is None else parent.value if isinstance(parent.value, list) else [parent]:
        _read_parent(draft, entries, source, node, (*children, source.name))
    release = source.release(NEMO_RL)
    if release is None or not is_before(release, _OVERRIDE_SINCE):
        _forget_overridden(entries, own)
    entries.write_tree(Node(own, 1, 1), source.name)


def _read_parent(
    draft: Draft, entries: Entries, source: Source, node: Node, children: tuple[str, ...]
) -> None:
    path = str(node.value)
    found = find(path, [source.folder] if source.folder else [])
    if found is not None and len(children) < _MAX_PARENTS and found.name not in children:
        _read_file(draft, entries, found, children)
        return
    place = Place(source.name, node.line, node.column)
    draft.missing_files.append(Setting("defaults", path, "defaults", place))
    _leave_open(draft)


def _forget_overridden(entries: Entries, own: dict[str, Node]) -> None:
    """Take back parents' values in the sections at the top that are marked `_override_`; deeper marks do nothing."""
    for name, child in own.items():
        marker = entries_of(child).get("_override_")
        if marker is not None and marker.value:
            entries.remove(name)


def _write(draft: Draft, entries: Entries) -> None:
    """Write the merged values into the draft, and note the keys of the backends' sections that nothing reads."""
    for loser in entries.lost:
        draft.shadow(loser.written, loser.value, loser.place)
    draft.faults += [
        Fault(_REFUSED, f"{each.written}: a list and a section cannot be merged", each.place)
        for each in entries.clashes
    ]
    for path, entry in entries:
        if draft.accepts(path):
            value = UNREADABLE if entry.value == "???" else entries.resolved(entry.value)
            draft.set_key(draft.canonical(path), value, entry.written, entry.place)
            if value is UNREADABLE and not draft.is_leaf(path):
                draft.may_be_set(f"{path}.")
        _note_unknown(draft, path, entry.place)
    for path, place in entries.sections.items():
        if draft.is_leaf(path):
            draft.set(path, entries.tree(path), place)
        _note_unknown(draft, path, place)


def _note_unknown(draft: Draft, path: str, place: Place) -> bool:
    """Note a key of a backend that nothing reads; return whether it is one."""
    is_unknown = _is_no_field(draft, path) if goes_to_megatron(path) else _is_dead(draft, path)
    if is_unknown:
        draft.note_unknown(path, place)
    return is_unknown


def _is_dead(draft: Draft, path: str) -> bool:
    """Return whether nothing reads a key of a backend that rules know as a field of Megatron's model, or an offload.

    Others are none of our business.
    """
    name = path.rpartition(".")[2]
    means = "offload" in name or draft.table.find(BRIDGE, f"model.{name}") is not None
    return means and path.startswith(_CHECKED) and not draft.accepts(path)


def _is_no_field(draft: Draft, path: str) -> bool:
    """Return whether Megatron's class does not have a key."""
    section, bridge = next(item for item in _SECTIONS.items() if path.startswith(f"{item[0]}."))
    field = path.removeprefix(f"{section}.")
    spelling = f"{bridge}.{field}"
    is_known = draft.table.find(BRIDGE, spelling) is not None or load_vocabulary(BRIDGE).accepts(spelling)
    return not is_known and "." not in field


def _read_script(draft: Draft, entries: Entries, source: Source) -> None:
    """Read a script's configuration, if it is there, then its overrides."""
    draft.take(source)
    command = training_command(source, lambda word: bool(_PROGRAM.search(word)) or draft.accepts(word))
    write_environment(draft, command, source.name)
    named = _config(command.words)
    folders = [source.folder, *list(source.folder.resolve().parents)[:6]] if source.folder else []
    found = find(named.text, folders) if named is not None and named.resolved else None
    if found is not None:
        _read_file(draft, entries, found.stating(lambda: _release_of(source)), ())
    else:
        if named is not None:
            place = Place(source.name, named.line, named.column)
            draft.missing_files.append(Setting("config", named.text, "--config", place))
        _leave_open(draft)
    _override(draft, entries, command.words, source.name)


def _release_of(source: Source) -> dict[str, str]:
    release = source.release(NEMO_RL)
    return {NEMO_RL: release} if release else {}


def _config(words: Sequence[Argument]) -> Argument | None:
    for position, word in enumerate(words):
        option, equals, value = word.text.partition("=")
        if option == "--config":
            if equals:
                return word._replace(text=value)
            return words[position + 1] if position + 1 < len(words) else None
    return None


def _override(draft: Draft, entries: Entries, words: Sequence[Argument], file: str) -> None:
    """Lay the overrides among `words` over the files' values; note Hydra's refusals."""
    is_open = not draft.sources or bool(draft.missing_files)
    for word in words:
        place = Place(file, word.line, word.column)
        if word.text.startswith("--") and draft.accepts(word.text[2:].partition("=")[0]):
            draft.faults.append(Fault(_REFUSED, f"{word.text}: an override has no dashes", place))
        elif looks_like_override(word.text):
            key = word.text.lstrip("+~").partition("=")[0]
            given = Override(word.text[: len(word.text) - len(word.text.lstrip("+~"))], key, UNREADABLE)
            if word.resolved and word.certain:
                try:
                    given = parse_override(word.text)
                except UnusableInput as error:
                    draft.faults.append(Fault(_REFUSED, f"{word.text}: expected {error.expected}", place))
                    continue
            refused = entries.override(given, given.value, place, is_open=is_open or not word.certain)
            if refused and word.resolved and not _note_unknown(draft, key, place):
                draft.faults.append(Fault(_REFUSED, refused, place))


def _leave_open(draft: Draft) -> None:
    """Note that a missing file may set anything."""
    draft.may_be_set()
    draft.keys_may_be_set(key.name for key in draft.table.by_name.values() if BRIDGE in key.spelling)


def _settle(draft: Draft) -> None:
    """Follow the worker up to the building of Megatron's model, if that is the backend."""
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
