# SPDX-License-Identifier: Apache-2.0
"""Accounting of the host tier: how many bytes mechanisms hold on the host, and how many the host still has.

`host_book` counts bytes that arenas hand out (live) and have reserved (pinned slabs), with the peak since
the last reset. `available_by_pool` reads the bytes that kernel and container still grant, because running out of
host memory kills a job without a traceback.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
from pathlib import Path

from reference_impl.memory.interrupts import UninterruptedLock


class HostMemoryError(MemoryError):
    """The host lacks the memory for a request; raised before anything is allocated."""

    def __init__(
        self, *, needed_bytes: int, available_bytes: int, remedy: str, kind: str = "host memory"
    ) -> None:
        super().__init__(
            f"{kind}: {needed_bytes / 2**30:.2f} GiB needed, "
            f"{available_bytes / 2**30:.2f} GiB available; {remedy}"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.kind = kind


class HostBook:
    """Live, reserved and peak live bytes of the host tier, over all arenas of the process."""

    def __init__(self) -> None:
        # Finalizers count too, and may interrupt the thread that is counting.
        self._lock = UninterruptedLock(threading.RLock())
        self.live_bytes = 0
        self.reserved_bytes = 0
        self.peak_live_bytes = 0

    def add(self, *, live: int = 0, reserved: int = 0) -> None:
        """Add to the counters; negative numbers take away."""
        with self._lock:
            live_bytes, reserved_bytes = self.live_bytes + live, self.reserved_bytes + reserved
            peak_bytes = max(self.peak_live_bytes, live_bytes)
            # All numbers at once, behind the last call that may fail.
            self.live_bytes, self.reserved_bytes, self.peak_live_bytes = (
                live_bytes,
                reserved_bytes,
                peak_bytes,
            )

    def reset_peak(self) -> None:
        """Start a new peak from the bytes that are live now."""
        with self._lock:
            self.peak_live_bytes = self.live_bytes


host_book = HostBook()

# Addresses of the storages that make up the host tier; slabs enter and leave it.
host_storages: set[int] = set()


def available_by_pool() -> dict[str, int]:
    """Return the bytes that can still be taken of the host's memory, and of the container's if it has a limit.

    Processes that share a pool know it by the same key. Sources: `MemAvailable` of /proc/meminfo, and `memory.max` less
    `memory.current` of cgroup v2.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.is_file() else os.uname().nodename
    pools = {f"host {kernel}": available}
    group = Path("/sys/fs/cgroup")
    limit, current = group / "memory.max", group / "memory.current"
    if limit.is_file() and current.is_file():
        granted = limit.read_text().strip()
        if granted != "max":
            pools[f"container {kernel} {group.stat().st_ino}"] = int(granted) - int(current.read_text())
    return pools


def available_bytes(needed_bytes: int = 0) -> int:
    """Return the host memory that can still be taken: the least of the kernel's and the container's answer.

    If less than `needed_bytes` is available, garbage is collected first: closed and dropped objects, states of 100 GB
    among them, may refer to themselves and wait for the collector.
    """
    there_bytes = min(available_by_pool().values())
    if there_bytes < needed_bytes:
        gc.collect()
        there_bytes = min(available_by_pool().values())
    return max(there_bytes, 0)


def left_of_address_space() -> int | None:
    """Return the bytes that this process may still map; None where nobody limits them.

    Sources: `RLIMIT_AS` (`ulimit -v`), and the first number of /proc/self/statm.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(limit - mapped_pages * resource.getpagesize(), 0)
