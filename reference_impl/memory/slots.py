# SPDX-License-Identifier: Apache-2.0
"""Device buffers of one size that streamed data passes through, one after the other.

Three slots let the H2D copy of the next chunk, the computation on this one and the D2H copy of the last run at the same
time. Permanent slots are allocated once on the compute stream, so streaming with them never raises the peak. An extra
slot is allocated where there is room for a while. It returns to the allocator when no more data needs it and its last
copy is done; the host asks for that, and neither it nor the compute stream waits.

Explained in docs/optimizer-state-offloading.md, "Memory borrowed from backward".
"""

from __future__ import annotations

from collections import deque

import torch

from reference_impl.device import Device, Event


class Slot:
    """One buffer: `bytes` is flat uint8; write it only after `free`."""

    __slots__ = ("bytes", "free")

    def __init__(self, bytes_: torch.Tensor, free: Event) -> None:
        self.bytes, self.free = bytes_, free


class Slots:
    """Slots of one size. `idle` ones may be taken, the first one first; each is written behind its own event.

    Copies in run one after the other, so a copy into a slot that becomes free late would delay the copies behind it.
    Therefore `idle` is in the order in which slots become free, and the early ones are kept.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slot_bytes = 0
        self._permanent = self._most = self._count = 0
        self._retired: deque[Slot] = deque()
        self.idle: deque[Slot] = deque()

    def allocate(self, slot_bytes: int, *, permanent: int, most: int) -> None:
        """Allocate the `permanent` slots on the live current stream, unless they exist; afterwards all are idle.

        `most` slots may exist at a time, extra ones included. Changes nothing when it raises.
        """
        if slot_bytes > self._slot_bytes or permanent > self._permanent:
            for slot in (*self.idle, *self._retired):
                self._device.wait(slot.free)
            idle = self._new(permanent, slot_bytes)
            self._retired.clear()
            self._slot_bytes, self._permanent, self._count = slot_bytes, permanent, permanent
            self.idle = idle
        self._most = most

    def free(self) -> None:
        """Return the memory of idle slots to the allocator; permanent ones come again with `restore`.

        They were allocated on the live current stream; it waits for the copies that use them.
        """
        for slot in (*self.idle, *self._retired):
            self._device.wait(slot.free)
        self._count -= len(self.idle)
        self.idle.clear()
        self._retired.clear()

    def restore(self) -> None:
        """Allocate the permanent slots on the live current stream if they were freed; or raise, and change nothing."""
        if self._count < self._permanent:
            self.idle = self._new(self._permanent, self._slot_bytes)
            self._count = self._permanent

    def take(self) -> Slot:
        """Take the idle slot that becomes free first. Raises IndexError when none is idle."""
        return self.idle.popleft()

    def give_back(self, slot: Slot, *, after: Event, needed: int | None = None) -> None:
        """Take `slot` back; it may be written again after the event `after`.

        An extra slot retires if the idle ones suffice without it: `needed` is how many more slots will be taken
        before only the permanent ones are wanted; None keeps it.
        """
        slot.free = after
        if (
            needed is not None
            and self._count > self._permanent
            and len(self.idle) >= needed + self._permanent
        ):
            self._retire(slot)
        else:
            self.idle.append(slot)

    def add_extra(self, limit_bytes: int | None) -> bool:
        """Add an idle slot if the number of slots and `limit_bytes` for all extra ones (None: no limit) allow it.

        It is a new slot, allocated on the live current stream, or else a retired one that is not free yet. Returns
        whether one was added. Raises torch.OutOfMemoryError, before anything has changed.
        """
        self.free_retired()
        extra = self._count - self._permanent + 1
        if self._fits(extra + len(self._retired), limit_bytes):
            (slot,) = self._new(1, self._slot_bytes)
        elif self._retired and self._fits(extra, limit_bytes):
            slot = self._retired.popleft()
        else:
            return False
        self._count += 1
        self.idle.append(slot)
        return True

    def retire_extra(self) -> None:
        """Retire idle slots, the last first, until only as many as are permanent are left."""
        while self._count > self._permanent and self.idle:
            self._retire(self.idle.pop())

    def free_retired(self) -> None:
        """Free the retired slots that no copy reads any more, in the order of their retirement."""
        while self._retired and self._retired[0].free.query():
            self._retired.popleft()

    @property
    def at_limit(self) -> bool:
        """Whether no extra slot may be added, however much memory is free."""
        return not self._fits(self._count - self._permanent + 1, None)

    @property
    def extra_bytes(self) -> int:
        """Device bytes of all extra slots, the retired ones that are not free yet included."""
        return (self._count - self._permanent + len(self._retired)) * self._slot_bytes

    def _new(self, count: int, slot_bytes: int) -> deque[Slot]:
        memory = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=self._device.torch_device) for _ in range(count)
        ]
        # The first copy into a slot must run behind whatever used this memory before.
        born = self._device.record()
        return deque(Slot(each, born) for each in memory)

    def _fits(self, extra: int, limit_bytes: int | None) -> bool:
        fits = limit_bytes is None or extra * self._slot_bytes <= limit_bytes
        return fits and self._permanent + extra <= self._most

    def _retire(self, slot: Slot) -> None:
        self._count -= 1
        self._retired.append(slot)
        self.free_retired()
