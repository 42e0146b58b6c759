"""Reads a Python script that makes `Trainer(strategy=..)` or `Fabric(strategy=..)` of Lightning.

DeepSpeedStrategy makes DeepSpeed's JSON of its arguments, or takes a file or dict in place of all of them; both are
kept as `deepspeed.*` keys. Facts: strategies/fsdp.py, strategies/deepspeed.py and plugins/precision/fsdp.py of
lightning 2.5.0 to 2.6.6.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from skill_tools.configs.config import Config, Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.python.values import Section, plain
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import Node
from skill_tools.dialects.deepspeed import DEEPSPEED, section
from skill_tools.dialects.lightning import (
    DEEPSPEED_STRATEGY,
    EMBEDDED,
    FSDP_STRATEGY,
    LIGHTNING,
    MAKERS,
    OUR_MODULE,
    PARALLEL_STRATEGY,
)
from skill_tools.errors import UnusableInput

_STRATEGY = "lightning.strategy"
_CALLBACK = "OffloadCallback"
_KINDS = {FSDP_STRATEGY: "fsdp", DEEPSPEED_STRATEGY: "deepspeed", PARALLEL_STRATEGY: "model_parallel"}
_OF_TRAINER = ("gradient_clip_val", "gradient_clip_algorithm")
_REGISTERED = re.compile(r"deepspeed(?:_stage_([123]))?(_offload)?(_nvme)?")
_ZERO = f"{DEEPSPEED}.zero_optimization"
_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "zero_optimization": True,
        "stage": 2,
        "offload_optimizer_device": "cpu",
        "offload_params_device": "cpu",
        "nvme_path": "/local_nvme",
        "pin_memory": False,
        "sub_group_size": 1_000_000_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "zero_allow_untested_optimizer": True,
    }
)
_DEVICES = {
    "offload_optimizer": ("offload_optimizer", "offload_optimizer_device"),
    "offload_parameters": ("offload_param", "offload_params_device"),
}
_IN_ZERO = ("stage", "sub_group_size", "overlap_comm", "contiguous_gradients")
_LEFT_TO_THE_RUN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "fp16.enabled", "bf16.enabled"),
)
_Given = dict[str, tuple[object, Place]]


def recipes(source: Source) -> dict[str, Construction]:
    """Return each Trainer and Fabric of a script that is given a strategy, under the name that asks for it."""
    made = constructions(source, MAKERS)
    given = [each for each in made if "strategy" in each.section.fields] or made[:1]
    if len(given) < 2:
        return {each.kind: each for each in given}
    return {f"{each.kind}:{each.place.line}": each for each in given}


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read the one script; raises `UnusableInput` for anything else, and for several Trainers without a choice."""
    if len(sources) != 1 or sources[0].kind is not Kind.PYTHON or overrides:
        raise UnusableInput(
            f"{', '.join(source.name for source in sources) or 'overrides'}: Lightning is read from one Python script",
            expected="the script that makes the Trainer",
            attempt="that script alone, without --overrides and --compose",
        )
    (source,) = sources
    draft = Draft(LIGHTNING, embeds=EMBEDDED)
    draft.complete = True
    draft.take(source)
    found = recipes(source)
    if source.recipe in found:
        found = {source.recipe: found[source.recipe]}
    if len(found) != 1:
        raise UnusableInput(
            f"{source.name} makes {len(found)} Trainers",
            expected=f"one of {', '.join(found)}" if found else "a Trainer or Fabric",
            attempt=f"{source.name}::{next(iter(found), 'Trainer')}",
        )
    (chosen,) = found.values()
    every = constructions(source, {*MAKERS, *_KINDS, _CALLBACK})
    made = next(each for each in every if each.place == chosen.place)
    _write(draft, made, every, [source.folder] if source.folder else [])
    if re.search(OUR_MODULE, source.text):
        for each in [each for each in every if each.kind == _CALLBACK][:1]:
            draft.set_key("lightning.offload_callback", True, _CALLBACK, each.place)
    return draft.finish()


def _write(draft: Draft, made: Construction, every: Sequence[Construction], folders: Sequence[Path]) -> None:
    draft.set_key("lightning.is_fabric", made.kind == "Fabric", "Fabric", made.place)
    for name, value, place in made.values():
        if name in _OF_TRAINER and value is not None:
            draft.set_key(f"lightning.{name}", value, name, place)
    for value, place in made.section.fields.get("strategy", ())[-1:]:
        strategy = next((each for each in every if each.kind in _KINDS and each.section is value), None)
        if strategy is not None:
            draft.set_key(_STRATEGY, _KINDS[strategy.kind], "strategy", place)
            if strategy.kind == DEEPSPEED_STRATEGY:
                _write_arguments(draft, strategy, folders)
        elif isinstance(value, str):
            _write_registered(draft, value, place)
        elif value is not None:
            draft.leave_open(_STRATEGY)
            _leave_strategies_open(draft, [each for each in every if each.kind in _KINDS], place)


