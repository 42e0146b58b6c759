# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's run from a LLaMA-Factory configuration, and lists the changes of a plan in it.

It trains Hugging Face models: in fp32 with autocast unless `pure_bf16` or ZeRO says otherwise, adapters in fp32 on a
frozen base. Stages with a second model (PPO, DPO with a reference) are planned as the policy alone.
"""

import re
from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.candidates import INPUTS, RECOMPUTE, Candidate, without_recomputation
from skill_tools.dialects.deepspeed import candidates as deepspeed
from skill_tools.dialects.deepspeed import mode as zero
from skill_tools.dialects.layout import Layout, checked
from skill_tools.dialects.parameters import lora
from skill_tools.dialects.run import (
    ActivationEngine,
    Adapter,
    Mode,
    OptimizerEngine,
    Precision,
    Recompute,
    TrainingRun,
)
from skill_tools.dialects.shapes import ModelShape
from skill_tools.dialects.sharding import Part, Sharding, combined, with_exchange, world_of
from skill_tools.dialects.transformers.experts import base_bytes

_BASE_BYTES = {4: 0.53, 8: 1.0}  # NF4 with its scales, and int8
_STATE_BYTES = (("8bit", 2.0), ("4bit", 1.0), ("lion", 4.0), ("sgd", 4.0), ("adafactor", 0.1))
_OFF, _UNSLOTH = "llamafactory.disable_gradient_checkpointing", "llamafactory.use_unsloth_gc"
_FULL = Recompute(granularity="full")
_WITH_ANOTHER_MODEL = frozenset({"ppo", "dpo", "kto", "rm"})


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run that the YAML describes."""
    assumptions: list[Assumption] = []
    stage = _shard_stage(config)
    world = world_of(gpus or _started(config), stage, assumptions)
    seq_length = fields.count(config, "llamafactory.cutoff_len")
    if seq_length is None:
        seq_length = 2048
        assumptions.append(
            Assumption(
                "sequence length 2048: cutoff_len is not set; --overrides cutoff_len=N", About.SEQUENCE_LENGTH
            )
        )
    purpose = fields.text(config, "llamafactory.stage")
    if purpose in _WITH_ANOTHER_MODEL:
        assumptions.append(
            Assumption(f"stage {purpose}: the policy alone, without a reference or reward model")
        )
    run = TrainingRun(
        dialect=config.framework,
        shape=shape,
        layout=checked(Layout(gpus=world)),
        seq_length=seq_length,
        micro_batch=fields.count(config, "micro_batch_size") or 8,
        micro_batches=fields.count(config, "gradient_accumulation_steps") or 1,
        precision=_precision(config, stage, assumptions),
        recompute=_FULL if checkpoints(config) else Recompute(),
        adapter=_adapter(config, shape, assumptions),
        shards_optimizer=stage >= 1,
        weight_shards=world if stage >= 3 else 1,
        gradient_shards=world if stage >= 2 else 1,
        loss_bytes=0.5 if fields.flag(config, "llamafactory.enable_liger_kernel") else 12.0,
        fused_activation=bool(fields.flag(config, "llamafactory.enable_liger_kernel")),
        clips=fields.number(config, "max_grad_norm") != 0,
        is_eager=True,
        norm_bytes=4.0,
        assumptions=tuple(assumptions),
    )
    return with_exchange(run, Sharding(stage, by_deepspeed=True))


def _started(config: Config) -> int | None:
    """Return how many processes the command starts: as its launcher is told, or one for each GPU that it sees."""
    visible = fields.text(config, "env.CUDA_VISIBLE_DEVICES") or ""
    seen = len(visible.split(",")) if re.fullmatch(r"\d+(?:,\d+)*", visible) else None
    return fields.integer(config, "env.WORLD_SIZE") or seen


def checkpoints(config: Config) -> bool:
    """Whether checkpointing recomputes the layers, as it does unless it is turned off."""
    return not fields.flag(config, _OFF)


