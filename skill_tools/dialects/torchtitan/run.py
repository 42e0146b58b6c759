# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's run from a torchtitan configuration, and lists the changes of a plan in it.

torchtitan trains its own decoders from scratch under FSDP2: weights, gradients and AdamW states in `training.dtype`,
computed in `training.mixed_precision_param`.
"""

import json
from collections.abc import Iterator, Mapping

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.candidates import (
    NO_OFFLOAD,
    RECOMPUTE,
    SHARDED,
    Candidate,
    changed,
    without_recomputation,
)
from skill_tools.dialects.layout import Layout, checked
from skill_tools.dialects.run import Exchange, Mode, Precision, Recompute, TrainingRun
from skill_tools.dialects.shapes import ModelShape

_OFFLOAD, _CHECKPOINTS = "torchtitan.training.enable_cpu_offload", "torchtitan.activation_checkpoint.mode"
_GPUS_OF_A_NODE = 8
_FULL = Recompute(granularity="full")


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run that the TOML describes."""
    assumptions: list[Assumption] = []
    degrees = [
        fields.count(config, f"torchtitan.parallelism.{name}_parallel_degree") or 1
        for name in ("tensor", "pipeline", "context", "expert")
    ]
    world = gpus or _stated_gpus(config, degrees)
    if world is None:
        world = _GPUS_OF_A_NODE
        assumptions.append(Assumption(f"{world} GPUs (one node); say --gpus N for yours", About.GPUS))
    tensor, pipeline, context, expert = degrees
    layout = checked(Layout(gpus=world, tensor=tensor, pipeline=pipeline, context=context, expert=expert))
    replicas = fields.count(config, "torchtitan.parallelism.data_parallel_replicate_degree") or 1
    shards = max(1, layout.dense_shards // replicas)
    micro_batch = fields.count(config, "torchtitan.training.local_batch_size") or 8
    whole = fields.integer(config, "torchtitan.training.global_batch_size") or -1
    if fields.text(config, _CHECKPOINTS) in {None, "selective", "memory_budget"}:
        assumptions.append(
            Assumption("selective checkpointing keeps most saved tensors of a layer: counted as none")
        )
    run = TrainingRun(
        dialect=config.framework,
        shape=shape,
        layout=layout,
        seq_length=fields.count(config, "torchtitan.training.seq_len") or 2048,
        micro_batch=micro_batch,
        micro_batches=max(1, whole // (micro_batch * layout.data)),
        precision=_precision(config, assumptions),
        recompute=_FULL if fields.text(config, _CHECKPOINTS) == "full" else Recompute(),
        weight_shards=shards,
        gradient_shards=shards,
        shards_optimizer=shards > 1,
        loss_bytes=6.0 if fields.flag(config, "torchtitan.compile.enable") else 12.0,
        fused_activation=bool(fields.flag(config, "torchtitan.compile.enable")),
        is_eager=not fields.flag(config, "torchtitan.compile.enable"),
        assumptions=tuple(assumptions),
    )
    return run._replace(exchange=_exchange(run, shards))


def _exchange(run: TrainingRun, shards: int) -> Exchange | None:
    """Return the copies between ranks: weights in bf16, as computed, gradients in fp32 (`mixed_precision_reduce`)."""
    if run.layout.dense_shards == 1:
        return None
    if shards == 1:
        return Exchange(reduced=4, each_batch=False, all_reduces=True)
    group = shards if shards < run.layout.dense_shards else 0
    return Exchange(gathered_forward=2, gathered_backward=2, reduced=4, group=group)


def current(config: Config, run: TrainingRun) -> Mode:
    """Return the mode of the unchanged TOML; without shards nothing offloads."""
    return Mode(offload_parameters=run.weight_shards > 1 and bool(fields.flag(config, _OFFLOAD)))


def candidates(config: Config, run: TrainingRun) -> Iterator[Candidate]:
    """Yield checkpointing or none, with and without FSDP's CPU offload."""
    for recompute, label, mechanisms, mode in (
        (Recompute(), without_recomputation(run), (), "none"),
        (_FULL, "full activation checkpointing", (RECOMPUTE,), "full"),
    ):
        for offloads in (False, True) if run.weight_shards > 1 else (False,):
            yield Candidate(
                Mode(recompute=recompute, offload_parameters=offloads),
                " + ".join(filter(None, (label, "FSDP CPU offload" * offloads))) or NO_OFFLOAD,
                (*mechanisms, SHARDED) if offloads else mechanisms,
                changed(config, {_CHECKPOINTS: mode, _OFFLOAD: offloads}),
            )


def as_toml(spelled: Mapping[str, object]) -> str:
    """Return dotted keys and their values as TOML with sections."""
    sections: dict[str, list[str]] = {}
    for dotted, value in spelled.items():
        section, _, name = dotted.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    return "\n".join("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())


def _stated_gpus(config: Config, degrees: list[int]) -> int | None:
    """Return the GPUs of all degrees together, if the sharding degree is stated; -1 takes all GPUs."""
    shard = fields.integer(config, "torchtitan.parallelism.data_parallel_shard_degree")
    if shard is None or shard < 1:
        return None
    replicas = fields.count(config, "torchtitan.parallelism.data_parallel_replicate_degree") or 1
    return shard * replicas * degrees[0] * degrees[1] * degrees[2]  # experts are spread over the same GPUs


def _precision(config: Config, assumptions: list[Assumption]) -> Precision:
    size = 2 if fields.text(config, "torchtitan.training.dtype") == "bfloat16" else 4
    assumptions.append(
        Assumption(f"sharded weights, gradients and states of {size} B an element, no master weights")
    )
    return Precision(
        weight_bytes=size,
        gradient_bytes=size,
        master_bytes=0,
        moments_bytes=2 * size,
        gradient_is_buffer=False,
    )
