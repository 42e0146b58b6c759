"""How fast a run goes without offload or recompute: seconds of a micro-batch's forward and backward on one GPU.

From FLOPs and a share of the machine's GEMM rate, or scaled to a step that was measured. The shares are
facts in `hardware.yaml`; they are what a step time in a plan can be wrong by.
"""

from collections.abc import Mapping
from typing import NamedTuple

from skill_tools.dialects.run import PYTORCH, Run
from skill_tools.planning.cost.machine import Machine, model_constants
from skill_tools.planning.model import flops


class Pace(NamedTuple):
    """Seconds of one GPU for one micro-batch, and of the compute of a whole step."""

    forward_s: float
    backward_s: float
    layers_forward_s: float
    core_forward_s: float
    mlp_forward_s: float
    step_s: float
    gpu_update_s: float


def of(run: Run, machine: Machine, shard: int, *, measured_step_s: float | None = None) -> Pace:
    """Return the pace of `run`; `shard` parameters are updated on the GPU when nothing is offloaded."""
    constants = model_constants()
    stages = run.layout.pipeline
    rate = machine.gemm * _share(run, constants) * run.layout.tensor * run.layout.context
    counted = flops.micro_batch(run)
    each = 1 / rate / stages
    updated = 0 if run.adapter else shard
    update = constants["gpu_adam_bytes"] * updated / (machine.hbm * constants["gpu_adam_share"])
    bubble = (stages - 1) / run.layout.virtual_stages
    step = (counted.forward + counted.backward) * each * (run.micro_batches + bubble)
    if measured_step_s is not None:
        scale = max(measured_step_s - update, 0.1 * measured_step_s) / step
        each, step = each * scale, step * scale
    return Pace(
        counted.forward * each,
        counted.backward * each,
        counted.layers_forward * each,
        counted.core_forward * each,
        counted.mlp_forward * each,
        step,
        update,
    )


def _share(run: Run, constants: Mapping[str, float]) -> float:
    if run.dialect in {PYTORCH, "axolotl"}:
        return constants["eager_share"]
    return constants["moe_share"] if run.shape.experts else constants["dense_share"]
