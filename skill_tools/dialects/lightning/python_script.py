# SPDX-License-Identifier: Apache-2.0
"""Reads a Python script that makes `Trainer(strategy=..)` or `Fabric(strategy=..)` of Lightning.

DeepSpeedStrategy makes DeepSpeed's JSON of its arguments, or takes a file or dict in place of all of them; both are
kept as `deepspeed.*` keys. Facts: strategies/fsdp.py, strategies/deepspeed.py and plugins/precision/fsdp.py of
lightning 2.5.0 to 2.6.6.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from skill_tools.configs.config import Config, Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.python.values import Section, plain
from skill_tools.configs.source import Source, only_script
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.deepspeed import DEEPSPEED, section
from skill_tools.dialects.deepspeed.python_script import write_literal
from skill_tools.dialects.lightning import (
    DEEPSPEED_STRATEGY,
    EMBEDDED,
    FSDP_STRATEGY,
    LIGHTNING,
    MAKERS,
    OUR_MODULE,
    PARALLEL_STRATEGY,
    STRATEGY,
)
from skill_tools.errors import UnusableInput
from skill_tools.nearest import nearest

_CALLBACK = "OffloadCallback"
_KINDS = {FSDP_STRATEGY: "fsdp", DEEPSPEED_STRATEGY: "deepspeed", PARALLEL_STRATEGY: "model_parallel"}
_OF_TRAINER = ("gradient_clip_val", "gradient_clip_algorithm")
_ENVIRONMENT = "PL_DEEPSPEED_CONFIG_PATH"  # a file that counts for a strategy without config
_REGISTERED = re.compile(r"deepspeed(?:_stage_([123]))?(?:(?<=[123])(_offload)(?:(?<=3_offload)(_nvme))?)?")
_OF_FABRIC_ALONE = "deepspeed_stage_1_offload"
_FSDP_NAMES = ("fsdp", "fsdp_cpu_offload")
_LIKE_A_NAME = re.compile(r"(?:deepspeed|fsdp)\w*")
_ZERO = f"{DEEPSPEED}.zero_optimization"
# The arguments in the order in which they may be given without a name, and their defaults.
_ARGUMENTS: Mapping[str, object] = MappingProxyType(
    {
        "accelerator": None,
        "zero_optimization": True,
        "stage": 2,
        "remote_device": None,
        "offload_optimizer": False,
        "offload_parameters": False,
        "offload_params_device": "cpu",
        "nvme_path": "/local_nvme",
        "params_buffer_count": 5,
        "params_buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
        "offload_optimizer_device": "cpu",
        "optimizer_buffer_count": 4,
        "block_size": 1_048_576,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
        "thread_count": 1,
        "pin_memory": False,
        "sub_group_size": 1_000_000_000_000,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200_000_000,
        "reduce_bucket_size": 200_000_000,
        "zero_allow_untested_optimizer": True,
        "logging_batch_size_per_gpu": "auto",
        "config": None,
        "logging_level": None,
        "parallel_devices": None,
        "cluster_environment": None,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
        "load_full_weights": False,
        "precision_plugin": None,
        "process_group_backend": None,
        "timeout": None,
        "exclude_frozen_parameters": False,
        "precision": None,  # Fabric's name of precision_plugin
    }
)
_IN_ZERO = (
    "stage", "sub_group_size", "overlap_comm", "contiguous_gradients", "allgather_partitions", "reduce_scatter",
    "allgather_bucket_size", "reduce_bucket_size",
)  # fmt: skip
# The parts of each offload: the argument and its name in DeepSpeed; the device, then fields that NVMe alone reads.
_OFFLOADS = {
    "offload_optimizer": (
        "offload_optimizer",
        {"device": "offload_optimizer_device", "pin_memory": "pin_memory"},
        {"nvme_path": "nvme_path", "buffer_count": "optimizer_buffer_count"},
    ),
    "offload_parameters": (
        "offload_param",
        {"device": "offload_params_device", "pin_memory": "pin_memory"},
        {
            "nvme_path": "nvme_path",
            "buffer_count": "params_buffer_count",
            "buffer_size": "params_buffer_size",
            "max_in_cpu": "max_in_cpu",
        },
    ),
}
_BESIDE_ZERO = {
    f"activation_checkpointing.{name}": name
    for name in (
        "partition_activations",
        "cpu_checkpointing",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
    )
} | {f"aio.{name}": name for name in ("block_size", "queue_depth", "single_submit", "overlap_events")}
_NOT_OF_THE_CONFIG = frozenset(
    {
        *("accelerator", "remote_device", "logging_level", "parallel_devices", "cluster_environment"),
        *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
        *("load_full_weights", "precision_plugin", "precision", "process_group_backend", "timeout"),
        *("exclude_frozen_parameters", "logging_batch_size_per_gpu"),
    }
)  # read beside a config, too
_LEFT_TO_THE_RUN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "fp16.enabled", "bf16.enabled"),
)
_Given = dict[str, tuple[object, Place]]


def recipes(source: Source) -> dict[str, Construction]:
    """Return each Trainer and Fabric with a strategy in a script, under the name that selects it."""
    made = constructions(source, MAKERS)
    given = [each for each in made if "strategy" in each.section.fields] or made[:1]
    if len(given) < 2:
        return {each.kind: each for each in given}
    return {f"{each.kind}:{each.place.line}": each for each in given}


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read the one script; raises `UnusableInput` for anything else, and for several Trainers without a choice."""
    source = only_script(sources, overrides, "Lightning", "that makes the Trainer")
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
    _note_no_arguments(draft, every)
    draft.set_key("lightning.is_fabric", made.kind == "Fabric", "Fabric", made.place)
    for name, value, place in made.values():
        if name in _OF_TRAINER and value is not None:
            draft.set_key(f"lightning.{name}", value, name, place)
    for value, place in made.section.fields.get("strategy", ())[-1:]:
        strategy = next((each for each in every if each.kind in _KINDS and each.section is value), None)
        if strategy is not None:
            draft.set_key(STRATEGY, _KINDS[strategy.kind], "strategy", place)
            if strategy.kind == DEEPSPEED_STRATEGY:
                _write_arguments(draft, strategy, folders)
        elif isinstance(value, str):
            _write_registered(draft, value, place, is_fabric=made.kind == "Fabric")
        elif value is not None:
            draft.leave_open(STRATEGY)
            _leave_strategies_open(draft, [each for each in every if each.kind in _KINDS], place)


