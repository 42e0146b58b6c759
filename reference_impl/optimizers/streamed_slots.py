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
    """Slots of one size. `idle` ones may be taken from the left, and are written behind their own event."""

    def __init__(self, device: Device) -> None:
        """Hold none."""
        self._device = device
        self._slot_bytes = 0
        self._most = 0
        self._staying: list[Slot] = []
        self._borrowed: set[Slot] = set()
        self._leaving: list[Slot] = []
        self.idle: deque[Slot] = deque()

    def make(self, slot_bytes: int, *, stay: int, most: int) -> None:
        """Allocate the slots that stay on the live current stream, unless they are there; all slots are idle."""
        self._most = most
        if slot_bytes <= self._slot_bytes and stay <= len(self._staying):
            return
        for slot in self._staying:
            self._device.wait(slot.free)
        self._staying.clear()
        self.idle.clear()
        self._slot_bytes = slot_bytes
        self._staying = DeviceRing(self._device, slot_bytes=slot_bytes, slots=stay).slots
        self.idle = deque(self._staying)

    def borrow(self, room_bytes: int | None) -> bool:
        """Add a slot where number and `room_bytes` of all borrowed allow it: one that is leaving, or a new one.

        Allocates on the live current stream.
        """
        self.reap()
        if not self._fits(len(self._borrowed) + 1, room_bytes):
            return False
        if self._leaving:
            slot = self._leaving.pop(0)
        else:
            slot = Slot(torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device.torch_device))
            # The first copy into it must run behind whatever used this memory before.
            slot.free = self._device.record()
        self._borrowed.add(slot)
        self.idle.append(slot)
        return True

    def _fits(self, borrowed: int, room_bytes: int | None) -> bool:
        fits = room_bytes is None or borrowed * self._slot_bytes <= room_bytes
        return fits and len(self._staying) + borrowed <= self._most

    def put(self, slot: Slot, *, needed: int) -> None:
        """Take `slot` back, to be written after its `free`; a borrowed one leaves if `needed` others are idle."""
        if slot in self._borrowed and len(self.idle) >= needed:
            self._leave(slot)
        else:
            self.idle.append(slot)

    def put_back_borrowed(self) -> None:
        """Give all borrowed idle slots back."""
        for slot in [slot for slot in self.idle if slot in self._borrowed]:
            self.idle.remove(slot)
            self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        self._borrowed.remove(slot)
        self._leaving.append(slot)
        self.reap()

    def reap(self) -> None:
        """Free the slots that have left and that no copy reads any more."""
        self._leaving = [slot for slot in self._leaving if not slot.free.query()]

    @property
    def full(self) -> bool:
        """Whether no slot can be borrowed."""
        return not self._fits(len(self._borrowed) + 1, None)

    @property
    def borrowed_bytes(self) -> int:
        """Device bytes that are borrowed and not yet free again."""
        return (len(self._borrowed) + len(self._leaving)) * self._slot_bytes
