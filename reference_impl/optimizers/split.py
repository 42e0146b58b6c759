"""How much of the state is resident, streamed or updated on the CPU: the least time under two budgets.

The resident share costs only device memory, so it is as large as fits. The rest is a search along one line
(`offload_arithmetic.update_time`). `auto_split.machine_rates` gives the rates, and `layout` decides which elements go
where. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from offload_arithmetic.states import StateBytes
from offload_arithmetic.update_time import (
    MachineRates,
    Split,
    resources_of,
    slowest_s,
    turning_points,
    update_seconds,
)
from reference_impl.memory.host import HostMemoryError


def fastest_split(
    elements: int,
    each: StateBytes,
    rates: MachineRates,
    *,
    ring_bytes: int,
    device_bytes: int,
    host_bytes: int,
    hidden_bytes: int = 0,
    least_gain: float = 0.0,
) -> Split:
    """Return the split with the least update time; `ring_bytes` of the device budget go to streaming.

    `hidden_bytes` of states come in during backward, and as many go out during the next forward. Streamed states and
    those that the CPU updates are mixed where that gains `least_gain` of the time that streaming alone takes with
    nothing hidden.

    Raises ValueError when the device budget is smaller than the ring, HostMemoryError when the host cannot hold
    the states that leave the device.
    """
    everything = each.resident * elements
    if device_bytes >= everything:
        return Split(1.0, 0.0, 0.0)
    if device_bytes < ring_bytes:
        raise ValueError(
            f"device_bytes is {device_bytes}; expected {ring_bytes} or more for the ring of the streamed share; "
            "try that, smaller chunk_bytes, or split=(0, 0, 1)"
        )
    resident = (device_bytes - ring_bytes) / everything
    leaving = 1 - resident
    least, most = _cpu_range(leaving, elements, each, host_bytes)
    resources = resources_of(leaving, elements, each, rates, hidden_bytes=hidden_bytes)
    seconds = {cpu: slowest_s(resources, cpu) for cpu in turning_points(resources, least, most)}
    unmixed_s = update_seconds(Split(resident, leaving - least, least), elements, each, rates)
    good_s = min(seconds.values()) + least_gain * unmixed_s
    cpu = next(cpu for cpu, taken_s in seconds.items() if taken_s <= good_s)
    return Split(resident, leaving - cpu, cpu)


def _cpu_range(leaving: float, elements: int, each: StateBytes, host_bytes: int) -> tuple[float, float]:
    """Return the least and greatest CPU share with which the host can hold all offloaded states."""
    streamed_only = each.streamed * leaving * elements
    if streamed_only > host_bytes:
        raise HostMemoryError(
            needed_bytes=round(streamed_only),
            available_bytes=host_bytes,
            remedy=f"try a larger device_bytes, which keeps {1 - host_bytes / (each.streamed * elements):.0%}",
        )
    spare = (host_bytes - streamed_only) / elements
    # Every element that the CPU takes from the stream costs the host this much more.
    return 0.0, min(leaving, spare / (each.cpu_host - each.streamed))