def _note_no_arguments(draft: Draft, made: Sequence[Construction]) -> None:
    """Note arguments that a DeepSpeedStrategy does not take; it refuses them even without a Trainer."""
    for each in made:
        given = each.section.fields if each.name == DEEPSPEED_STRATEGY else {}
        for name in given.keys() - _ARGUMENTS.keys():
            draft.note_unknown(name, given[name][-1][1], nearest=tuple(nearest(name, _ARGUMENTS)))


def _leave_strategies_open(draft: Draft, made: Sequence[Construction], place: Place) -> None:
    """Note that one of the script's strategies may count, or none."""
    for each in made[:1]:
        draft.section_may_be_set(DEEPSPEED)
        text = f"{each.name} (line {each.place.line}) or a later assignment, and nothing is said about either"
        draft.faults.append(Fault("pl-strategy-open", text, place))


def _write_registered(draft: Draft, name: str, place: Place, *, is_fabric: bool) -> None:
    """Write the arguments that a strategy's registered name stands for."""
    found = _REGISTERED.fullmatch(name) if is_fabric or name != _OF_FABRIC_ALONE else None
    if name in _FSDP_NAMES:
        draft.set_key(STRATEGY, "fsdp", "strategy", place)
    elif found:
        draft.set_key(STRATEGY, "deepspeed", "strategy", place)
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
        draft.set_key(STRATEGY, name, "strategy", place)
        is_registered_here = any(".register(" in text for text in draft.sources.values())
        if _LIKE_A_NAME.fullmatch(name) and not is_registered_here:
            draft.refuse_type(STRATEGY, "the name of a strategy, as deepspeed_stage_3_offload", is_known=True)


