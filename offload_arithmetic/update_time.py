# SPDX-License-Identifier: Apache-2.0
"""The seconds of an update, and which share of it the CPU should do: the least time of the slowest of three resources.

The link, the host's memory and its cores each need a time that grows linearly with the shares. They work at the same
time, so the update takes as long as the slowest of them. The least time lies at an end of the range, or between two
equally slow resources. Explained in docs/optimizer-offloading.md.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from offload_arithmetic.states import StateBytes


class Split(NamedTuple):
    """Shares of all state: on the device, streamed through it, and updated on the CPU; they sum to 1."""

    resident: float
    streamed: float
    cpu: float

    @property
    def streamed_of_offloaded(self) -> float:
        """The streamed share of the states that do not stay on the device."""
        return self.streamed / (self.streamed + self.cpu) if self.streamed else 0.0


class MachineRates(NamedTuple):
    """The rates of one process: link bytes/s one way while both are used, host memory bytes/s, CPU updates/s."""

    link_bytes_per_s: float
    host_bytes_per_s: float
    cpu_elements_per_s: float


class Resource(NamedTuple):
    """The seconds of one resource over the part that the CPU updates: `start_s + slope_s * cpu`."""

    start_s: float
    slope_s: float


def slowest_s(resources: Sequence[Resource], cpu: float) -> float:
    """Return the seconds of the slowest resource where the CPU updates `cpu`."""
    return max(start_s + slope_s * cpu for start_s, slope_s in resources)


def turning_points(resources: Sequence[Resource], least: float, most: float) -> Iterator[float]:
    """Yield both ends of a range of the CPU's part, and where in it two resources are equally slow.

    `slowest_s` is least at one of them.
    """
    yield from (least, most)
    for (start_s, slope_s), (other_start_s, other_slope_s) in combinations(resources, 2):
        if slope_s != other_slope_s:
            cpu = (other_start_s - start_s) / (slope_s - other_slope_s)
            if least < cpu < most:
                yield cpu


def resources_of(
    leaving: float, elements: float, each: StateBytes, rates: MachineRates, *, hidden_bytes: float = 0
) -> Sequence[Resource]:
    """Return link, host memory and cores over the share of `elements` that the CPU updates.

    The rest of the share `leaving` streams. `hidden_bytes` of states come in, and as many go out, in other parts of the
    step.
    """
    link, host = rates.link_bytes_per_s, rates.host_bytes_per_s
    # Each byte passes through host memory once on its way in, and once on its way out.
    return [
        Resource(
            (elements * each.streamed * leaving - hidden_bytes) / link,
            elements * (each.staging - each.streamed) / link,
        ),
        Resource(
            (elements * each.streamed_traffic * leaving - 2 * hidden_bytes) / host,
            elements * (each.cpu_traffic - each.streamed_traffic) / host,
        ),
        Resource(0.0, elements / rates.cpu_elements_per_s),
    ]


def host_bytes_per_s(
    each: StateBytes, *, cpu_per_s: float, streamed_per_s: float, both_per_s: float, cpu_share: float
) -> float:
    """Return the bytes/s of host memory that whole updates have shown, in elements/s: the busiest of the three.

    They were timed on the CPU, streamed, and with `cpu_share` on the CPU and the rest streamed.
    """
    of_both = cpu_share * each.cpu_traffic + (1 - cpu_share) * each.streamed_traffic
    return max(cpu_per_s * each.cpu_traffic, streamed_per_s * each.streamed_traffic, both_per_s * of_both)


def update_seconds(
    split: Split, elements: float, each: StateBytes, rates: MachineRates, *, hidden_bytes: float = 0
) -> float:
    """Return the time of one update of `elements` less `hidden_bytes` each way that the rest of the step hides."""
    leaving = split.streamed + split.cpu
    return slowest_s(resources_of(leaving, elements, each, rates, hidden_bytes=hidden_bytes), split.cpu)


def whole_update_seconds(
    split: Split, elements: int, each: StateBytes, rates: MachineRates, *, hidden_bytes: int = 0
) -> float:
    """Return `update_seconds` and the seconds that no share fills, while the CPU's gradients and weights are copied.

    Where gradients are clipped the CPU begins when the last one has come, and its last weight goes home after all else.
    """
    copy_seconds = elements * each.staging * split.cpu / rates.link_bytes_per_s
    return update_seconds(split, elements, each, rates, hidden_bytes=hidden_bytes) + 2 * copy_seconds
