# SPDX-License-Identifier: Apache-2.0
"""Reads a recipe of NeMo AutoModel: the sections of the strategy, and the switches that move other tensors.

Source: `nemo_automodel/recipes/_dist_utils.py::parse_distributed_section` and
`nemo_automodel/recipes/diffusion/train.py`. Other sections are for the classes that they name.
"""

from collections.abc import Mapping, Sequence

from skill_tools import knowledge
from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.nemo_automodel import NEMO_AUTOMODEL

_STRICT = ("distributed", "fsdp", "ddp")  # whose names have to be fields
_SWITCHES = ("offload_teacher_model", "separate_meshes", "checkpoint.cpu_offload", "checkpoint.enabled")
_META = frozenset({"_target_", "_recursive_", "_convert_"})  # dropped before a strategy sees them
_POLICY = "distributed.offload_policy"
_WORDS: Mapping[object, object] = {  # `translate_value` of the loader
    "none": None, "None": None, "true": True, "True": True, "false": False, "False": False,
}  # fmt: skip


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`; raises `UnusableInput` for a file that is no YAML."""
    draft = Draft(NEMO_AUTOMODEL)
    draft.complete = True
    for source in sources:
        if source.kind not in (Kind.YAML, Kind.JSON):
            raise source.refused(
                expected="the YAML of a recipe",
                attempt="the file that automodel runs, with its command's settings in --overrides",
            )
        draft.take(source)
        _write_file(draft, entries_of(single_document(source)), source.name)
    for text in overrides:
        path, _, value = text.removeprefix("--").partition("=")
        _write(draft, path, value, Place("<overrides>", 1, 1))
    _settle(draft)
    return draft.finish()


def _write_file(draft: Draft, entries: Mapping[str, Node], file: str) -> None:
    for name in _STRICT:
        for option, node in entries_of(entries.get(name)).items():
            path = f"{name}.{option}"
            if option not in _META:
                _write(draft, path, plain(node), Place(file, node.line, node.column))
            if path == _POLICY:
                for argument, value in entries_of(node).items():
                    _write(draft, f"{path}.{argument}", plain(value), Place(file, value.line, value.column))
    for switch in _SWITCHES:
        section, _, name = switch.rpartition(".")
        given = (entries_of(entries.get(section)) if section else entries).get(name)
        if given is not None:
            _write(draft, switch, plain(given), Place(file, given.line, given.column))


def _write(draft: Draft, path: str, value: object, place: Place) -> None:
    """Write one setting of a read section; a name without a strategy is noted."""
    if path.partition(".")[0] not in _STRICT and path not in _SWITCHES:
        return
    if not draft.accepts(path):
        draft.note_unknown(path, place)
        return
    draft.set(path, _WORDS.get(value, value) if isinstance(value, str) else value, place)


def _settle(draft: Draft) -> None:
    """Give the strategy its one name, and find names without a field, and a policy that is no section."""
    strategy = draft.get("automodel.strategy")
    name = strategy.value if strategy is not None else "fsdp2"
    if draft.is_open("automodel.strategy") or not isinstance(name, str):
        return
    name = name.lower().replace("-", "_").replace("mfsdp", "megatron_fsdp")
    if strategy is not None:
        draft.set_key("automodel.strategy", name, strategy.written, strategy.place)
    having = _fields()
    for setting in draft.below(""):
        section, _, option = setting.written.partition(".")
        if section == "distributed" and name not in having.get(option, {name}):
            draft.note_unknown(setting.written, setting.place, nearest=())
    policy = draft.get("automodel.offload_policy")
    if policy is not None and policy.value and not isinstance(policy.value, dict):
        draft.set_key("automodel.plain_policy", policy.value, policy.written, policy.place)


@knowledge.derived
def _fields() -> Mapping[str, frozenset[str]]:
    """Return the strategies of each option that not all have."""
    lines = map(str.split, knowledge.names("nemo_automodel_strategies"))
    return {option: frozenset(strategies) for option, *strategies in lines}
