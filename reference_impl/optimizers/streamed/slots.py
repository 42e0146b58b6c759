"""The device buffers that chunks pass through: three permanent slots, and extra ones for a while.

An extra slot is allocated during backward, in memory that backward has freed, so that more of the next step is
prefetched. It returns to the allocator when no more chunks need it and its last chunk has been copied out. The host
asks whether that copy is done; neither it nor the compute stream waits.

Explained in docs/optimizer-state-offloading.md, "Memory borrowed from backward".
"""

from __future__ import annotations

from collections import Counter, deque

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.ledger import device_bytes
from reference_impl.memory.ring import DeviceRing, Slot
from reference_impl.optimizers.layout import Member


class Slots:
    """Slots of one size. `idle` ones may be taken, the first one first; each is written behind its own event.

    Copies in run one after the other, so a copy into a slot that becomes free late would delay those behind it.
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
            idle = deque(DeviceRing(self._device, slot_bytes=slot_bytes, slots=permanent).slots)
            self._retired.clear()
            self._slot_bytes, self._permanent, self._count = slot_bytes, permanent, permanent
            self.idle = idle
        self._most = most

    def free(self) -> None:
        """Return the memory of all slots, which are idle, to the allocator, until `restore`.

        The live current stream, which they were allocated on, waits for the copies that use them.
        """
        for slot in (*self.idle, *self._retired):
            self._device.wait(slot.free)
        self.idle.clear()
        self._retired.clear()
        self._count = 0

    def restore(self) -> None:
        """Allocate the permanent slots on the live current stream if they were freed; or raise, and change nothing."""
        if self._count < self._permanent:
            self.idle = deque(
                DeviceRing(self._device, slot_bytes=self._slot_bytes, slots=self._permanent).slots
            )
            self._count = self._permanent

    def take(self) -> Slot:
        """Take the idle slot that becomes free first. Raises IndexError when none is idle."""
        return self.idle.popleft()

    def give_back(self, slot: Slot, *, after: Event, needed: int) -> None:
        """Take `slot` back; it may be written again after the event `after`.

        An extra slot retires if the idle ones suffice without it: `needed` is how many more slots will be taken
        before only the permanent ones are wanted.
        """
        slot.free = after
        if self._count > self._permanent and len(self.idle) >= needed + self._permanent:
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
            slot = Slot(torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device.torch_device))
            # The first copy into it must run behind whatever used this memory before.
            slot.free = self._device.record()
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
        """Free the retired slots that no copy reads any more, in the order in which they were retired."""
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

    def _fits(self, extra: int, limit_bytes: int | None) -> bool:
        fits = limit_bytes is None or extra * self._slot_bytes <= limit_bytes
        return fits and self._permanent + extra <= self._most

    def _retire(self, slot: Slot) -> None:
        self._count -= 1
        self._retired.append(slot)
        self.free_retired()


class FreedMemory:
    """How much of the memory that backward has freed may hold extra slots.

    Backward frees activations from its first layer on. Half of what it has freed since it began may be used, because
    it needs memory for temporaries of its own; so the bytes allocated do not rise above those when it began. With
    several backward passes a step only the last counts, because the forward after any other needs its memory back. As
    many passes are expected as the step before had, none before the first step.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._expected_passes = 0
        self._count = 0
        self._passes: Counter[Member] = Counter()
        self._began_bytes: int | None = None

    def on_gradient(self, member: Member) -> bool:
        """Count a gradient; return whether this is the last backward pass of the step."""
        self._passes[member] += 1
        if self._passes[member] > self._count:
            self._count = self._passes[member]
            self._began_bytes = device_bytes(self._device)
        return self._count == self._expected_passes

    def limit_bytes(self, extra_bytes: int) -> int | None:
        """Return the most bytes of all extra slots, given that there are `extra_bytes` now; None if nobody counts."""
        now = device_bytes(self._device)
        if now is None or self._began_bytes is None:
            return None
        return (self._began_bytes - (now - extra_bytes)) // 2

    def on_step(self) -> None:
        """Begin anew after an optimizer step, unless no gradient has come since the one before."""
        if self._count:
            self._expected_passes, self._count = self._count, 0
            self._passes.clear()