def _leave_strategies_open(draft: Draft, made: Sequence[Construction], place: Place) -> None:
    """Note that one of the strategies that the script makes may count, or none of them."""
    for each in made[:1]:
        draft.section_may_be_set(DEEPSPEED)
        text = f"{each.name} (line {each.place.line}) or what is assigned after it, and nothing is said about either"
        draft.faults.append(Fault("pl-strategy-open", text, place))


def _write_registered(draft: Draft, name: str, place: Place) -> None:
    """Write what a strategy's registered name stands for."""
    if name in ("fsdp", "fsdp_cpu_offload"):
        draft.set_key(_STRATEGY, "fsdp", "strategy", place)
    elif found := _REGISTERED.fullmatch(name):
        draft.set_key(_STRATEGY, "deepspeed", "strategy", place)
        stage, offload, nvme = int(found[1] or 2), bool(found[2]), bool(found[3])
        given: dict[str, object] = {
            "stage": stage,
            "offload_optimizer": offload,
            "offload_parameters": offload and stage == 3,
        }
        if nvme:
            given |= {"offload_optimizer_device": "nvme", "offload_params_device": "nvme"}
        _write_deepspeed(draft, {key: (value, place) for key, value in given.items()}, place, "strategy")
    else:
        draft.set_key(_STRATEGY, name, "strategy", place)


def _write_arguments(draft: Draft, made: Construction, folders: Sequence[Path]) -> None:
    given: _Given = {name: values[-1] for name, values in made.section.fields.items()}
    config, place = given.pop("config", (None, made.place))
    # `strategy.config[..] = ..` changes what the strategy has made of its arguments.
    is_changed = isinstance(config, Section) and bool(config.fields) and not config.is_literal
    if config is None or is_changed:
        if made.is_open or is_changed:
            draft.section_may_be_set(DEEPSPEED)
        else:
            _write_deepspeed(draft, given, made.place)
        return
    ignored = [name for name in given if name in _DEFAULTS or name in _DEVICES]
    if ignored:
        draft.set_key("lightning.ignored_arguments", ignored, ignored[0], given[ignored[0]][1])
    _write_config(draft, plain(config), place, folders)


def _write_config(draft: Draft, config: object, place: Place, folders: Sequence[Path]) -> None:
    """Write the file or dict that takes the place of all arguments."""
    if isinstance(config, dict):
        write_tree(draft, _node(config, place), place.file, spell=lambda path: f"{DEEPSPEED}.{path}")
        section.settle(draft)
    elif isinstance(config, str):
        named = Setting(DEEPSPEED, config, "config", place)
        if not section.follow(draft, named, folders):
            section.leave_open(draft, named)
    else:
        draft.section_may_be_set(DEEPSPEED)
    steps = f"{DEEPSPEED}.gradient_accumulation_steps"
    draft.set_key("lightning.config_accumulates", steps in draft, "config", place)


def _node(value: object, place: Place) -> Node:
    if isinstance(value, dict):
        return Node({str(name): _node(each, place) for name, each in value.items()}, place.line, place.column)
    return Node(value, place.line, place.column)


def _write_deepspeed(draft: Draft, given: _Given, made: Place, written: str = "") -> None:
    """Write the JSON that the strategy makes of its arguments; what none says stands where the strategy is made."""

    def write(key: str, argument: str) -> None:
        value, place = given.get(argument, (_DEFAULTS[argument], made))
        draft.set_key(f"{DEEPSPEED}.{key}", value, written or argument, place)

    uses_zero, where = given.get("zero_optimization", (True, made))
    if isinstance(uses_zero, Section | dict):
        draft.faults.append(Fault("pl-zero-dict", "its fields are never looked at", where))
        uses_zero = True
    if uses_zero is True:
        for name in _IN_ZERO:
            write(f"zero_optimization.{name}", name)
        write("zero_allow_untested_optimizer", "zero_allow_untested_optimizer")
        for switch, (name, device) in _DEVICES.items():
            offloads, _ = given.get(switch, (False, made))
            if offloads is UNREADABLE:
                draft.leave_open(f"{_ZERO}.{name}.device")
            elif offloads:
                write(f"zero_optimization.{name}.device", device)
                if given.get(device, (_DEFAULTS[device], made))[0] != "cpu":
                    # The strategy writes a path in any case, and DeepSpeed reads it for NVMe alone.
                    write(f"zero_optimization.{name}.nvme_path", "nvme_path")
                write(f"zero_optimization.{name}.pin_memory", "pin_memory")
    for name in _LEFT_TO_THE_RUN:
        draft.leave_open(f"{DEEPSPEED}.{name}")
