"""The optimizer of `reference_impl`: how its offloaded update is split, what it takes, and what of that shows.

Elements whose state left are updated on the CPU, which moves a gradient and a weight, or on the GPU while their state
streams through it. The link, the host's memory and the cores work at once; the slowest is the update's time. It hides
behind the next forward, whose layers wait for their own weights, and where nothing is clipped the CPU starts in
backward already. Rates are the machine's; no constant here was fitted to a step time.
"""

from typing import NamedTuple

from skill_tools.dialects.run import Mode
from skill_tools.planning.cost.costs import Cost
from skill_tools.planning.cost.machine import (
    CPU_DRAM_BYTES,
    CPU_LINK_BYTES,
    STREAM_DRAM_BYTES,
    STREAM_LINK_BYTES,
    Machine,
)

BUCKET_ELEMENTS = 16 << 20
CHUNK_BYTES = 96 << 20
CHUNK_ELEMENTS = CHUNK_BYTES // STREAM_LINK_BYTES
WIDENED_ELEMENTS = 64 << 20  # whose gradients the GPU's own share widens to fp32 at once
SLOTS = 3  # one chunk comes in, one is updated, one goes out


class Compute(NamedTuple):
    """What the update may hide behind, in seconds: one micro-batch's passes, and the GPU's update of everything."""

    forward_s: float
    backward_s: float
    gpu_update_s: float


def ring_bytes(streamed: int) -> int:
    """Return the GPU bytes that streaming needs: slots of one chunk's states, and a chunk's gradients in fp32."""
    slots = min(SLOTS, -(-streamed // CHUNK_ELEMENTS))
    chunk = min(streamed, CHUNK_ELEMENTS)
    return (STREAM_LINK_BYTES * slots + 4) * chunk


def host_bytes(weight_bytes: float) -> float:
    """Return the host bytes of one element that the CPU updates.

    fp32 master and two moments, and a wire in the weight's dtype that carries the gradient down and the weight up.
    """
    return 12 + weight_bytes


def update_seconds(cpu: float, streamed: float, machine: Machine) -> float:
    """Return the seconds in which `cpu` and `streamed` elements can be updated side by side, nothing hidden."""
    link = (CPU_LINK_BYTES * cpu + STREAM_LINK_BYTES * streamed) / machine.update_link
    memory = (CPU_DRAM_BYTES * cpu + STREAM_DRAM_BYTES * streamed) / machine.update_dram
    return max(link, memory, cpu / machine.update_cpu)


def best_streamed_share(machine: Machine) -> float:
    """Return which share of what leaves should be streamed, so that link and host memory finish together.

    The optimum of a linear program in one variable lies where two of its bounds cross, or at an end.
    """
    bounds = (
        (CPU_LINK_BYTES / machine.update_link, STREAM_LINK_BYTES / machine.update_link),
        (CPU_DRAM_BYTES / machine.update_dram, STREAM_DRAM_BYTES / machine.update_dram),
        (1 / machine.update_cpu, 0.0),
    )
    crossings = [0.0, 1.0]
    for index, (cpu_a, stream_a) in enumerate(bounds):
        for cpu_b, stream_b in bounds[index + 1 :]:
            slope = (stream_a - cpu_a) - (stream_b - cpu_b)
            if slope:
                crossings.append(min(max((cpu_b - cpu_a) / slope, 0.0), 1.0))
    return min(crossings, key=lambda share: update_seconds(1 - share, share, machine))


def cost(mode: Mode, shard: int, machine: Machine, beside: Compute) -> Cost:
    """Return the cost of updating the offloaded share of `shard` elements, beside what it hides behind.

    That the CPU takes work off the GPU is left out: it is worth a few percent of a step, and nobody should offload
    for it.
    """
    streamed = mode.streamed_fraction * shard
    cpu = mode.optimizer_fraction * shard - streamed
    done = 0.0
    if mode.updates_in_backward and cpu:
        done = min(cpu, beside.backward_s * cpu / update_seconds(cpu, 0.0, machine))
    waiting = min(streamed, SLOTS * CHUNK_ELEMENTS)
    rest = update_seconds(cpu - done, streamed - waiting, machine)
    on_gpu = beside.gpu_update_s * (1 - cpu / shard)
    exposed = max(_latency(cpu, machine), rest - beside.forward_s - on_gpu)
    hides = "backward and the next forward" if mode.updates_in_backward else "the next forward"
    formula = f"{cpu / 1e9:.3f}e9 parameters on the CPU, {streamed / 1e9:.3f}e9 streamed, less {hides}"
    return Cost("offloaded optimizer", update_seconds(cpu, streamed, machine), exposed, formula)


def _latency(cpu: float, machine: Machine) -> float:
    """Seconds of the bucket that the next forward needs first: down, updated, up."""
    elements = min(cpu, BUCKET_ELEMENTS)
    link = CPU_LINK_BYTES * elements * (1 / machine.d2h_copy + 1 / machine.h2d_copy)
    return link + update_seconds(elements, 0.0, machine)
