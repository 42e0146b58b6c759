# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's run from a Trainer's arguments: full fine-tuning or adapters, under FSDP, DeepSpeed or neither.

A decision of the model's own configuration or of the script, absent from the arguments, is a stated assumption.
Rewards, reference models and generation engines are not modelled.
"""

import re
from pathlib import PurePath

from skill_tools.configs.config import Config
from skill_tools.dialects import fields, python_adapters
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.deepspeed import mode as zero
from skill_tools.dialects.layout import Layout, checked
from skill_tools.dialects.parameters import lora
from skill_tools.dialects.run import ActivationEngine, Adapter, Mode, Recompute, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.dialects.sharding import Sharding, is_torchs_adamw, precision_of, with_exchange, world_of
from skill_tools.dialects.transformers import CLASS, LENGTH, OF_THE_SCRIPT, TRL_CLASSES
from skill_tools.dialects.transformers.classes import takes
from skill_tools.dialects.transformers.experts import base_bytes
from skill_tools.dialects.unsloth.python_script import states_leave, visiting_states

_OPTIMIZER = "adamw_torch_fused"
_BATCH, _LENGTH = 8, 2048
_LENGTHS = {"SFTConfig": 1024, "DPOConfig": 1024, "RewardConfig": 1024, "KTOConfig": 1024}  # of TRL 1.16
_STAGE_IN_A_NAME = r"(?:zero|z|stage)[_-]?([123])"
KWARGS = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run that the arguments describe."""
    assumptions: list[Assumption] = []
    sharding = sharding_of(config)
    started = fields.integer(config, "env.WORLD_SIZE") or fields.count(config, "accelerate.num_processes")
    world = world_of(gpus or started, sharding.stage, assumptions)
    adapter = _adapter(config, shape, assumptions)
    micro_batch = fields.count(config, "micro_batch_size")
    if micro_batch is None:
        assumptions.append(
            Assumption(
                f"micro-batch {_BATCH}, the default; --overrides per_device_train_batch_size=N",
                About.MICRO_BATCH,
            )
        )
    recomputes = checkpoints(config)
    optimizer = fields.text(config, "optimizer") or _OPTIMIZER
    run = TrainingRun(
        dialect=config.framework,
        shape=shape,
        layout=checked(Layout(gpus=world)),
        seq_length=_length(config, assumptions),
        micro_batch=micro_batch or _BATCH,
        micro_batches=fields.count(config, "gradient_accumulation_steps") or 1,
        precision=precision_of(
            sharding,
            optimizer,
            assumptions,
            adapted=adapter is not None,
        ),
        recompute=Recompute(granularity="full") if recomputes else Recompute(),
        adapter=adapter,
        shards_optimizer=sharding.stage >= 1,
        weight_shards=world if sharding.stage >= 3 else 1,
        gradient_shards=world if sharding.stage >= 2 else 1,
        loss_bytes=0.5 if fields.flag(config, "use_liger_kernel") else 12.0,
        fused_activation=bool(fields.flag(config, "use_liger_kernel")),
        is_eager=True,
        keeps_optimizer=not is_torchs_adamw(optimizer),
        norm_bytes=0.0 if fields.flag(config, "use_liger_kernel") else 4.0,
        assumptions=tuple(assumptions),
    )
    return with_exchange(run, sharding)


def current(config: Config, run: TrainingRun) -> Mode:
    """Return the mode that the arguments ask for as they stand."""
    engine, recompute = ActivationEngine.NONE, None
    offloads = bool(fields.flag(config, "activation_offloading"))
    if checkpoints(config):
        by_script = python_adapters.added(config)
        offloads |= any(fields.flag(config, f"{kwargs}.offload") for kwargs in KWARGS)
        offloads |= bool(by_script and by_script.offloads_inputs)
        engine = ActivationEngine.INPUTS if offloads else ActivationEngine.NONE
    elif offloads:
        engine, recompute = ActivationEngine.ON_DEMAND, Recompute()
    if config.value("fsdp"):
        mode = Mode(offload_parameters=_fsdp_offloads(config))
    else:
        mode = zero.mode(config, run) if _by_deepspeed(config) else Mode()
    if states_leave(config) and not mode.offload_parameters:
        mode = mode._replace(**visiting_states(config, run))  # type: ignore[arg-type]
    return mode._replace(activation_engine=engine, recompute=recompute)


