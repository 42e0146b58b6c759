# SPDX-License-Identifier: Apache-2.0
"""The place of a saved storage's bytes: the host tier, behind the common interface with the disk tier.

A tier takes flat uint8 device tensors and gives them back. It orders its copies by events and never waits on
the host; it does not decide which storages it gets.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Protocol

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.arena import HostArena
from reference_impl.memory.interrupts import UninterruptedLock


class StoredBytes(Protocol):
    """One device tensor's bytes in a tier."""

    @property
    def stored(self) -> Event:
        """The event after the last read of the stored device tensor."""

    def load(self, target: torch.Tensor) -> Event:
        """Start filling `target` (flat uint8, allocated on the live current stream); return the event of its end."""

    def prepare(self) -> None:
        """Start whatever must run before `load` can copy at full speed."""

    def release(self) -> None:
        """Give the memory back once nothing uses it any more. Safe in a finalizer, and to call again."""


class ReleasedOnce(ABC):
    """Bytes of a tier, given back once: by one of the threads that release them, and no signal cuts that short."""

    __slots__ = ("_is_released", "_releasing")

    def __init__(self) -> None:
        self._is_released = False
        # A finalizer may release them inside of a release.
        self._releasing = UninterruptedLock(threading.RLock())

    def release(self) -> None:
        """See `StoredBytes`."""
        with self._releasing:
            if not self._is_released:
                self._is_released = True
                self._on_release()

    @abstractmethod
    def _on_release(self) -> None:
        """Give the memory back, behind the last copy that uses it."""


class Tier(Protocol):
    """A place for bytes."""

    def store(self, source: torch.Tensor, *, after: Event) -> StoredBytes:
        """Start copying `source` (flat uint8 on the device) once `after` is reached."""

    def close(self) -> None:
        """Give everything back."""


class HostTier:
    """Pinned host memory."""

    def __init__(self, device: Device, arena: HostArena) -> None:
        self._device = device
        self._arena = arena

    def store(self, source: torch.Tensor, *, after: Event) -> StoredBytes:
        """Start the D2H copy. Raises HostMemoryError when the arena has too little memory."""
        return HostBytes(self._device, self._arena, source, after)

    def close(self) -> None:
        """Unlock the arena's memory."""
        self._arena.close()


class HostBytes(ReleasedOnce):
    """A block of the arena and the event of the last copy that used it."""

    __slots__ = ("_arena", "_block", "_device", "_view", "stored")

    def __init__(self, device: Device, arena: HostArena, source: torch.Tensor, after: Event) -> None:
        super().__init__()
        self._device = device
        self._arena = arena
        self._block = arena.allocate(source.numel())
        try:
            self._view = self._block.view(torch.uint8, (source.numel(),))
            self.stored = device.copy_out(self._view, source, after=(after, self._block.ready))
            self._block.ready = self.stored
        except BaseException:
            # Nobody knows how far the copy has come.
            with suppress(Exception):
                device.synchronize()
            arena.free(self._block)
            raise

    def load(self, target: torch.Tensor) -> Event:
        """Start the H2D copy behind the D2H copy and behind the live current stream, which owns `target`."""
        loaded = self._device.copy_in(target, self._view, after=(self._device.record(), self.stored))
        self._block.ready = loaded
        return loaded

    def prepare(self) -> None:
        """Do nothing: pinned memory is ready."""

    def _on_release(self) -> None:
        """Hand the block back; its next user waits for the last copy."""
        self._arena.free(self._block, after=self._block.ready)
