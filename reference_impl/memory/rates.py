"""What copies, host memory, matrix products and a disk reach on this machine, each the best of a few tries.

Every function returns a rate a second: bytes, or floating point operations. The first try warms up and does not
count. On the CPU twin the copies are those between its two tiers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.memory.slab import Slab
from reference_impl.memory.spill_file import SpillFile

_TRIES = 3


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


def copy_rates(device: Device, size_bytes: int) -> CopyRates:
    """Copy `size_bytes` each way."""
    arena = HostArena(device)
    hosts = [arena.allocate(size_bytes).view(torch.uint8, (size_bytes,)) for _ in range(2)]
    ours = [torch.zeros(size_bytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]

    def out() -> None:
        device.copy_out(hosts[0], ours[0], after=[device.record()])

    def back() -> None:
        device.copy_in(ours[1], hosts[1], after=[device.record()])

    def seconds(*copies: Callable[[], None]) -> float:
        def run() -> None:
            for copy in copies:
                copy()
            device.synchronize()

        return best_seconds(run)

    try:
        return CopyRates(
            d2h=size_bytes / seconds(out),
            h2d=size_bytes / seconds(back),
            duplex=2 * size_bytes / seconds(out, back),
        )
    finally:
        arena.close()


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


def disk_rates(folder: str | Path, size_bytes: int) -> tuple[float, float]:
    """Return bytes/s written to and read from a file in `folder`, past the page cache where it allows that.

    Raises DiskError for a folder that cannot be written or has not the room.
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
