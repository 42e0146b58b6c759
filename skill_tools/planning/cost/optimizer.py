"""What updating offloaded parameters costs, by engine: seconds of work, and seconds that compute does not hide.

Rates that were measured for an engine win over rates that follow from the machine's own. The latter are
calibrated only when the machine was measured; no constant here was fitted to a step time.

The reference implementation's optimizer updates its offloaded share on the CPU, which moves a gradient and a
weight, or on the GPU while the states stream through it. The link, the host's memory and the cores work at once;
the slowest is the update's time. It hides behind the next forward, whose layers wait for their own weights; where
nothing is clipped the CPU starts in backward already. Explained in docs/optimizer-offloading.md.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from skill_tools.dialects.run import Mode, OptimizerEngine, StreamedStates
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model import reference_numbers as reference
from skill_tools.planning.model.streamed_states import chunk_elements, streamed_bytes


class Update(NamedTuple):
    """The cost of an offloaded update, and whether its rate was measured."""

    cost: Cost
    calibrated: bool


class Compute(NamedTuple):
    """What the update may hide behind, in seconds: one micro-batch's passes, and the GPU's update of everything."""

    forward_s: float
    backward_s: float
    gpu_update_s: float


def offloaded_update(
    mode: Mode, shard: int, machine: Machine, beside: Compute, *, weight_bytes: float = 2
) -> Update:
    """Return what the offloaded share of `shard` parameters costs a step, `beside` what it may hide behind."""
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


class Traffic(NamedTuple):
    """Bytes an element that an update moves over the link one way, and through host memory, by who updates it."""

    cpu_link: float
    cpu_dram: float
    streamed_link: float
    streamed_dram: float


def traffic(states: StreamedStates, weight_bytes: float) -> Traffic:
    """Return the bytes of an element whose weight has `weight_bytes`; an fp32 weight is its own master.

    The CPU's update reads and writes states and staging once, and the copies read or write the staging twice more.
    """
    streamed = streamed_bytes(states, own_master=weight_bytes >= 4)
    return Traffic(
        weight_bytes,
        reference.CPU_DRAM_BYTES + 4 * (weight_bytes - reference.CPU_LINK_BYTES),
        streamed,
        streamed * reference.STREAMED_DRAM_BYTES / reference.STREAMED_LINK_BYTES,
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
    each = traffic(states, weight_bytes)
    link = (each.cpu_link * cpu + each.streamed_link * streamed) / machine.update_link
    memory = (each.cpu_dram * cpu + each.streamed_dram * streamed) / machine.update_dram
    return max(link, memory, cpu / machine.update_cpu)


def best_streamed_share(
    machine: Machine, states: StreamedStates = StreamedStates.EXACT, *, weight_bytes: float = 2
) -> float:
    """Return which share of the offloaded states should be streamed, so that link and host memory finish together."""
    each = traffic(states, weight_bytes)
    bounds = (
        (each.cpu_link / machine.update_link, each.streamed_link / machine.update_link),
        (each.cpu_dram / machine.update_dram, each.streamed_dram / machine.update_dram),
        (1 / machine.update_cpu, 0.0),
    )
    return min(
        crossings(bounds),
        key=lambda share: update_seconds(1 - share, share, machine, states, weight_bytes=weight_bytes),
    )


def crossings(bounds: Sequence[tuple[float, float]]) -> list[float]:
    """Return the streamed shares at which two of `bounds` are as slow, and both ends.

    Each is seconds of an element on the CPU, and of one that streams. The slowest of them is least at one of these.
    """
    found = [0.0, 1.0]
    for (cpu_a, stream_a), (cpu_b, stream_b) in combinations(bounds, 2):
        slope = (stream_a - cpu_a) - (stream_b - cpu_b)
        if slope:
            found.append(min(max((cpu_b - cpu_a) / slope, 0.0), 1.0))
    return found


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
    waiting = min(streamed, reference.SLOTS * chunk_elements(states, own_master=weight_bytes >= 4))
    rest = update_seconds(cpu - done, streamed - waiting, machine, states, weight_bytes=weight_bytes)
    on_gpu = beside.gpu_update_s * (1 - cpu / shard)
    exposed = max(_latency(cpu, machine, weight_bytes), rest - beside.forward_s - on_gpu)
    hides = "backward and the next forward" if mode.updates_in_backward else "the next forward"
    formula = f"{cpu / 1e9:.3f}e9 parameters on the CPU, {streamed / 1e9:.3f}e9 streamed, less {hides}"
    work = update_seconds(cpu, streamed, machine, states, weight_bytes=weight_bytes)
    return Cost("offloaded optimizer", work, exposed, formula)


def _latency(cpu: float, machine: Machine, weight_bytes: float) -> float:
    """Return the seconds of the bucket that the next forward needs first: copied down, updated, copied up."""
    elements = min(cpu, reference.BUCKET_ELEMENTS)
    link = weight_bytes * elements * (1 / machine.d2h_copy + 1 / machine.h2d_copy)
    return link + update_seconds(elements, 0.0, machine, weight_bytes=weight_bytes)