def checkpoints(config: Config) -> bool:
    """Whether the Trainer, or FSDP, recomputes the layers; TRL's classes do unless told not to."""
    if config.value("fsdp") and fields.flag(config, "fsdp_config.activation_checkpointing"):
        return True
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if config.value(name) is not None:
            return bool(fields.flag(config, name))
    by_script = python_adapters.added(config)
    if by_script is not None and by_script.recomputes is not None:
        return by_script.recomputes
    return config.value(CLASS) in TRL_CLASSES


def sharding_of(config: Config) -> Sharding:
    """Return the tensors that FSDP or DeepSpeed shards."""
    words = config.value("fsdp")
    if words:
        keeps_whole = (
            _names(words, "shard_grad_op") or config.value("fsdp_config.reshard_after_forward") is False
        )
        return Sharding(2 if keeps_whole else 3)
    return Sharding(_stage(config), by_deepspeed=True) if _by_deepspeed(config) else Sharding()


def _by_deepspeed(config: Config) -> bool:
    return bool(config.value("deepspeed")) or zero.is_used(config)


def _fsdp_offloads(config: Config) -> bool:
    by_section = bool(fields.flag(config, "fsdp_config.cpu_offload"))
    return by_section or _names(config.value("fsdp"), "offload")


def _names(words: object, word: str) -> bool:
    return isinstance(words, list) and word in words


def _stage(config: Config) -> int:
    """Return DeepSpeed's stage; a missing file's stage may stand in its name."""
    stage = zero.stage(config)
    named = config.value("deepspeed")
    if stage is None and isinstance(named, str):
        found = re.search(_STAGE_IN_A_NAME, PurePath(named).name.lower())
        stage = int(found[1]) if found else None
    return stage or 0


def _length(config: Config, assumptions: list[Assumption]) -> int:
    by_script = python_adapters.added(config)
    stated = fields.count(config, LENGTH) or (by_script and by_script.sequence_len)
    if stated:
        return stated
    length = _LENGTHS.get(str(config.value(CLASS)), _LENGTH)
    has_length = takes(str(config.value(CLASS)), "max_length")
    own, where = (
        ("max_length", ": max_length is not set") if has_length else (OF_THE_SCRIPT, ", for the script's own")
    )
    assumptions.append(
        Assumption(
            f"sequence length {length}{where}; --overrides {own}=N",
            About.SEQUENCE_LENGTH,
        )
    )
    return length


def _adapter(config: Config, shape: ModelShape, assumptions: list[Assumption]) -> Adapter | None:
    four, eight = fields.flag(config, "load_in_4bit"), fields.flag(config, "load_in_8bit")
    stated, by_script = fields.flag(config, "use_peft"), python_adapters.added(config)
    if stated is None and by_script is not None and by_script.counts:
        rank = by_script.rank or fields.count(config, "lora_r") or python_adapters.UNKNOWN_RANK
        base = python_adapters.BASE_BYTES[4 if four else 8 if eight else by_script.bits]
        where = f", which {by_script.place} adds"
    elif stated or four or eight:
        rank, where = (
            fields.count(config, "lora_r") or (by_script and by_script.rank) or python_adapters.UNKNOWN_RANK,
            "",
        )
        bits = by_script.bits if by_script else 16
        base = python_adapters.BASE_BYTES[4 if four else 8 if eight else bits]
    else:
        return None
    if not (by_script and by_script.is_unsloths):  # which quantizes experts itself
        base = base_bytes(config, shape, base, assumptions)
    assumptions.append(
        Assumption(
            f"rank-{rank} adapters on the linears of attention and dense MLPs, in fp32{where}; base at {base:.3g} B a "
            "weight"
        )
    )
    return Adapter(rank=rank, parameters=lora(shape, rank), base_weight_bytes=base)
