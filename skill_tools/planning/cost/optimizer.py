"""The cost of updating offloaded parameters, by engine: seconds of work, and seconds that compute does not hide.

Rates that were measured for an engine win over rates that follow from the machine's own. The latter are
calibrated only when the machine was measured; no constant here was fitted to a step time.

The reference implementation's optimizer updates its offloaded share on the CPU, which moves a gradient and a
weight, or on the GPU while the states stream through it. The link, the host's memory and the cores work at once;
the slowest is the update's time. It hides behind the next forward, whose layers wait for their own weights; where
nothing is clipped the CPU starts in backward already. Explained in docs/optimizer-offloading.md.
"""

from typing import NamedTuple

from offload_arithmetic.sizes import BUCKET_ELEMENTS, LEAST_SLOTS
from offload_arithmetic.states import FORMS, adam_bytes
from offload_arithmetic.update_time import MachineRates, resources_of, slowest_s, turning_points
from skill_tools.dialects.run import Mode, OptimizerEngine, StreamedStates
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model.streamed_states import chunk_elements


class Update(NamedTuple):
    """The cost of an offloaded update, and whether its rate was measured."""

    cost: Cost
    calibrated: bool


class Compute(NamedTuple):
    """The seconds behind which the update may hide: one micro-batch's passes, and the GPU's update of everything."""

    forward_s: float
    backward_s: float
    gpu_update_s: float


def offloaded_update(
    mode: Mode, shard: int, machine: Machine, beside: Compute, *, weight_bytes: float = 2
) -> Update:
    """Return the cost of the offloaded share of `shard` parameters in a step, `beside` the work that may hide it."""
    moved = mode.optimizer_fraction * shard
    match mode.optimizer_engine:
        case OptimizerEngine.REFERENCE:
            return Update(_reference(mode, shard, machine, beside, weight_bytes), machine.measured)
        case OptimizerEngine.TORCHAO | OptimizerEngine.TORCHAO_GRADIENTS:
            seconds = moved / (2 * machine.cpu_adam_per_tensor) + 2 * moved / machine.h2d_copy
            formula = "bf16 AdamW tensor by tensor at half the bytes, then 2 B up; gradients are offloaded in backward"
            return Update(Cost("optimizer on the CPU", seconds, seconds, formula), machine.measured)
        case OptimizerEngine.CPU_ADAM:
            seconds = moved / machine.cpu_adam + 2 * moved / machine.h2d_copy
            formula = "CPU AdamW, then 2 B up; gradients are offloaded in backward"
            return Update(Cost("optimizer on the CPU", seconds, seconds, formula), calibrated=False)
    return _hybrid_device(mode, moved, machine)


def _hybrid_device(mode: Mode, moved: float, machine: Machine) -> Update:
    """Return the cost of Megatron's HybridDeviceOptimizer: fp32 both ways, nothing hidden behind compute.

    With overlap every tensor is an optimizer of its own: its calls are slower and hide the copies. Without, one call
    updates everything and the copies are serial.
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


def update_seconds(
    cpu: float,
    streamed: float,
    machine: Machine,
    states: StreamedStates = StreamedStates.EXACT,
    *,
    weight_bytes: float = 2,
) -> float:
    """Return the seconds in which `cpu` and `streamed` elements can be updated side by side, nothing hidden."""
    each = adam_bytes(weight_bytes, FORMS[states])
    return slowest_s(resources_of(cpu + streamed, 1, each, rates(machine)), cpu)


def best_streamed_share(
    machine: Machine, states: StreamedStates = StreamedStates.EXACT, *, weight_bytes: float = 2
) -> float:
    """Return which share of the offloaded states should be streamed, so that link and host memory finish together."""
    resources = resources_of(1.0, 1, adam_bytes(weight_bytes, FORMS[states]), rates(machine))
    return 1 - min(turning_points(resources, 0.0, 1.0), key=lambda cpu: slowest_s(resources, cpu))


def rates(machine: Machine) -> MachineRates:
    """Return the rates of `machine` that an update meets."""
    return MachineRates(machine.update_link, machine.update_dram, machine.update_cpu)


def _reference(mode: Mode, shard: int, machine: Machine, beside: Compute, weight_bytes: float) -> Cost:
    """Return the cost of `reference_impl`'s update of the offloaded share of `shard` elements.

    The CPU also takes work off the GPU. This is left out: it is worth a few percent of a step, and nobody should
    offload for it.
    """
    streamed = mode.streamed_fraction * shard
    cpu = mode.optimizer_fraction * shard - streamed
    done = 0.0
    if mode.updates_in_backward and cpu:
        done = min(
            cpu, beside.backward_s * cpu / update_seconds(cpu, 0.0, machine, weight_bytes=weight_bytes)
        )
    states = mode.streamed_states
    waiting = min(streamed, LEAST_SLOTS * chunk_elements(states, own_master=weight_bytes >= 4))
    rest = update_seconds(cpu - done, streamed - waiting, machine, states, weight_bytes=weight_bytes)
    on_gpu = beside.gpu_update_s * (1 - cpu / shard)
    exposed = max(_latency(cpu, machine, weight_bytes), rest - beside.forward_s - on_gpu)
    hides = "backward and the next forward" if mode.updates_in_backward else "the next forward"
    formula = f"{cpu / 1e9:.3f}e9 parameters on the CPU, {streamed / 1e9:.3f}e9 streamed, less {hides}"
    work = update_seconds(cpu, streamed, machine, states, weight_bytes=weight_bytes)
    return Cost("offloaded optimizer", work, exposed, formula)


def _latency(cpu: float, machine: Machine, weight_bytes: float) -> float:
    """Return the seconds of the bucket that the next forward needs first: copied down, updated, copied up."""
    elements = min(cpu, BUCKET_ELEMENTS)
    link = weight_bytes * elements * (1 / machine.d2h_copy + 1 / machine.h2d_copy)
    return link + update_seconds(elements, 0.0, machine, weight_bytes=weight_bytes)