def current(config: Config, run: TrainingRun) -> Mode:
    """Return the mode that the YAML and its DeepSpeed file ask for."""
    on_host = checkpoints(config) and bool(fields.flag(config, _UNSLOTH))
    asked = zero.mode(config, run) if zero.is_used(config) else _named_mode(config)
    return asked._replace(activation_engine=ActivationEngine.INPUTS if on_host else ActivationEngine.NONE)


def candidates(config: Config, run: TrainingRun) -> Iterator[Candidate]:
    """Yield the ways to keep activations, each with the offloads of its DeepSpeed file."""
    return combined(config, _activations(run), deepspeed.weights(config, current(config, run)))


def _activations(run: TrainingRun) -> Iterator[Part]:
    yield Part({"recompute": Recompute()}, without_recomputation(run), (), {_OFF: True, _UNSLOTH: False})
    yield Part({"recompute": _FULL}, "gradient checkpointing", (RECOMPUTE,), {_OFF: False, _UNSLOTH: False})
    yield Part(
        {"recompute": _FULL, "activation_engine": ActivationEngine.INPUTS},
        "checkpointing with layer inputs offloaded (use_unsloth_gc)",
        (INPUTS,),
        {_OFF: False, _UNSLOTH: True},
    )


def _shard_stage(config: Config) -> int:
    """Return ZeRO's stage; for a missing file, the one in its name (ds_z3_config.json)."""
    stage = zero.stage(config)
    if stage is not None:
        return stage
    named = _file_name(config)
    return next((number for number in (3, 2, 1) if f"z{number}" in named or f"zero{number}" in named), 0)


def _named_mode(config: Config) -> Mode:
    """Return the mode in the name of a missing file: LLaMA-Factory's presets with offload do.

    Its stage 2 offloads the optimizer, its stage 3 the weights too.
    """
    if "offload" not in _file_name(config):
        return Mode()
    whole = _shard_stage(config) == 3
    return Mode(
        optimizer_engine=OptimizerEngine.CPU_ADAM,
        optimizer_fraction=0.0 if whole else 1.0,
        offload_parameters=whole,
        pins=True,
    )


def _file_name(config: Config) -> str:
    """Return the name of the DeepSpeed file, in small letters and without its folder."""
    return str(config.value("deepspeed") or "").rpartition("/")[2].lower()


def _adapter(config: Config, shape: ModelShape, assumptions: list[Assumption]) -> Adapter | None:
    if fields.text(config, "llamafactory.finetuning_type") not in {None, "lora", "oft"}:
        return None
    rank = fields.count(config, "llamafactory.lora_rank") or 8
    base = _BASE_BYTES.get(fields.integer(config, "llamafactory.quantization_bit") or 16, 2.0)
    base = base_bytes(config, shape, base, assumptions)
    assumptions.append(
        Assumption(
            f"rank-{rank} adapters on all linears of attention and dense MLPs; base at {base:.3g} B a weight"
        )
    )
    return Adapter(rank=rank, parameters=lora(shape, rank), base_weight_bytes=base)


def _precision(config: Config, stage: int, assumptions: list[Assumption]) -> Precision:
    optimizer = (fields.text(config, "optimizer") or "adamw_torch").lower()
    small = next((size for name, size in _STATE_BYTES if name in optimizer), None)
    if stage:
        assumptions.append(
            Assumption("bf16 weights and gradients, fp32 masters and states, as DeepSpeed keeps them")
        )
        return Precision(gradient_bytes=2, moments_bytes=small or 8.0, gradient_is_buffer=False)
    size = 2 if fields.flag(config, "llamafactory.pure_bf16") else 4
    assumptions.append(
        Assumption(f"trained weights, gradients and {optimizer} states of {size} B an element")
    )
    return Precision(
        weight_bytes=size,
        gradient_bytes=size,
        master_bytes=0,
        moments_bytes=2.0 * size if small is None else small,
        gradient_is_buffer=False,
    )
