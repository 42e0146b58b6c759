# SPDX-License-Identifier: Apache-2.0
"""How long a run computes without offload or recompute: its FLOPs, and seconds of a micro-batch's passes on one GPU.

Matrix products of linears count 2 FLOPs a weight and token, causal attention `2 S` a query element (half the
score matrix, two products). Backward costs twice the linears and 2.5 times the attention, because flash
attention computes the scores again.

Seconds follow from the FLOPs and a share of the machine's GEMM rate, or are scaled to a step that was measured.
The shares are facts in `hardware.yaml`; most of a plan's error in time comes from them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from offload_arithmetic.states import ADAM_MOMENTS, FP32_BYTES
from skill_tools.dialects import parameters
from skill_tools.dialects.matrices import Matrices
from skill_tools.dialects.run import TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.dialects.traced import TracedModel, TracedStep
from skill_tools.planning.cost.machine import Machine, model_constants


class LayerFlops(NamedTuple):
    """Forward FLOPs a token of one decoder layer: attention's linears and core, and the MLP or experts."""

    projections: float
    core: float
    mlp: float

    @property
    def total(self) -> float:
        """Forward FLOPs a token."""
        return self.projections + self.core + self.mlp


def layer_flops(shape: ModelShape, seq_length: int, *, moe: bool) -> LayerFlops:
    """Count one layer's forward."""
    attention = parameters.attention(shape).total
    width = shape.heads * (
        (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim) / 2
        if shape.uses_mla
        else shape.attention_head_dim
    )
    if moe:
        experts = shape.experts_per_token * parameters.mlp(shape, shape.moe_ffn)
        inner = experts + (parameters.mlp(shape, shape.shared_ffn) if shape.shared_ffn else 0)
        inner += shape.hidden * shape.experts
    else:
        inner = parameters.mlp(shape, shape.ffn)
    return LayerFlops(2 * attention, 2 * seq_length * width, 2 * inner)


class PassFlops(NamedTuple):
    """FLOPs of one micro-batch through the whole model: forward, backward, and one more forward of the layers."""

    forward: float
    backward: float
    layers_forward: float
    core_forward: float
    mlp_forward: float


def micro_batch_flops(run: TrainingRun, *, of_experts: float = 1.0) -> PassFlops:
    """Count one micro-batch over the whole model, before it is divided over GPUs; those of experts `of_experts` times.

    A frozen base needs no weight gradients, so its linears' backward costs as much as their forward.
    """
    shape = run.shape
    tokens = run.seq_length * run.micro_batch
    moe_layers = sum(1 for index in range(shape.num_layers) if shape.is_moe(index))
    dense = layer_flops(shape, run.seq_length, moe=False)
    moe = dense
    if moe_layers:
        moe = layer_flops(shape, run.seq_length, moe=True)
        moe = moe._replace(mlp=moe.mlp * of_experts)
    predicted = shape.mtp_layers
    counts = ((dense, shape.num_layers - moe_layers), (moe, moe_layers), (moe, predicted))
    linear = sum(count * (each.projections + each.mlp) for each, count in counts)
    core = sum(count * each.core for each, count in counts)
    mlp = sum(count * each.mlp for each, count in counts)
    head = 2 * shape.vocab * shape.hidden * (1 + predicted)
    weight_passes = 1 if run.adapter else 2
    backward = weight_passes * (linear + head) + 2.5 * core
    return PassFlops(
        tokens * (linear + core + head),
        tokens * backward,
        tokens * (linear + core),
        tokens * core,
        tokens * mlp,
    )


class Pace(NamedTuple):
    """Seconds of one GPU for one micro-batch, and of the compute of a whole step.

    `has_collectives`: they come from a measured step, with its ranks' collectives in it.
    """

    forward_s: float
    backward_s: float
    layers_forward_s: float
    core_forward_s: float
    mlp_forward_s: float
    step_s: float
    gpu_update_s: float
    has_collectives: bool = False


