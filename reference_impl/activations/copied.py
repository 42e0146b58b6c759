"""A saved storage that comes back by a copy from a tier."""

from __future__ import annotations

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.tiers import StoredBytes


class Copied:
    """`size_bytes` in a tier."""

    may_come_early = True

    __slots__ = ("_device", "_size_bytes", "_stored")

    def __init__(self, device: Device, stored: StoredBytes, size_bytes: int) -> None:
        """Take over `stored`."""
        self._device = device
        self._stored = stored
        self._size_bytes = size_bytes

    def bring(self) -> tuple[torch.Tensor, Event]:
        """Start the copy into new memory of the live current stream."""
        buffer = torch.empty(self._size_bytes, dtype=torch.uint8, device=self._device.torch_device)
        return buffer, self._stored.load(buffer)

    def prepare(self) -> None:
        """Let the tier start reading."""
        self._stored.prepare()

    def release(self) -> None:
        """Give the tier its room back."""
        self._stored.release()
