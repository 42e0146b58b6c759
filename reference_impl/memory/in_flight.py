# SPDX-License-Identifier: Apache-2.0
"""Keeps tensors alive while a copy uses them, and no longer.

A copy stream reads a tensor that the compute stream owns. Dropping the last reference too early would let the
allocator give its memory to the next kernel; dropping it late costs peak memory. An entry is released when its event
has been reached or, beyond `limit_bytes`, after the compute stream has been made to wait for that event. No signal
interrupts a method half-way.

Explained in docs/optimizer-offloading.md and docs/activation-offloading.md.
"""

from __future__ import annotations

from collections import deque

from reference_impl.device import Device, Event
from reference_impl.memory.interrupts import UninterruptedLock


class InFlight:
    """References held until their event; at most `limit_bytes` of them without a wait."""

    def __init__(self, device: Device, *, limit_bytes: int) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._counted: deque[tuple[Event, object, int]] = deque()
        self._uncounted: deque[tuple[Event, object]] = deque()
        self._lock = UninterruptedLock()
        self.size_bytes = 0

    def hold(self, event: Event, references: object, size_bytes: int) -> None:
        """Keep `references` (of `size_bytes` on the device) until `event`, then let older ones go."""
        with self._lock:
            self._counted.append((event, references, size_bytes))
            self.size_bytes += size_bytes
            self._drop_reached()
            self._trim(self._limit_bytes)

    def hand_over(self, references: object) -> None:
        """Count `references` no more, since other code counts them now; they are kept until their event."""
        with self._lock:
            for place, (event, kept, size_bytes) in enumerate(self._counted):
                if kept is references:
                    # By its place: comparing entries would compare tensors.
                    del self._counted[place]
                    self.size_bytes -= size_bytes
                    self._uncounted.append((event, references))
                    return

    def keep_until(self, event: Event, references: object) -> None:
        """Keep `references`, uncounted, until `event`. Takes no lock, so a finalizer may call it."""
        self._uncounted.append((event, references))

    def drain(self) -> None:
        """Let go of tensors whose copies have ended; waits for nothing."""
        if not (self._counted or self._uncounted):
            return
        with self._lock:
            self._drop_reached()

    def trim(self, limit_bytes: int) -> None:
        """Make the live current stream wait for the oldest until at most `limit_bytes` are held."""
        if not (self._counted or self._uncounted):
            return
        with self._lock:
            self._drop_reached()
            self._trim(limit_bytes)

    def clear(self) -> None:
        """Make the live current stream wait for everything held, and let it go."""
        self.trim(-1)

    def _trim(self, limit_bytes: int) -> None:
        while self.size_bytes > limit_bytes and self._counted:
            # The live current stream runs behind the copy from here on, so its next allocation may reuse
            # the memory: a wait on the device, not on the host.
            self._device.wait(self._counted[0][0])
            self._drop_oldest()

    def _drop_reached(self) -> None:
        while self._counted and self._counted[0][0].query():
            self._drop_oldest()
        while self._uncounted and self._uncounted[0][0].query():
            self._uncounted.popleft()

    def _drop_oldest(self) -> None:
        _, _, size_bytes = self._counted.popleft()
        self.size_bytes -= size_bytes
