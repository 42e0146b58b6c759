# SPDX-License-Identifier: Apache-2.0
"""Device buffers of one size that streamed data passes through, one after the other.

Three slots let the H2D copy of the next chunk, the computation on this one and the D2H copy of the last run at the same
time. Permanent slots are allocated once on the compute stream, so streaming with them never raises the peak. Where
another part of a step needs their memory, they are freed for it and allocated again before they are used. An extra slot
is allocated where there is room for a while. It returns to the allocator when no more data needs it and its last copy
is done; the host asks for that, and neither it nor the compute stream waits.

Explained in docs/optimizer-state-offloading.md, "Memory borrowed from backward".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from reference_impl.device import REACHED, Device, Event


class Slot:
    """One buffer: `bytes` is flat uint8, of the memory of `stream`; write it only after `free`.

    What `holder` has in it is there after `arrived`. Nobody holds an idle slot.
    """

    __slots__ = ("arrived", "bytes", "free", "holder", "stream")

    def __init__(self, bytes_: torch.Tensor, free: Event, stream: Any) -> None:
        self.bytes, self.free, self.stream = bytes_, free, stream
        self.arrived: Event = REACHED
        self.holder: Any = None


# Holds the slots that go back to the allocator once their last copy is done.
_NOBODY_MORE = object()


class Slots:
    """Slots of one size. Idle ones may be filled, the first one first; each is written behind its own event.

    Copies in run one after the other, so a copy into a slot that becomes free late would delay the copies behind it.
    Therefore idle slots are in the order in which they become free, and the early ones are kept.

    A slot changes hands by one store, that of its holder. So no signal loses a slot, or leaves it to two holders.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slot_bytes = 0
        self._permanent = self._most = 0
        # Held ones in the order of their copies, then idle ones; replaced as a whole.
        self._all: list[Slot] = []

    @property
    def idle(self) -> list[Slot]:
        """The slots that nobody holds, the one that becomes free first in front."""
        return [slot for slot in self._all if slot.holder is None]

    @property
    def first_idle(self) -> Slot | None:
        """The first of them, if there is one."""
        return self.held_by(None)

    @property
    def held(self) -> list[Slot]:
        """The slots that somebody holds, in the order of their copies in."""
        return [slot for slot in self._all if slot.holder is not None and slot.holder is not _NOBODY_MORE]

    def held_by(self, holder: object) -> Slot | None:
        """Return the slot that `holder` holds, if there is one."""
        # The pipeline asks several times a chunk.
        for slot in self._all:
            if slot.holder is holder:
                return slot
        return None

    def allocate(self, slot_bytes: int, *, permanent: int, most: int) -> None:
        """Allocate the `permanent` slots on the live current stream, unless they exist; afterwards all are idle.

        `most` slots may exist at a time, extra ones included. Changes nothing when it raises.
        """
        if slot_bytes > self._slot_bytes or permanent > self._permanent:
            self._await_copies(self._all)
            # The slots first: too long ones serve as well.
            self._all = self._new(permanent, slot_bytes)
            self._slot_bytes, self._permanent = slot_bytes, permanent
        self._most = most

    def free(self) -> None:
        """Return the memory of idle slots to the allocator; permanent ones come again with `restore`.

        Their stream waits for the copies that use them, so that its later kernels may have the memory.
        """
        held = self.held
        self._await_copies([*self.idle, *self._retired])
        self._all = held

    def restore(self) -> None:
        """Allocate the permanent slots on the live current stream if they were freed; or raise, and change nothing.

        Other tensors of the step have had their memory, and are gone by now. So it is in the allocator's cache, and
        steps of one shape ask the driver for no more than the first of them.
        """
        missing = self._permanent - self._count
        if missing > 0:
            self._all = [*self._all, *self._new(missing, self._slot_bytes)]

    def fill(self, holder: object, copy: Callable[[Slot], Event]) -> None:
        """Have `copy` fill the first idle slot; once it has, `holder` holds that. `copy` returns when it has arrived.

        Raises IndexError when no slot is idle.
        """
        slot = self.first_idle
        if slot is None:
            raise IndexError("no slot is idle")
        try:
            slot.arrived = copy(slot)
            slot.holder = holder
        except BaseException:
            # Nobody knows how far the copy has come, and the memory of idle slots goes back to the allocator.
            with suppress(Exception):
                self._device.synchronize()
            raise

    def give_back(self, slot: Slot, *, after: Event, needed: int | None = None) -> None:
        """Take `slot` back; it may be written again after the event `after`.

        An extra slot retires if the idle ones suffice without it: `needed` is how many more slots will be filled
        before only the permanent ones are wanted; None keeps it.
        """
        slot.free = after
        if (
            needed is not None
            and self._has_extra
            and self._count > self._permanent
            and len(self.idle) >= needed + self._permanent
        ):
            slot.holder = _NOBODY_MORE
            self.free_retired()
        else:
            self._be_idle(slot)

    def add_extra(self, limit_bytes: int | None) -> bool:
        """Add an idle slot if the number of slots and `limit_bytes` for all extra ones (None: no limit) allow it.

        It is a new slot, allocated on the live current stream, or else a retired one that is not free yet. Returns
        whether one was added. Raises torch.OutOfMemoryError, before anything has changed.
        """
        self.free_retired()
        extra, retired = self._count - self._permanent + 1, list(self._retired)
        if self._fits(extra + len(retired), limit_bytes):
            self._all = [*self._all, *self._new(1, self._slot_bytes)]
        elif retired and self._fits(extra, limit_bytes):
            self._be_idle(retired[0])
        else:
            return False
        return True

    def retire_extra(self) -> None:
        """Retire idle slots, the last first, until only as many as are permanent are left."""
        idle = self.idle if self._has_extra else []
        while idle and self._count > self._permanent:
            idle.pop().holder = _NOBODY_MORE
        self.free_retired()

    def free_retired(self) -> None:
        """Free the retired slots that no copy reads any more."""
        done = [slot for slot in self._retired if slot.free.query()] if self._has_extra else []
        if done:
            self._all = [slot for slot in self._all if slot not in done]

    @property
    def at_limit(self) -> bool:
        """Whether no extra slot may be added, however much memory is free."""
        return not self._fits(self._count - self._permanent + 1, None)

    @property
    def extra_bytes(self) -> int:
        """Device bytes of all extra slots, the retired ones that are not free yet included."""
        return (len(self._all) - self._permanent) * self._slot_bytes

    @property
    def _has_extra(self) -> bool:
        """Whether there may be extra slots, retired ones included."""
        return len(self._all) > self._permanent

    @property
    def _retired(self) -> Iterator[Slot]:
        return (slot for slot in self._all if slot.holder is _NOBODY_MORE)

    @property
    def _count(self) -> int:
        return sum(slot.holder is not _NOBODY_MORE for slot in self._all)

    def _be_idle(self, slot: Slot) -> None:
        # First the place behind those that become free earlier.
        self._all = [each for each in self._all if each is not slot] + [slot]
        slot.holder = None

    def _await_copies(self, slots: Iterable[Slot]) -> None:
        """Make the stream of each of `slots` wait for its last copy: whatever is allocated there next may write it."""
        for slot in slots:
            with self._device.on(slot.stream):
                self._device.wait(slot.free)

    def _new(self, count: int, slot_bytes: int) -> list[Slot]:
        memory = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=self._device.torch_device) for _ in range(count)
        ]
        # The first copy into a slot must run behind whatever used this memory before.
        born, stream = self._device.record(), self._device.current_stream()
        return [Slot(each, born, stream) for each in memory]

    def _fits(self, extra: int, limit_bytes: int | None) -> bool:
        fits = limit_bytes is None or extra * self._slot_bytes <= limit_bytes
        return fits and self._permanent + extra <= self._most
