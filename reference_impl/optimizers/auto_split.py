# SPDX-License-Identifier: Apache-2.0
"""The split of states into resident, streamed and updated on the CPU that takes least time under two budgets.

The resident share costs only device memory, so it is as large as fits. The rest is a search along one line
(`offload_arithmetic.update_time`). The rates are this machine's, from a profile or from a short probe; `layout` divides
the elements.

`reference_impl.probe` returns a profile, and `offload probe` writes one (`schema/profile.schema.json`). A profile of
another machine is not used: the best split there may be the worst here. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload_arithmetic.sizes import LEAST_GAIN
from offload_arithmetic.states import StateBytes, state_bytes
from offload_arithmetic.update_time import (
    MachineRates,
    Split,
    host_bytes_per_s,
    resources_of,
    slowest_s,
    turning_points,
    update_seconds,
    whole_update_seconds,
)
from reference_impl.device import Device
from reference_impl.distributed.ranks import RankGroup
from reference_impl.memory.cores import local_ranks
from reference_impl.memory.document import read_json
from reference_impl.memory.host import HostMemoryError, available_bytes
from reference_impl.memory.rates import copy_rates, host_rate
from reference_impl.optimizers.cpu.rate import cpu_update_rates
from reference_impl.optimizers.cpu.update import TASK_ELEMENTS
from reference_impl.optimizers.cpu.workers import cpu_budget
from reference_impl.optimizers.options import Budgets, Profile

_LOG = logging.getLogger(__name__)
# Large against the start of a copy, small against the three seconds that a constructor may take.
_COPY_BYTES = 2**28
_UPDATES = ("cpu_with_copies_Gparam_s", "streamed_Gparam_s", "both_Gparam_s", "both_cpu_share")


class MatrixBytes(NamedTuple):
    """Bytes of states of matrices: all on the device, and as they cross the link each way."""

    resident: int
    streamed: int


def fastest_split_here(
    elements: int,
    each: StateBytes,
    device: Device,
    budgets: Budgets,
    *,
    ring_bytes: int,
    hidden_bytes: int,
    ranks: RankGroup | None = None,
    matrices: MatrixBytes | None = None,
) -> Split:
    """Return the split with which one update of `elements` takes least time on this machine, and log it.

    `matrices` stream beside them or stay, by the same resident share, and are never on the CPU.

    `ring_bytes` of the device are needed to stream at all. `hidden_bytes` come in during backward, and as many go out
    during the next forward: no part of the update. Raises ValueError for a device budget below the ring or an
    unreadable profile, HostMemoryError for too little host memory.

    With `ranks` all of them probe at once, because they share the host's memory, and each takes the split of the least
    that any of them has: every rank has to call this.
    """
    host_bytes = budgets.host_bytes
    if host_bytes is None:
        host_bytes = int(0.95 * available_bytes()) // local_ranks()
    device_bytes = ring_bytes if budgets.device_bytes is None else budgets.device_bytes
    if matrices is not None:
        if not elements:
            resident = min(max(device_bytes - ring_bytes, 0) / max(matrices.resident, 1), 1.0)
            return Split(resident, 1 - resident, 0.0)
        own = each.resident * elements
        if device_bytes >= own + matrices.resident:
            return Split(1.0, 0.0, 0.0)
        beyond = max(device_bytes - ring_bytes, 0)
        device_bytes -= beyond - int(beyond * own / (own + matrices.resident))
        host_bytes = max(host_bytes - matrices.streamed, 0)
        hidden_bytes -= matrices.streamed
    if ranks is not None:
        free, most = ranks.least([host_bytes, -elements])
        host_bytes, elements = int(free), int(-most)
    rates = machine_rates(device, budgets.profile, ranks)
    split = fastest_split(
        elements,
        each,
        rates,
        ring_bytes=ring_bytes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        hidden_bytes=hidden_bytes,
        least_gain=LEAST_GAIN,
    )
    if ranks is not None:
        # Ranks whose shards have other dtypes reckon with other bytes.
        resident, streamed = ranks.least(split[:2])
        split = Split(resident, streamed, 1 - resident - streamed)
    _say(split, whole_update_seconds(split, elements, each, rates, hidden_bytes=hidden_bytes), elements)
    return split


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
    the CPU's are mixed if that gains `least_gain` of the time of streaming alone with nothing hidden.

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


def machine_rates(
    device: Device, profile: Profile | None = None, ranks: RankGroup | None = None
) -> MachineRates:
    """Return the rates of `profile` if it is of this machine, else those of a short probe; of `ranks` the lowest."""
    if ranks is None:
        return _own_rates(device, profile, lambda: _short_probe(device))
    own = _own_rates(device, profile, lambda: _probe(device, ranks.meet))
    names = sorted(own._fields)
    return MachineRates(**dict(zip(names, ranks.least([own._asdict()[name] for name in names]), strict=True)))


def _own_rates(device: Device, profile: Profile | None, probed: Callable[[], MachineRates]) -> MachineRates:
    if profile is not None:
        hardware = _hardware(profile)
        ours = {"gpu": device.name, "cpus": len(os.sched_getaffinity(0))}
        theirs = {name: hardware[name] for name in ours}
        if theirs == ours:
            return _rates_of(hardware)
        warnings.warn(
            f"the profile is of {theirs}; expected one of this machine, {ours}; it is probed now, try `offload "
            "probe` to keep the result",
            stacklevel=3,
        )
    return probed()


def _rates_of(hardware: Mapping[str, Any]) -> MachineRates:
    """Return the rates shown by a profile's whole updates, of bf16 weights with fp32 states."""
    each = state_bytes([(1, 2)], moments=2)
    cpu, streamed, both, share = (hardware[name] for name in _UPDATES)
    host = host_bytes_per_s(each, cpu_per_s=cpu, streamed_per_s=streamed, both_per_s=both, cpu_share=share)
    return MachineRates(
        link_bytes_per_s=hardware["duplex_total_GBs"] * 1e9 / 2,
        host_bytes_per_s=host * 1e9,
        cpu_elements_per_s=hardware["cpu_adam_fused_Gparam_s"] * 1e9,
    )


