"""The device buffers that chunks pass through: a few that stay, and more that are borrowed for a while.

A buffer is borrowed during backward, out of memory that backward has freed, so that more of the next update comes in
behind it. It goes back to the allocator when nothing more has to come in and its last chunk has left: that is known
by asking, so that neither the host nor the compute stream waits.
"""

from __future__ import annotations

from collections import deque

import torch

from reference_impl.device import Device
from reference_impl.memory.ring import DeviceRing, Slot

# Copy in, update and copy out each hold one slot.
LEAST_SLOTS = 3


class Slots:
    """Slots of one size. `idle` ones may be taken, from the left, and are written behind their own event.

    Copies in run one after the other, so a slot that falls free late would hold up those behind it: `idle` is in the
    order in which slots fall free, and the early ones are kept.
    """

    def __init__(self, device: Device) -> None:
        """Hold none."""
        self._device = device
        self._slot_bytes = 0
        self._stay = self._most = self._count = 0
        self._leaving: deque[Slot] = deque()
        self.idle: deque[Slot] = deque()

    def make(self, slot_bytes: int, *, stay: int, most: int) -> None:
        """Allocate the slots that stay on the live current stream, unless they are there; all slots are idle."""
        self._most = most
        if slot_bytes <= self._slot_bytes and stay <= self._stay:
            return
        for slot in (*self.idle, *self._leaving):
            self._device.wait(slot.free)
        self._leaving.clear()
        self._slot_bytes, self._stay = slot_bytes, stay
        self.idle = deque(DeviceRing(self._device, slot_bytes=slot_bytes, slots=stay).slots)
        self._count = stay

    def borrow(self, room_bytes: int | None) -> bool:
        """Add a slot where number and `room_bytes` of all borrowed allow it: a new one, or else one that is leaving.

        Allocates on the live current stream.
        """
        self.reap()
        borrowed = self._count - self._stay + 1
        if self._fits(borrowed + len(self._leaving), room_bytes):
            slot = Slot(torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device.torch_device))
            # The first copy into it must run behind whatever used this memory before.
            slot.free = self._device.record()
        elif self._leaving and self._fits(borrowed, room_bytes):
            slot = self._leaving.popleft()
        else:
            return False
        self._count += 1
        self.idle.append(slot)
        return True

    def _fits(self, borrowed: int, room_bytes: int | None) -> bool:
        fits = room_bytes is None or borrowed * self._slot_bytes <= room_bytes
        return fits and self._stay + borrowed <= self._most

    def put(self, slot: Slot, *, needed: int) -> None:
        """Take `slot` back, to be written after its `free`; it leaves where there are idle ones enough without it.

        `needed` more are to be taken before those that stay are all that is wanted.
        """
        if self._count > self._stay and len(self.idle) >= needed + self._stay:
            self._leave(slot)
        else:
            self.idle.append(slot)

    def put_back_borrowed(self) -> None:
        """Let idle slots leave, the last first, until only those that stay are here."""
        while self._count > self._stay and self.idle:
            self._leave(self.idle.pop())

    def _leave(self, slot: Slot) -> None:
        self._count -= 1
        self._leaving.append(slot)
        self.reap()

    def reap(self) -> None:
        """Free the slots that have left and that no copy reads any more, in the order in which they left."""
        while self._leaving and self._leaving[0].free.query():
            self._leaving.popleft()

    @property
    def full(self) -> bool:
        """Whether no slot can be borrowed."""
        return not self._fits(self._count - self._stay + 1, None)

    @property
    def borrowed_bytes(self) -> int:
        """Device bytes that are borrowed and not yet free again."""
        return (self._count - self._stay + len(self._leaving)) * self._slot_bytes