def pace(run: TrainingRun, machine: Machine, shard: int, *, measured_step_s: float | None = None) -> Pace:
    """Return the pace of `run`; `shard` parameters are updated on the GPU when nothing is offloaded."""
    constants = model_constants()
    stages = run.layout.pipeline
    if run.traced is not None:
        return _traced_pace(run, run.traced, machine, shard, measured_step_s)
    share = _share(run, constants)
    rate = machine.gemm * share * run.layout.tensor * run.layout.context
    counted = micro_batch_flops(
        run, of_experts=share / constants["eager_experts_share"] if run.is_eager else 1.0
    )
    each = 1 / rate / stages
    update = _gpu_update_s(run, machine, shard)
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
        measured_step_s is not None,
    )


def _gpu_update_s(run: TrainingRun, machine: Machine, shard: int) -> float:
    """Seconds of the GPU's own update, whose bytes were measured with 12 of master and moments."""
    constants = model_constants()
    updated = 0 if run.adapter else shard
    if run.matrices is not None:
        of_muon = _muon_update_s(run.matrices, machine, constants) * shard / run.matrices.trained
        updated, moments_bytes = round(updated * (1 - run.matrices.share)), float(FP32_BYTES * ADAM_MOMENTS)
    else:
        of_muon, moments_bytes = 0.0, run.precision.moments_bytes
    kept = (run.precision.master_bytes or run.precision.weight_bytes) + moments_bytes
    adam = constants["gpu_adam_bytes"] * kept / 12 * updated / (machine.hbm * constants["gpu_adam_share"])
    return of_muon + adam


def _muon_update_s(matrices: Matrices, machine: Machine, constants: Mapping[str, float]) -> float:
    """Return the seconds of Muon's update of all matrices: products as in a training step, and kernels between."""
    products = matrices.flops / (machine.gemm * constants["eager_share"])
    moved = constants["muon_bytes"] * matrices.share * matrices.trained
    return products + moved / (machine.hbm * constants["elementwise_share"])


def _traced_pace(
    run: TrainingRun, model: TracedModel, machine: Machine, shard: int, measured_step_s: float | None
) -> Pace:
    """Return the pace of a traced step: its matrix products and the bytes of its other kernels.

    A trace has the work of both passes together; the shape's FLOPs divide it.
    """
    passes = traced_seconds(run, model.plain, machine)
    again = traced_seconds(run, model.recomputed, machine) - passes
    update = _gpu_update_s(run, machine, shard)
    step = passes * run.micro_batches
    scale = 1.0 if measured_step_s is None else max(measured_step_s - update, 0.1 * measured_step_s) / step
    counted = micro_batch_flops(run)
    each = passes * scale / (counted.forward + counted.backward)
    return Pace(
        counted.forward * each,
        counted.backward * each,
        again * scale,
        counted.core_forward * each,
        counted.mlp_forward * each,
        step * scale,
        update,
        measured_step_s is not None,
    )


def traced_seconds(run: TrainingRun, step: TracedStep, machine: Machine) -> float:
    """Return the seconds of one micro-batch's forward and backward; the cost of launches bounds it from below."""
    constants = model_constants()
    products = step.flops.at(run.micro_batch, run.seq_length) / machine.gemm
    moved = step.moved_bytes.at(run.micro_batch, run.seq_length)
    others = moved / (machine.hbm * constants["elementwise_share"])
    return max(constants["eager_factor"] * (products + others), launch_seconds(run, step, machine))


def launch_seconds(run: TrainingRun, step: TracedStep, machine: Machine) -> float:
    """Return the seconds for which the host launches one micro-batch's forward and backward."""
    constants = model_constants()
    groups = len(step.layers) + 1 if run.is_fully_sharded else 0
    assert run.traced is not None
    plain = run.traced.plain.kernels
    launched = plain + constants["again_launches"] * (step.kernels - plain)
    launched += groups * constants["group_launches"]
    return launched * (machine.launch_s or constants["launch_s"])


def _share(run: TrainingRun, constants: Mapping[str, float]) -> float:
    if run.is_eager:
        return constants["eager_share"]
    return constants["moe_share"] if run.shape.experts else constants["dense_share"]
