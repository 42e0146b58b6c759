# SPDX-License-Identifier: Apache-2.0
"""The levers of Megatron beside offloading: its batch, a fused loss, small states, its sequence, and more GPUs.

Apart because only a plan that does not fit loads it.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import fields, levers
from skill_tools.dialects.levers import Kind, Lever
from skill_tools.dialects.run import TrainingRun

_SMALL = {
    "use_precision_aware_optimizer": True,
    "use_distributed_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}


_MOST_TENSOR_RANKS = 8  # of one node, whose GPUs are linked


def found(config: Config, run: TrainingRun) -> Iterator[Lever]:
    """Yield Megatron's levers; the global batch stays, and twice the GPUs are twice the data or pipeline ranks."""
    yield from levers.micro_batches(run, "micro_batch_size")
    if not fields.flag(config, "cross_entropy_loss_fusion"):
        yield Lever(Kind.FUSED_LOSS, "the fused cross entropy", {"cross_entropy_loss_fusion": True})
    if run.adapter is None and run.matrices is None and run.precision.moments_bytes > 4:
        yield Lever(Kind.STATES, "moments in bf16", _SMALL)
    yield from _spread(run)
    yield from levers.sequences(run, "seq_length")
    stages = run.layout.pipeline
    for lever in levers.more_gpus(run):
        yield lever
        if lever.gpus is not None:
            pipeline = stages * lever.gpus // run.layout.gpus
            yield lever._replace(
                label=f"{lever.label}, pipeline parallel size {pipeline}",
                settings={"pipeline_model_parallel_size": pipeline},
            )


def _spread(run: TrainingRun) -> Iterator[Lever]:
    """Yield more tensor parallelism, then more pipeline stages, on the same GPUs: fewer replicas of a smaller part."""
    tensor, replicas = 2 * run.layout.tensor, run.layout.data // 2
    while tensor <= _MOST_TENSOR_RANKS and replicas:
        settings = {"tensor_model_parallel_size": tensor, "sequence_parallel": True}
        yield Lever(Kind.SPREAD, f"tensor parallel size {tensor}", settings)
        tensor, replicas = 2 * tensor, replicas // 2
    pipeline, replicas = 2 * run.layout.pipeline, run.layout.data // 2
    while replicas:
        yield Lever(
            Kind.SPREAD, f"pipeline parallel size {pipeline}", {"pipeline_model_parallel_size": pipeline}
        )
        pipeline, replicas = 2 * pipeline, replicas // 2
