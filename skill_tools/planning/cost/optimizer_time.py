"""What updating offloaded parameters costs, by engine: seconds of work and seconds that do not hide.

`n` below is the number of parameters one rank has offloaded. Rates that were measured for an engine win
over rates that follow from the machine's own; the latter are calibrated only when the machine was measured.
"""

from typing import NamedTuple

from skill_tools.dialects.run import Mode, OptimizerEngine
from skill_tools.planning.cost import own_optimizer
from skill_tools.planning.cost.costs import Cost
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.cost.own_optimizer import Compute


class Update(NamedTuple):
    """The cost of an offloaded update, and whether its rate was measured."""

    cost: Cost
    calibrated: bool


def offloaded(mode: Mode, shard: int, machine: Machine, beside: Compute) -> Update:
    """Return what the offloaded share of `shard` parameters costs a step, `beside` what it may hide behind."""
    moved = mode.optimizer_fraction * shard
    match mode.optimizer_engine:
        case OptimizerEngine.REFERENCE:
            return Update(own_optimizer.cost(mode, shard, machine, beside), machine.measured)
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
