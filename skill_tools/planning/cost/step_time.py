# SPDX-License-Identifier: Apache-2.0
"""Step time of one run under one mode: compute, recomputation, copies, and the optimizer.

Each `Cost` says how long the work takes, how much of it lengthens the step, and by which formula. `calibrated` is
false where a rate was neither measured on the machine nor published for it.
"""

from typing import NamedTuple

from skill_tools.dialects.run import Mode, OptimizerEngine, TrainingRun
from skill_tools.planning.accounts import Cost, Kind
from skill_tools.planning.cost import collectives, copies, pageable, streamed_shards, trained_layers
from skill_tools.planning.cost.compute import Pace
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.cost.optimizer import Compute, offloaded_update
from skill_tools.planning.cost.recompute import recompute_costs
from skill_tools.planning.model.memory import Memory


class StepTime(NamedTuple):
    """One step: `compute_s` of forward and backward alone, and the costs on top of it."""

    compute_s: float
    costs: tuple[Cost, ...]
    calibrated: bool

    @property
    def total_s(self) -> float:
        """Predicted seconds a step."""
        return self.compute_s + sum(cost.exposed_s for cost in self.costs)


def estimate(run: TrainingRun, mode: Mode, memory: Memory, machine: Machine, speed: Pace) -> StepTime:
    """Return the step time of `run` under `mode`."""
    machine = pageable.slowed(machine, memory)
    if mode.trained_layers and not run.is_fully_sharded:
        found = trained_layers.costs(run, mode, memory, machine, speed)
        return StepTime(speed.step_s, tuple(found), machine.measured)
    again = list(recompute_costs(run, mode, memory, machine, speed))
    between = collectives.of_micro_batch(run, memory.parameters, machine)
    link_free = collectives.left_for_copies(speed, between, machine)
    moved = copies.activations(run, mode, memory, machine, link_free)
    again_s = sum(cost.exposed_s for cost in again)
    each = [
        *again,
        *collectives.costs(run, between, speed, again_s),
        *moved,
        *copies.weights(run, mode, memory, machine, link_free, moved, again_s),
        *copies.sharded_parameters(mode, memory, machine, speed),
    ]
    times = run.micro_batches
    costs = [Cost(cost.name, cost.work_s * times, cost.exposed_s * times, cost.formula) for cost in each]
    costs += collectives.once_a_step(run, memory.parameters, machine, speed, again_s)
    if mode.offload_parameters and run.adapter is None:
        return StepTime(speed.step_s, (*costs, _sharded_update(memory, machine)), calibrated=False)
    if mode.state_offload:
        costs.append(_states_over_the_link(mode, memory, machine))
    on_gpu = speed.gpu_update_s * _share_on_gpu(mode)
    if on_gpu:
        costs.append(Cost("optimizer on the GPU", on_gpu, on_gpu, _gpu_update_formula(run)))
    if mode.trained_layers:
        costs += streamed_shards.costs(run, mode, memory, machine, link_free, again_s)
        return StepTime(speed.step_s, tuple(costs), machine.measured)
    if not mode.optimizer_fraction:
        return StepTime(speed.step_s, tuple(costs), machine.measured or not (each or mode.state_offload))
    beside = Compute(
        forward_s=copies.without_one_layer_s(run, link_free.forward_s) - copies.hidden_s(moved, copies.DOWN),
        backward_s=link_free.backward_s,
        gpu_update_s=speed.gpu_update_s,
    )
    update = offloaded_update(
        mode,
        memory.parameters.shard,
        machine,
        beside,
        weight_bytes=run.precision.weight_bytes,
        matrices=run.matrices,
    )
    return StepTime(speed.step_s, (*costs, update.cost), update.calibrated)


def _gpu_update_formula(run: TrainingRun) -> str:
    if run.matrices is None:
        return "28 B a parameter / HBM"
    return f"{run.matrices.flops:.3g} FLOP of Newton-Schulz in bf16, and the kernels beside them"


def _share_on_gpu(mode: Mode) -> float:
    """Return the share of the update that the GPU does.

    The reference implementation updates streamed parameters there too. The time that its CPU share saves the GPU is
    left out, as in `optimizer`.
    """
    if mode.optimizer_engine is OptimizerEngine.REFERENCE:
        return 1.0
    return 1 - mode.optimizer_fraction


def _states_over_the_link(mode: Mode, memory: Memory, machine: Machine) -> Cost:
    """Return the cost of moving all states both ways, with one chunk in turns; nothing else runs meanwhile."""
    moved = sum(line.bytes for line in memory.host if line.kind in (Kind.MASTERS, Kind.MOMENTS))
    seconds, how = moved / machine.duplex_copy, "both ways at once"
    if mode.state_chunk_bytes:
        seconds, how = moved / machine.h2d_copy + moved / machine.d2h_copy, "in, then out"
    return Cost("optimizer states in and out", seconds, seconds, f"bytes / link, {how}")


def _sharded_update(memory: Memory, machine: Machine) -> Cost:
    """Return the cost of updating an offloaded shard of FSDP or ZeRO: on the CPU, between backward and forward."""
    seconds = memory.parameters.shard / machine.cpu_adam
    return Cost("optimizer on the CPU", seconds, seconds, "the shard's parameters at CPU AdamW's rate")
