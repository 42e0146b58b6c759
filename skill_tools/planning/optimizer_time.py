"""What updating offloaded parameters costs, by engine: seconds of work and seconds that do not hide.

`n` below is the number of parameters one rank has offloaded. Rates that were measured for an engine win
over rates that follow from the machine's own; the latter are calibrated only when the machine was measured.
"""

from dataclasses import dataclass

from skill_tools.planning.costs import Cost
from skill_tools.planning.machine import Machine
from skill_tools.planning.run import Mode, OptimizerEngine

CPU_DRAM_BYTES, STREAM_DRAM_BYTES = 32, 24  # host memory traffic of one parameter's update
CPU_LINK_BYTES, STREAM_LINK_BYTES = 2, 12  # one way: bf16 gradient or weight; fp32 master and moments


@dataclass(frozen=True, slots=True)
class Update:
    """The cost of an offloaded update, and whether its rate was measured."""

    cost: Cost
    calibrated: bool


def offloaded(mode: Mode, shard: int, machine: Machine, *, next_forward_s: float) -> Update:
    """Return what the offloaded share of `shard` parameters costs a step."""
    moved = mode.optimizer_fraction * shard
    match mode.optimizer_engine:
        case OptimizerEngine.REFERENCE:
            return _reference(mode, shard, machine, next_forward_s)
        case OptimizerEngine.TORCHAO | OptimizerEngine.TORCHAO_GRADIENTS:
            seconds = moved / (2 * machine.cpu_adam_per_tensor) + 2 * moved / machine.h2d_copy
            formula = "bf16 AdamW a tensor at half the bytes, then 2 B up; gradients left in backward"
            return Update(Cost("optimizer on the CPU", seconds, seconds, formula), machine.measured)
        case OptimizerEngine.DEEPSPEED:
            seconds = moved / machine.cpu_adam + 2 * moved / machine.h2d_copy
            formula = "CPU AdamW, then 2 B up; gradients left in backward"
            return Update(Cost("optimizer on the CPU", seconds, seconds, formula), calibrated=False)
    return _megatron(mode, moved, machine)


def _megatron(mode: Mode, moved: float, machine: Machine) -> Update:
    """HybridDeviceOptimizer: fp32 both ways, nothing behind compute.

    With overlap every tensor is an optimizer of its own (slower calls, copies hidden behind them); without,
    one call updates everything and the copies are serial.
    """
    known = machine.hybrid_overlap if mode.overlap else machine.hybrid
    if known is not None:
        each, how, calibrated = (
            1 / known,
            f"at {known / 1e9:.3f} Gparam/s a rank, measured on such a host",
            True,
        )
    elif mode.overlap:
        each = max(1 / machine.cpu_adam_per_tensor, 4 / machine.d2h_copy, 4 / machine.h2d_copy)
        how, calibrated = "at the rate of CPU AdamW a tensor", machine.measured
    else:
        each = 1 / machine.cpu_adam + 4 / machine.d2h_copy + 4 / machine.h2d_copy
        how, calibrated = "CPU AdamW, and 4 B a parameter down and up", machine.measured
    seconds = moved * each
    return Update(
        Cost("optimizer on the CPU", seconds, seconds, f"{moved / 1e9:.3f}e9 parameters {how}"), calibrated
    )


def _reference(mode: Mode, shard: int, machine: Machine, next_forward_s: float) -> Update:
    """Gradients leave in backward, updates hide behind the next forward; clipping is exact."""
    streamed = mode.streamed_fraction * shard
    cpu = mode.optimizer_fraction * shard - streamed
    seconds = update_seconds(cpu, streamed, machine)
    exposed = max(0.0, seconds - next_forward_s)
    formula = (
        f"{cpu / 1e9:.3f}e9 parameters on the CPU, {streamed / 1e9:.3f}e9 streamed, less the next forward"
    )
    return Update(Cost("offloaded optimizer", seconds, exposed, formula), machine.measured)


def update_seconds(cpu: float, streamed: float, machine: Machine) -> float:
    """Return the seconds in which `cpu` and `streamed` parameters can be updated side by side.

    The busiest of the link (one way, both running), the host memory and the CPU decides.
    """
    link = (CPU_LINK_BYTES * cpu + STREAM_LINK_BYTES * streamed) / machine.duplex_copy
    memory = (CPU_DRAM_BYTES * cpu + STREAM_DRAM_BYTES * streamed) / (28 * machine.cpu_adam)
    return max(link, memory, cpu / machine.cpu_adam)


def best_streamed_share(machine: Machine) -> float:
    """Return which share of what leaves should be streamed, so that link and host memory finish together.

    The optimum of a linear program in one variable lies where two of its bounds cross, or at an end.
    """
    rate, dram, link = machine.cpu_adam, 28 * machine.cpu_adam, machine.duplex_copy
    crossings = [0.0, 1.0]
    bounds = (
        (CPU_LINK_BYTES / link, STREAM_LINK_BYTES / link),
        (CPU_DRAM_BYTES / dram, STREAM_DRAM_BYTES / dram),
        (1 / rate, 0.0),
    )
    for index, (cpu_a, stream_a) in enumerate(bounds):
        for cpu_b, stream_b in bounds[index + 1 :]:
            slope = (stream_a - cpu_a) - (stream_b - cpu_b)
            if slope:
                crossings.append(min(max((cpu_b - cpu_a) / slope, 0.0), 1.0))
    return min(crossings, key=lambda share: update_seconds(1 - share, share, machine))
