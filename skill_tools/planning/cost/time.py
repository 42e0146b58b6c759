"""Step time of one run under one mode: compute, what is recomputed, what is copied, and the optimizer.

Each `Cost` says how long the work takes, how much of it hides behind compute, and by which formula. What a
number rests on is said with it: `calibrated` is false where a rate was neither measured on the machine nor
published for it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from skill_tools.dialects.run import Mode, OptimizerEngine, Run
from skill_tools.planning.cost import budget_engine, copy_time, optimizer_time
from skill_tools.planning.cost.costs import Cost
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.cost.own_optimizer import Compute
from skill_tools.planning.cost.pace import Pace
from skill_tools.planning.model import kept
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


def estimate(run: Run, mode: Mode, memory: Memory, machine: Machine, speed: Pace) -> StepTime:
    """Return the step time of `run` under `mode`."""
    copies = copy_time.activations(run, mode, memory, machine, speed)
    each = [
        *_recompute(run, mode, memory, machine, speed),
        *_within_budget(run, mode, machine, speed),
        *copies,
        *copy_time.weights(run, mode, memory, machine, speed, copies),
        *copy_time.sharded_parameters(mode, memory, machine, speed),
    ]
    times = run.micro_batches
    costs = [Cost(cost.name, cost.work_s * times, cost.exposed_s * times, cost.formula) for cost in each]
    if mode.offload_parameters and run.adapter is None:
        return StepTime(speed.step_s, (*costs, _sharded_update(memory, machine)), calibrated=False)
    if mode.state_offload:
        costs.append(_states_over_the_link(memory, machine))
    on_gpu = speed.gpu_update_s * _share_on_gpu(mode)
    if on_gpu:
        costs.append(Cost("optimizer on the GPU", on_gpu, on_gpu, "28 B a parameter / HBM"))
    if not mode.optimizer_fraction:
        return StepTime(speed.step_s, tuple(costs), machine.measured or not (each or mode.state_offload))
    beside = Compute(
        forward_s=copy_time.gated(run, speed.forward_s) - copy_time.hidden_s(copies, copy_time.DOWN),
        backward_s=speed.backward_s,
        gpu_update_s=speed.gpu_update_s,
    )
    update = optimizer_time.offloaded(mode, memory.parameters.shard, machine, beside)
    return StepTime(speed.step_s, (*costs, update.cost), update.calibrated)


def _share_on_gpu(mode: Mode) -> float:
    """Return the share of the update that the GPU does.

    The reference implementation's streamed parameters are updated there too, and what its CPU share saves the GPU
    is left out (`own_optimizer.cost`).
    """
    if mode.optimizer_engine is OptimizerEngine.REFERENCE:
        return 1.0
    return 1 - mode.optimizer_fraction


def _states_over_the_link(memory: Memory, machine: Machine) -> Cost:
    """Chunks come and go at once; the slower direction decides, and nothing else runs meanwhile."""
    moved = sum(line.bytes for line in memory.host if line.name in {"master weights", "moments"})
    seconds = moved / machine.duplex_copy
    return Cost("optimizer states in and out", seconds, seconds, "bytes / link, both ways at once")


def _sharded_update(memory: Memory, machine: Machine) -> Cost:
    """FSDP and ZeRO update an offloaded shard on the CPU, after backward and before the next forward."""
    seconds = memory.parameters.shard / machine.cpu_adam
    return Cost("optimizer on the CPU", seconds, seconds, "the shard's parameters at CPU AdamW's rate")


def _within_budget(run: Run, mode: Mode, machine: Machine, speed: Pace) -> Iterator[Cost]:
    if mode.recomputed:
        again = budget_engine.recompute_seconds(run, machine, speed, mode.recomputed) or 0.0
        formula = f"{mode.recomputed:.0%} of the saved bytes, the cheapest first"
        yield Cost("recompute under a budget", again, again, formula)


def _recompute(run: Run, mode: Mode, memory: Memory, machine: Machine, speed: Pace) -> Iterator[Cost]:
    recompute = mode.recompute or run.recompute
    if recompute.granularity == "full":
        layers = run.shape.num_layers / run.layout.pipeline
        share = 1.0 if recompute.method == "uniform" else min(recompute.layers / layers, 1.0)
        again = share * speed.layers_forward_s
    elif recompute.granularity == "selective":
        again = (
            (speed.core_forward_s if "core_attn" in recompute.modules else 0.0)
            + (speed.mlp_forward_s if {"mlp", "moe"} & set(recompute.modules) else 0.0)
            + 2 * kept.dropped_bytes(run, recompute, memory.stage) / machine.hbm
        )
    else:
        return
    yield Cost(f"recompute {recompute.granularity}", again, again, "the recomputed part's forward once more")
