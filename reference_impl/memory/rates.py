# SPDX-License-Identifier: Apache-2.0
"""The rates of copies, host memory, matrix products and a disk on this machine, each the best of a few tries.

Every function returns a rate a second: bytes, or floating point operations. The first try warms up and does not
count. On the CPU twin the copies run between its two tiers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.arena import HostArena
from reference_impl.memory.pinned import limit_pinned_memory
from reference_impl.memory.slab import Slab
from reference_impl.memory.spill_file import SpillFile

_TRIES = 3
_COPIES_A_TRY = 8
_LINK_PROBE_BYTES = 128 * 2**20
# The ring takes a quarter of it, and never more.
_STAGED_LIMIT_BYTES = 2**30


def best_seconds(run: Callable[[], object], *, tries: int = _TRIES) -> float:
    """Return the shortest of `tries` runs after one that does not count."""
    run()
    return min(_seconds(run) for _ in range(tries))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class CopyRates:
    """Pinned copies in bytes/s: each way alone, and both ways together while both run."""

    d2h: float
    h2d: float
    duplex: float


class _Copies:
    """Pinned copies of `size_bytes` each way, side by side."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self._arena = HostArena(device, serves="a measurement")
        self._hosts = [self._arena.allocate(size_bytes).view(torch.uint8, (size_bytes,)) for _ in range(2)]
        self._ours = [
            torch.zeros(size_bytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)
        ]

    def out(self) -> Event:
        return self._device.copy_out(self._hosts[0], self._ours[0], after=[self._device.record()])

    def back(self) -> Event:
        return self._device.copy_in(self._ours[1], self._hosts[1], after=[self._device.record()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._arena.close()


def copy_rates(device: Device, size_bytes: int) -> CopyRates:
    """Copy `size_bytes` each way."""
    with _Copies(device, size_bytes) as copies:

        def seconds(*directions: Callable[[], Event]) -> float:
            def run() -> None:
                for start in directions:
                    start()
                device.synchronize()

            return best_seconds(run)

        return CopyRates(
            d2h=size_bytes / seconds(copies.out),
            h2d=size_bytes / seconds(copies.back),
            duplex=2 * size_bytes / seconds(copies.out, copies.back),
        )


def staged_rate(device: Device, size_bytes: int) -> float:
    """Return bytes/s one way, of pageable memory through the pinned ring, while both ways run.

    Raises RuntimeError where more than the ring is pinned already.
    """
    with limit_pinned_memory(min(_STAGED_LIMIT_BYTES, size_bytes)):
        return copy_rates(device, size_bytes).duplex / 2


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Bytes a second, device to host and host to device, each alone."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float


def measure_link(device: Device, arena: HostArena, *, probe_bytes: int = _LINK_PROBE_BYTES) -> LinkSpeed:
    """Copy `probe_bytes` (at most 128 MiB) a few times each way; the best counts. Waits for the device."""
    probe_bytes = min(probe_bytes, _LINK_PROBE_BYTES)
    block = arena.allocate(probe_bytes)
    host = block.view(torch.uint8, (probe_bytes,))
    on_device = torch.empty(probe_bytes, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    try:
        d2h_s = best_seconds(lambda: device.copy_out(host, on_device, after=()).synchronize())
        h2d_s = best_seconds(lambda: device.copy_in(on_device, host, after=()).synchronize())
    finally:
        arena.free(block)
    return LinkSpeed(d2h_bytes_per_s=probe_bytes / d2h_s, h2d_bytes_per_s=probe_bytes / h2d_s)


def host_rate(device: Device, size_bytes: int) -> float:
    """Return bytes/s of host memory, read and written, while copies run both ways and all cores update in place.

    Shares of an update contend for this rate. `triad_rate` is less: it writes lines without reading them, so the
    cores read them first, uncounted.
    """
    updated, read = (torch.ones(size_bytes // 4) for _ in range(2))
    with _Copies(device, size_bytes) as copies:

        def moved_bytes() -> int:
            ends = [start() for _ in range(_COPIES_A_TRY) for start in (copies.out, copies.back)]
            updates = 0
            while updates == 0 or not all(end.query() for end in ends):
                updated.add_(read, alpha=2)
                updates += 1
            device.synchronize()
            return (len(ends) + 3 * updates) * size_bytes

        def rate() -> float:
            start = time.perf_counter()
            moved = moved_bytes()
            return moved / (time.perf_counter() - start)

        rate()
        return max(rate() for _ in range(_TRIES))


def triad_rate(size_bytes: int) -> float:
    """Return bytes/s of a = b + 2 c over fp32 arrays of `size_bytes` in host memory: two read, one written."""
    a, b, c = (torch.ones(size_bytes // 4) for _ in range(3))
    return 3 * size_bytes / best_seconds(lambda: torch.add(b, c, alpha=2, out=a))


def device_copy_rate(device: Device, size_bytes: int) -> float:
    """Return bytes/s of device memory, read and written, while a tensor of `size_bytes` is copied."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)
        device.synchronize()

    return 2 * size_bytes / best_seconds(run)


def matmul_rate(device: Device, size: int) -> float:
    """Return FLOP/s of the product of two bf16 matrices of (size, size)."""
    left, right = (torch.ones(size, size, dtype=torch.bfloat16, device=device.torch_device) for _ in range(2))

    def run() -> None:
        torch.mm(left, right)
        device.synchronize()

    return 2 * size**3 / best_seconds(run)


def pin_rate(device: Device, size_bytes: int) -> float:
    """Return bytes/s at which host memory becomes usable for copies: mapped, touched and registered."""

    def run() -> None:
        Slab(device, size_bytes, remedy="try a smaller probe").close()

    return size_bytes / best_seconds(run, tries=1)


def most_pinned_bytes(device: Device, most_bytes: int, *, least_bytes: int = 2**25) -> int | None:
    """Return how much host memory can be page-locked at once, to `least_bytes`; None where all of `most_bytes` can.

    A limit is the driver's or the container's (`ulimit -l`), or WSL2's. All is unlocked again.
    """
    pinned: list[Slab] = []
    step_bytes = most_bytes // 8
    try:
        while (pinned_bytes := sum(slab.size_bytes for slab in pinned)) < most_bytes:
            try:
                pinned.append(Slab(device, step_bytes, remedy="try a smaller probe", most_bytes=step_bytes))
            except RuntimeError:
                # The driver has refused; the limit is within this step.
                step_bytes //= 2
                if step_bytes < least_bytes:
                    return pinned_bytes
        return None
    finally:
        for slab in pinned:
            slab.close()


def disk_rates(folder: str | Path, size_bytes: int) -> tuple[float, float]:
    """Return bytes/s written to and read from a file in `folder`, past the page cache if the file system can.

    Raises DiskError for a folder that cannot be written or has too little space.
    """
    file = SpillFile(folder, limit_bytes=size_bytes)
    memory = Slab(Device.of("cpu"), size_bytes, remedy="try a smaller probe", pinned=False)
    try:
        offset = file.allocate(size_bytes)
        written = best_seconds(lambda: file.write(offset, memory.bytes[:size_bytes]), tries=1)
        read = best_seconds(lambda: file.read(offset, memory.bytes[:size_bytes]), tries=1)
        return size_bytes / written, size_bytes / read
    finally:
        memory.close()
        file.close()
