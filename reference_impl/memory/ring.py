"""A few fixed device buffers that streamed data passes through.

Three slots let the H2D copy of the next chunk, the computation on this one and the D2H copy of the last run
at the same time. The buffers are allocated once on the compute stream, so streaming never raises the peak and
never touches the allocator.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

import torch

from reference_impl.device import REACHED, Device, Event


class Slot:
    """One buffer: `bytes` is flat uint8; write it only after `free`."""

    __slots__ = ("bytes", "free")

    def __init__(self, bytes_: torch.Tensor) -> None:
        self.bytes = bytes_
        self.free: Event = REACHED


class DeviceRing:
    """`slots` buffers of `slot_bytes` on the device, handed out in turn."""

    def __init__(self, device: Device, *, slot_bytes: int, slots: int = 3) -> None:
        """Allocate all slots now, on the live current stream."""
        self.slots = [
            Slot(torch.empty(slot_bytes, dtype=torch.uint8, device=device.torch_device)) for _ in range(slots)
        ]
        # The first copy into a slot must run behind whatever used this memory before.
        born = device.record()
        for slot in self.slots:
            slot.free = born
        self._next = 0

    @property
    def size_bytes(self) -> int:
        """Device bytes of all slots."""
        return sum(slot.bytes.numel() for slot in self.slots)

    def take(self) -> Slot:
        """Return the next slot; its user sets `free` to the event of its own last use."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        return slot
