# SPDX-License-Identifier: Apache-2.0
"""Who may page-lock how much: one book for the process.

Pinned memory is scarcer than host memory where a container, `ulimit -l` or WSL2 limits it. `limit_pinned_memory` sets
that limit for every mechanism of the process. Memory beyond the limit is pageable: arenas take ordinary memory,
and its copies pass through a ring of pinned buffers (`staged`), whose share of the limit nobody else gets.

Explained in docs/fitting.md, "Pinned memory".
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from offload_arithmetic.sizes import LEAST_PINNED_LIMIT_BYTES
from reference_impl.memory.closing import ClosedAtExit
from reference_impl.memory.host import HostMemoryError
from reference_impl.memory.interrupts import UninterruptedLock

# Longer copies through the ring are no faster.
_MOST_RING_BYTES = 2**28
# Of a small limit.
_RING_SHARE = 4
_PAGE_BYTES = 4096


class PinnedMemoryError(HostMemoryError):
    """More was to be pinned than may be; raised before anything is taken."""

    def __init__(self, *, needed_bytes: int, available_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            remedy=f"try a higher limit_pinned_memory() than {limit_bytes}",
            kind="pinned memory",
        )


class PinnedBook:
    """Pinned bytes of the process, the most at once, and the limit on them: None where there is none."""

    def __init__(self) -> None:
        # Finalizers give back, and may interrupt the thread that takes.
        self._lock = UninterruptedLock(threading.RLock())
        self.limit_bytes: int | None = None
        self.pinned_bytes = 0
        self.peak_bytes = 0
        self._ring_bytes = 0

    @property
    def ring_bytes(self) -> int:
        """The ring's part of the limit: whole pages."""
        most_bytes = min((self.limit_bytes or 0) // _RING_SHARE, _MOST_RING_BYTES)
        return most_bytes - most_bytes % _PAGE_BYTES

    def left_bytes(self, *, for_ring: bool = False) -> int | None:
        """Return how much more may be pinned, `for_ring` or for anything else; None where nothing limits it."""
        if self.limit_bytes is None:
            return None
        kept = 0 if for_ring else self.ring_bytes - self._ring_bytes
        return max(self.limit_bytes - self.pinned_bytes - kept, 0)

    def take(self, size_bytes: int, *, for_ring: bool = False) -> None:
        """Count `size_bytes` that are about to be pinned. Raises PinnedMemoryError beyond the limit."""
        with self._lock:
            left_bytes = self.left_bytes(for_ring=for_ring)
            if left_bytes is not None and size_bytes > left_bytes:
                assert self.limit_bytes is not None
                raise PinnedMemoryError(
                    needed_bytes=size_bytes, available_bytes=left_bytes, limit_bytes=self.limit_bytes
                )
            self._add(size_bytes, for_ring=for_ring)

    def give_back(self, size_bytes: int, *, for_ring: bool = False) -> None:
        """Count `size_bytes` no more."""
        with self._lock:
            self._add(-size_bytes, for_ring=for_ring)

    def set_limit(self, limit_bytes: int | None) -> None:
        """Limit pinned memory. Raises RuntimeError where more is pinned already."""
        if limit_bytes is not None and self.pinned_bytes > limit_bytes:
            # A slab that was closed or dropped may refer to itself and wait for the collector.
            gc.collect()
        with self._lock:
            if limit_bytes is not None and self.pinned_bytes > limit_bytes:
                raise RuntimeError(
                    f"{self.pinned_bytes} bytes are pinned already, and limit_bytes is {limit_bytes}; expected the "
                    "limit before the first offloader; try calling limit_pinned_memory() earlier"
                )
            self.limit_bytes = limit_bytes
            self.peak_bytes = self.pinned_bytes

    def _add(self, size_bytes: int, *, for_ring: bool) -> None:
        pinned_bytes, ring_bytes = self.pinned_bytes + size_bytes, self._ring_bytes + size_bytes * for_ring
        peak_bytes = max(self.peak_bytes, pinned_bytes)
        # All numbers at once, behind the last call that may fail.
        self.pinned_bytes, self._ring_bytes, self.peak_bytes = pinned_bytes, ring_bytes, peak_bytes


pinned_book = PinnedBook()
# Calls that close the rings, when a limit ends.
at_end_of_limit: list[Callable[[], None]] = []


class PinnedLimit(ClosedAtExit):
    """A limit on the pinned memory of this process, from its construction to `close()`; a context manager."""

    def __init__(self, limit_bytes: int) -> None:
        if not isinstance(limit_bytes, int):
            raise TypeError(
                f"the limit on pinned memory is {limit_bytes!r}; expected a number of bytes; try {2**30}, or close() "
                "of the limit before to lift it"
            )
        if limit_bytes < LEAST_PINNED_LIMIT_BYTES:
            raise ValueError(
                f"the limit on pinned memory is {limit_bytes} bytes; expected {LEAST_PINNED_LIMIT_BYTES} or more, for "
                f"the buffers that copies of pageable memory pass through; try {2**30}"
            )
        if pinned_book.limit_bytes is not None:
            raise RuntimeError(
                f"pinned memory is limited already, to {pinned_book.limit_bytes} bytes; expected one limit a process; "
                "try close() on that one before"
            )
        pinned_book.set_limit(limit_bytes)
        self._is_closed = False

    def close(self) -> None:
        """Lift the limit, once every offloader is closed. Calling it again does nothing.

        Raises RuntimeError where pageable memory is still in use.
        """
        if not self._is_closed:
            while at_end_of_limit:
                at_end_of_limit[-1]()
                at_end_of_limit.pop()
            pinned_book.set_limit(None)
            self._is_closed = True

    def __enter__(self) -> PinnedLimit:
        """Return the limit, in force already."""
        return self


def limit_pinned_memory(limit_bytes: int) -> PinnedLimit:
    """Let the offloaders of this process page-lock at most `limit_bytes`; the rest lives in pageable memory.

    Call it before the first of them is made. The limit holds until the end of the process, or of the `with` block:

    >>> with limit_pinned_memory(2**30):
    ...     train()

    Values equal a run's without it, to the bit; copies take longer. Raises TypeError for other types than an integer,
    ValueError for less than 1 MiB, and RuntimeError where there is a limit already, or more is pinned.
    """
    return PinnedLimit(limit_bytes)