def _hardware(profile: Profile) -> Mapping[str, Any]:
    document = profile if isinstance(profile, Mapping) else _read(profile)
    hardware: Mapping[str, Any] = document.get("hardware", {})
    for name in ("gpu", "cpus", "duplex_total_GBs", "cpu_adam_fused_Gparam_s", *_UPDATES):
        if name not in hardware:
            raise ValueError(
                f"the profile has no hardware.{name}; expected a document of reference_impl.probe; try "
                "`offload probe`"
            )
    return hardware


def _read(path: str | Path) -> Any:
    return read_json(path, expected="what reference_impl.probe returns", attempt="`offload probe --out`")


@cache
def _short_probe(device: Device) -> MachineRates:
    """Measure the three rates of a split, in at most three seconds; once a process."""
    return _probe(device, lambda: None)


def _probe(device: Device, meet: Callable[[], None]) -> MachineRates:
    """Measure the three rates of a split, each together with the ranks that `meet` before."""
    began = time.perf_counter()
    meet()
    # The twin's copies and updates share two slow cores with whatever trains there.
    less = 1 if device.is_accelerator else 16
    threads = cpu_budget()
    # A task for each thread: with two more than threads, all but two would idle half of the time.
    updates_per_s = cpu_update_rates(device, threads * TASK_ELEMENTS, [threads])[threads]
    meet()
    with _threads_of_torch(threads):
        host_bytes_per_s = host_rate(device, _COPY_BYTES // less)
    meet()
    # The link last. The driver clears freed device memory with the engine of copies in, and halves its rate for 4 ms
    # a GB: a link of 50 GB/s looked like one of 26 (measured: one NVIDIA H200, driver 580).
    rates = MachineRates(
        link_bytes_per_s=copy_rates(device, _COPY_BYTES // less).duplex / 2,
        host_bytes_per_s=host_bytes_per_s,
        cpu_elements_per_s=updates_per_s,
    )
    _LOG.info("probed this machine for %.1f s: %s", time.perf_counter() - began, rates)
    return rates


@contextmanager
def _threads_of_torch(threads: int) -> Iterator[None]:
    """Let torch's own operations on the CPU run on `threads`; torchrun allows them one."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _say(split: Split, seconds: float, elements: int) -> None:
    _LOG.info(
        "split of the optimizer's state: %.1f %% resident, %.1f %% streamed, %.1f %% on the CPU; one update of "
        "%d parameters takes %.3f s unless it hides",
        *(100 * share for share in split),
        elements,
        seconds,
    )