def _write_arguments(draft: Draft, made: Construction, folders: Sequence[Path]) -> None:
    given: _Given = {
        name: (value, made.place) for name, value in zip(_ARGUMENTS, made.positional, strict=False)
    }
    given |= {name: values[-1] for name, values in made.section.fields.items()}
    config, place = given.pop("config", (None, made.place))
    # `strategy.config[..] = ..` changes the JSON that the strategy has made of its arguments.
    is_changed = isinstance(config, Section) and bool(config.fields) and not config.is_literal
    if config is None or is_changed:
        if made.is_open or is_changed or any(_ENVIRONMENT in text for text in draft.sources.values()):
            draft.section_may_be_set(DEEPSPEED)
        else:
            _write_deepspeed(draft, given, made.place)
        return
    ignored = [name for name in given if name in _ARGUMENTS and name not in _NOT_OF_THE_CONFIG]
    if ignored:
        draft.set_key("lightning.ignored_arguments", ignored, ignored[0], given[ignored[0]][1])
    _write_config(draft, config, place, folders)


def _write_config(draft: Draft, config: object, place: Place, folders: Sequence[Path]) -> None:
    """Write the file or dict that takes the place of all arguments."""
    if isinstance(config, Section):
        write_literal(draft, config, place)
    elif isinstance(config, str):
        named = Setting(DEEPSPEED, config, "config", place)
        if not section.follow(draft, named, folders):
            section.leave_open(draft, named)
    else:
        draft.section_may_be_set(DEEPSPEED)
    steps = f"{DEEPSPEED}.gradient_accumulation_steps"
    draft.set_key("lightning.config_accumulates", steps in draft, "config", place)


def _write_deepspeed(draft: Draft, given: _Given, made: Place, written: str = "") -> None:
    """Write the strategy's JSON from its arguments; unset values get the place of the strategy."""

    def write(key: str, argument: str) -> None:
        value, place = given.get(argument, (_ARGUMENTS[argument], made))
        draft.set_key(f"{DEEPSPEED}.{key}", plain(value), written or argument, place)

    uses_zero, where = given.get("zero_optimization", (True, made))
    uses_zero = plain(uses_zero)
    if uses_zero and isinstance(uses_zero, dict):
        draft.faults.append(Fault("pl-zero-dict", "its fields are never looked at", where))
    for key, argument in _BESIDE_ZERO.items():
        if argument in given:
            write(key, argument)
    if uses_zero is UNREADABLE:
        draft.section_may_be_set(DEEPSPEED)
    elif uses_zero:
        _write_zero(draft, given, write)
    for name in _LEFT_TO_THE_RUN:
        draft.leave_open(f"{DEEPSPEED}.{name}")


def _write_zero(draft: Draft, given: _Given, write: Callable[[str, str], None]) -> None:
    for name in _IN_ZERO:
        write(f"zero_optimization.{name}", name)
    write("zero_allow_untested_optimizer", "zero_allow_untested_optimizer")
    for switch, (name, always, on_nvme) in _OFFLOADS.items():
        offloads = plain(given[switch][0]) if switch in given else False
        if offloads is UNREADABLE:
            draft.leave_open(f"{_ZERO}.{name}.device")
        elif offloads:
            device, _ = given.get(always["device"], ("cpu", None))
            # The strategy writes NVMe's fields in any case, and DeepSpeed reads it for NVMe alone.
            for key, argument in (always if device == "cpu" else {**always, **on_nvme}).items():
                write(f"zero_optimization.{name}.{key}", argument)
