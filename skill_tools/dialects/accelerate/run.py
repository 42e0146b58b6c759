# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's run from a configuration of Accelerate: the decisions of its file, plus stated assumptions.

The file shards and offloads; sequence, batch and adapters are the script's, so they are given by
`--overrides seq_length=N`.
"""

from skill_tools.configs.config import Config
from skill_tools.dialects import fields, python_adapters
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.deepspeed import mode as zero
from skill_tools.dialects.layout import Layout, checked
from skill_tools.dialects.parameters import lora
from skill_tools.dialects.run import ActivationEngine, Adapter, Mode, Precision, Recompute, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.dialects.sharding import Sharding, precision_of, with_exchange, world_of
from skill_tools.dialects.transformers.experts import base_bytes
from skill_tools.errors import UnusableInput

FSDP = "accelerate.fsdp_config.fsdp_"
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_OPTIMIZER = "adamw_torch"
_NAMED = {About.SEQUENCE_LENGTH: "sequence length", About.MICRO_BATCH: "micro-batch"}


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run of a script under this file."""
    if config.value("accelerate.distributed_type") == "MEGATRON_LM":
        raise UnusableInput(
            "a run with Megatron-LM under Accelerate has its sizes in megatron_lm_config and in the script",
            expected="distributed_type FSDP, DEEPSPEED, MULTI_GPU or NO",
            attempt="--framework megatron-lm with the arguments of Megatron-LM",
        )
    assumptions: list[Assumption] = []
    sharding = sharding_of(config)
    world = world_of(gpus or _processes(config), sharding.stage, assumptions)
    nodes = fields.count(config, "accelerate.num_machines") or 1
    shards = min(world, 8 if nodes == 1 else max(1, world // nodes)) if _is_hybrid(config) else world
    adapter = _adapter(config, shape, assumptions)
    if not checkpoints(config):
        assumptions.append(
            Assumption(
                "no gradient checkpointing in the script; --overrides recompute_granularity=full if there is",
                About.RECOMPUTE,
            )
        )
    run = TrainingRun(
        dialect=config.framework,
        shape=shape,
        layout=checked(Layout(gpus=world, gpus_per_node=max(1, world // nodes) if nodes > 1 else 8)),
        seq_length=_stated(config, "seq_length", 2048, About.SEQUENCE_LENGTH, assumptions),
        micro_batch=_stated(config, "micro_batch_size", 1, About.MICRO_BATCH, assumptions),
        micro_batches=_micro_batches(config),
        precision=_precision(config, sharding, assumptions, adapted=adapter is not None),
        recompute=Recompute(granularity="full") if checkpoints(config) else Recompute(),
        adapter=adapter,
        shards_optimizer=sharding.stage >= 1,
        weight_shards=shards if sharding.stage >= 3 else 1,
        gradient_shards=shards if sharding.stage >= 2 else 1,
        loss_bytes=12.0,
        fused_activation=False,
        is_eager=True,
        norm_bytes=4.0,
        assumptions=tuple(assumptions),
    )
    return with_exchange(run, sharding, group=shards if shards < world else 0)


def current(config: Config, run: TrainingRun) -> Mode:
    """Return the mode that the file asks for as it stands."""
    if config.value("accelerate.distributed_type") == "DEEPSPEED":
        return zero.mode(config, run)
    is_fsdp = config.value("accelerate.distributed_type") == "FSDP"
    offloads = fields.flag(config, f"{FSDP}activation_checkpointing_offload") and checkpoints(config)
    return Mode(
        activation_engine=ActivationEngine.INPUTS if is_fsdp and offloads else ActivationEngine.NONE,
        offload_parameters=is_fsdp and bool(fields.flag(config, f"{FSDP}offload_params")),
    )


def sharding_of(config: Config) -> Sharding:
    """Return the sharding of the distributed type's section."""
    match config.value("accelerate.distributed_type"):
        case "DEEPSPEED":
            return Sharding(zero.stage(config) or 0, by_deepspeed=True)
        case "FSDP":
            return Sharding(_fsdp_stage(config))
    return Sharding()


def checkpoints(config: Config) -> bool:
    """Whether FSDP, or the script, recomputes the layers."""
    is_fsdp = config.value("accelerate.distributed_type") == "FSDP"
    own = is_fsdp and bool(fields.flag(config, f"{FSDP}activation_checkpointing"))
    return own or fields.text(config, "recompute_granularity") == "full"


def _fsdp_stage(config: Config) -> int:
    """Return ZeRO's stage for FSDP: without resharding, weights stay whole from forward to backward, as at stage 2."""
    if config.value(f"{FSDP}version", 1) == 2:
        return 3 if config.value(f"{FSDP}reshard_after_forward", True) else 2
    return _STAGES.get(str(config.value(f"{FSDP}sharding_strategy", "FULL_SHARD")), 3)


def _is_hybrid(config: Config) -> bool:
    strategy = str(config.value(f"{FSDP}sharding_strategy", ""))
    return config.value(f"{FSDP}version", 1) == 1 and strategy.startswith("HYBRID")


def _processes(config: Config) -> int | None:
    stated = fields.integer(config, "accelerate.num_processes")
    return stated if stated is not None and stated > 0 else None


def _stated(config: Config, key: str, otherwise: int, about: About, assumptions: list[Assumption]) -> int:
    stated = fields.count(config, key)
    if stated is None:
        assumptions.append(
            Assumption(f"{_NAMED[about]} {otherwise}: the script's, not set here; --overrides {key}=N", about)
        )
    return stated or otherwise


def _micro_batches(config: Config) -> int:
    written = config.value("accelerate.deepspeed_config.gradient_accumulation_steps")
    if config.value("gradient_accumulation_steps") is None and isinstance(written, int):
        return max(1, written)
    return fields.count(config, "gradient_accumulation_steps") or 1


def _adapter(config: Config, shape: ModelShape, assumptions: list[Assumption]) -> Adapter | None:
    stated, by_script = config.value("lora_rank"), python_adapters.added(config)
    rank = (
        None if stated is False else fields.count(config, "lora_rank")
    )  # an answer of a plan's own question
    if stated is None and by_script is not None and by_script.counts:
        rank = by_script.rank or python_adapters.UNKNOWN_RANK
        only = f", if {by_script.condition}" if by_script.condition else ""
        assumptions.append(Assumption(f"rank-{rank} adapters, which {by_script.place} adds{only}"))
    if rank is None:
        assumptions.append(
            Assumption("every weight is trained; --overrides lora_rank=N for adapters", About.TRAINED_WEIGHTS)
        )
        return None
    base = python_adapters.BASE_BYTES[by_script.bits if by_script else 16]
    if not (by_script and by_script.is_unsloths):
        base = base_bytes(config, shape, base, assumptions)
    return Adapter(rank=rank, parameters=lora(shape, rank), base_weight_bytes=base)


def _precision(
    config: Config, sharding: Sharding, assumptions: list[Assumption], *, adapted: bool
) -> Precision:
    """Return the bytes kept a parameter: fp32 with FSDP's mixed precision, bf16 throughout without any."""
    mixed = config.value("accelerate.mixed_precision", "no") != "no"
    if sharding.stage and not sharding.by_deepspeed and not mixed:
        sharding = Sharding()
    return precision_of(sharding, _OPTIMIZER, assumptions, adapted=adapted)
