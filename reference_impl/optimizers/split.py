"""How much of the state is resident, streamed or updated on the CPU: the least time under two budgets.

The link, the host's memory and its cores each need a time that grows linearly with the shares. They work at the same
time, so the update takes as long as the slowest of the three. The resident share costs only device memory, so it is
as large as fits. The rest is a search along one line, whose optimum lies at an end or where two of the three are
equally slow. This is pure arithmetic: `auto_split.machine_rates` gives the rates, and `layout` decides which elements
go where. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from reference_impl.memory.host import HostMemoryError
from reference_impl.optimizers.layout import ALIGNMENT, Split


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """What one process reaches: link bytes/s one way while both run, host memory bytes/s, CPU updates/s."""

    link_bytes_per_s: float
    host_bytes_per_s: float
    cpu_elements_per_s: float


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Mean bytes an element: held by each share, moved one way by the streamed and by the CPU share.

    `staging` is the gradient down and the weight up. Updating on the CPU reads and writes every host byte once, and
    the link's copies read or write staging twice more: `4 * staging + 2 * (cpu_host - staging)` of host traffic.
    """

    resident: float
    streamed: float
    cpu_host: float
    staging: float

    @property
    def cpu_traffic(self) -> float:
        """Bytes of host memory that one CPU update reads and writes, its copies included."""
        return 4 * self.staging + 2 * (self.cpu_host - self.staging)

    @property
    def streamed_traffic(self) -> float:
        """Bytes of host memory that one streamed update reads and writes."""
        return 2 * self.streamed


def state_bytes(
    sizes: Iterable[tuple[int, int]],
    *,
    moments: int,
    moment_bytes: float = 4,
    hi_lo_masters: bool = False,
    compact_low_bits: int | None = None,
) -> StateBytes:
    """Return the mean over parameters of (elements, bytes an element); an fp32 parameter is its own master.

    `compact_low_bits` is for compact states, as in `Streaming`: a code of one byte, and a scale for 64 of them.
    """
    listed = list(sizes)
    elements = max(sum(numel for numel, _ in listed), 1)

    def mean(of_parameter: dict[int, float]) -> float:
        return sum(numel * of_parameter[min(size, 4)] for numel, size in listed) / elements

    low: float = 2 if hi_lo_masters else 4
    if compact_low_bits is not None:
        low, moment_bytes = compact_low_bits / 8, 1 + 2 / ALIGNMENT
    return StateBytes(
        resident=mean({2: 4 + 4 * moments, 4: 4 * moments}),
        streamed=mean({2: low + moment_bytes * moments, 4: moment_bytes * moments}),
        cpu_host=mean({2: 2 + 4 + 4 * moments, 4: 4 + 4 + 4 * moments}),
        staging=mean({2: 2, 4: 4}),
    )


def update_seconds(
    split: Split, elements: int, each: StateBytes, rates: MachineRates, *, hidden_bytes: int = 0
) -> float:
    """Return the time of one update of `elements` less `hidden_bytes` each way that the rest of the step hides."""
    return max(
        start + slope * split.cpu
        for start, slope in _lines(split.streamed + split.cpu, elements, each, rates, hidden_bytes)
    )


def whole_update_seconds(
    split: Split, elements: int, each: StateBytes, rates: MachineRates, *, hidden_bytes: int = 0
) -> float:
    """Return `update_seconds` and what no share fills: the way of the CPU's gradients out, and of its weights back.

    Where gradients are clipped the CPU begins when the last one has come, and its last weight goes home after all else.
    """
    copy_seconds = elements * each.staging * split.cpu / rates.link_bytes_per_s
    return update_seconds(split, elements, each, rates, hidden_bytes=hidden_bytes) + 2 * copy_seconds


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

    `hidden_bytes` of states come in during backward, and as many go out during the next forward. What streams and what
    the CPU updates are mixed where that gains `least_gain` of the time that streaming alone takes with nothing hidden.

    Raises ValueError when the device budget is smaller than the ring, HostMemoryError when the host cannot hold
    what does not stay on the device.
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
    lines = _lines(leaving, elements, each, rates, hidden_bytes)
    splits = [Split(resident, leaving - cpu, cpu) for cpu in (least, most, *_turns(lines, least, most))]
    seconds = [update_seconds(split, elements, each, rates, hidden_bytes=hidden_bytes) for split in splits]
    good = min(seconds) + least_gain * update_seconds(splits[0], elements, each, rates)
    return next(split for split, taken in zip(splits, seconds, strict=True) if taken <= good)


def _cpu_range(leaving: float, elements: int, each: StateBytes, host_bytes: int) -> tuple[float, float]:
    """Return the least and greatest CPU share with which the host can hold what is offloaded."""
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


def _lines(
    leaving: float, elements: int, each: StateBytes, rates: MachineRates, hidden_bytes: int
) -> Sequence[tuple[float, float]]:
    """Return the seconds of link, host memory and cores, each as `start + slope * cpu` of the CPU share."""
    link, host = rates.link_bytes_per_s, rates.host_bytes_per_s
    # What comes in passes through host memory once, and so does what goes out.
    return [
        (
            (elements * each.streamed * leaving - hidden_bytes) / link,
            elements * (each.staging - each.streamed) / link,
        ),
        (
            (elements * each.streamed_traffic * leaving - 2 * hidden_bytes) / host,
            elements * (each.cpu_traffic - each.streamed_traffic) / host,
        ),
        (0.0, elements / rates.cpu_elements_per_s),
    ]


def _turns(lines: Sequence[tuple[float, float]], least: float, most: float) -> Iterator[float]:
    """Yield the CPU shares between both ends at which two resources are equally slow."""
    for (start, slope), (other_start, other_slope) in combinations(lines, 2):
        if slope != other_slope:
            cpu = (other_start - start) / (slope - other_slope)
            if least < cpu < most:
                yield cpu
