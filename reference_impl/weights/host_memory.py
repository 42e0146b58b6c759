"""Where a block's bytes are on the host: pinned, or in ordinary memory behind a small pinned ring.

Pinned memory is copied to the device directly. What exceeds the limit on it stays where it is, which for a model
loaded from safetensors is a memory mapping of its files, and passes through two pinned buffers that a thread
fills. The device side cannot tell the difference, except by the speed of the disk.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.arena import HostArena
from reference_impl.memory.host import HostMemoryError, available_bytes
from reference_impl.memory.worker import Worker
from reference_impl.weights.residency import pinned_within
from reference_impl.weights.storages import BlockStorage, layout

_DEADLINE_S = 600.0
_STAGING_SLOTS = 2
_SLAB_BYTES = 2**28
_REMEDY = (
    "try more resident_layers, a larger budget_bytes, or host_limit_bytes for weights that come from files"
)

# Asks for the event of a copy's end, and waits on the host until the copy has been started.
Started = Callable[[], Event]


class HostCopy(Protocol):
    """The bytes of one block, in parts that lie at given offsets of its device storage."""

    parts: list[torch.Tensor]

    def load(self, target: torch.Tensor, *, after: Event) -> Started:
        """Start filling `target` behind the live current stream, once `after` is reached."""

    def own(self, part: torch.Tensor) -> torch.Tensor:
        """Return `part` in memory that stays after `release`."""

    def release(self, *, after: Event) -> None:
        """Give the memory back once `after` is reached."""


class Host(Protocol):
    """Keeps the bytes of blocks."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory in use."""

    def keep(
        self, index: int, sources: Sequence[torch.Tensor], offsets: Sequence[int], size_bytes: int
    ) -> HostCopy:
        """Return the host's copy of `sources`, of block `index`."""

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""


class PinnedCopy:
    """One pinned block of the arena."""

    def __init__(
        self,
        device: Device,
        arena: HostArena,
        sources: Sequence[torch.Tensor],
        offsets: Sequence[int],
        size_bytes: int,
    ) -> None:
        """Copy `sources` in. Raises HostMemoryError."""
        self._device = device
        self._arena = arena
        self._block = arena.allocate(size_bytes)
        self._block.ready.synchronize()
        self.whole = self._block.view(torch.uint8, (size_bytes,))
        self.parts = [
            self.whole[offset : offset + source.numel()].copy_(source)
            for source, offset in zip(sources, offsets, strict=True)
        ]

    def load(self, target: torch.Tensor, *, after: Event) -> Started:
        """Start one H2D copy."""
        event = self._device.copy_in(target, self.whole, after=(self._device.record(), after))
        return lambda: event

    def own(self, part: torch.Tensor) -> torch.Tensor:
        """Return a copy in ordinary memory."""
        return part.clone()

    def release(self, *, after: Event) -> None:
        """Hand the block back to the arena."""
        self._arena.free(self._block, after=after)


class Staging:
    """Two pinned buffers and the thread that fills them."""

    def __init__(self, device: Device, arena: HostArena, slot_bytes: int) -> None:
        """Pin the buffers. Raises HostMemoryError."""
        self.device = device
        self._blocks = [arena.allocate(slot_bytes) for _ in range(_STAGING_SLOTS)]
        self._free: list[Event] = [REACHED] * _STAGING_SLOTS
        self._next = 0
        self._thread = Worker("frozen-weights")

    def load(
        self, target: torch.Tensor, parts: Sequence[torch.Tensor], offsets: Sequence[int], after: Event
    ) -> Started:
        """Queue reading `parts` and copying them to `offsets` of `target` once `after` is reached."""
        task = functools.partial(self._pass_through, target, parts, offsets, after)
        return functools.partial(self._thread.wait, self._thread.submit(task), deadline_s=_DEADLINE_S)

    def close(self) -> None:
        """End the thread; the arena keeps the buffers."""
        self._thread.close()

    def _pass_through(
        self, target: torch.Tensor, parts: Sequence[torch.Tensor], offsets: Sequence[int], after: Event
    ) -> Event:
        slot = self._next
        self._next = (slot + 1) % _STAGING_SLOTS
        self._free[slot].synchronize()
        staged = self._blocks[slot].view(torch.uint8, target.shape)
        for part, offset in zip(parts, offsets, strict=True):
            staged[offset : offset + part.numel()].copy_(part)
        self._free[slot] = self.device.copy_in(target, staged, after=(after,))
        return self._free[slot]


class PageableCopy:
    """The bytes as they lie in ordinary memory, mapped files included; nothing is copied on the host for good."""

    def __init__(self, staging: Staging, sources: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        """Keep `sources`, or what they hold where they are on the device."""
        self._staging = staging
        self._offsets = offsets
        self.parts = [source.cpu() for source in sources]

    def load(self, target: torch.Tensor, *, after: Event) -> Started:
        """Queue the way through the staging memory; nobody writes such weights, so there is no `after` to wait for."""
        return self._staging.load(target, self.parts, self._offsets, self._staging.device.record())

    def own(self, part: torch.Tensor) -> torch.Tensor:
        """Return `part`: it has never been anywhere else."""
        return part

    def release(self, *, after: Event) -> None:
        """Let go of the parts; the staging memory is not theirs."""
        self.parts = []


class HostMemory:
    """Keeps the storages of `blocks` on the host, at most `limit_bytes` of them pinned."""

    def __init__(
        self, device: Device, blocks: Sequence[Sequence[BlockStorage]], limit_bytes: int | None
    ) -> None:
        """Pin the staging buffers if there will be unpinned blocks. Raises HostMemoryError."""
        sizes = [layout(block)[1] for block in blocks]
        self._device = device
        self._arena = HostArena(device, slab_bytes=max(min(sum(sizes), _SLAB_BYTES), 1), remedy=_REMEDY)
        self._staging: Staging | None = None
        self._is_pinned = [True] * len(sizes)
        if limit_bytes is not None and sum(sizes) > limit_bytes:
            staging_bytes = _STAGING_SLOTS * max(sizes)
            if limit_bytes < staging_bytes:
                raise HostMemoryError(
                    needed_bytes=staging_bytes,
                    available_bytes=limit_bytes,
                    remedy=f"try host_limit_bytes={staging_bytes}, enough for {_STAGING_SLOTS} blocks",
                )
            self._staging = Staging(device, self._arena, max(sizes))
            self._is_pinned = pinned_within(sizes, limit_bytes - staging_bytes)
        self._require(blocks)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory in use."""
        return self._arena.live_bytes

    def keep(
        self, index: int, sources: Sequence[torch.Tensor], offsets: Sequence[int], size_bytes: int
    ) -> HostCopy:
        """Return the host's copy of `sources`, of block `index`. Raises HostMemoryError."""
        if self._staging is None or self._is_pinned[index]:
            return PinnedCopy(self._device, self._arena, sources, offsets, size_bytes)
        return PageableCopy(self._staging, sources, offsets)

    def close(self) -> None:
        """Wait for copies and give everything back. Calling it again does nothing."""
        if self._staging is not None:
            self._staging.close()
        self._arena.close()

    def _require(self, blocks: Sequence[Sequence[BlockStorage]]) -> None:
        """Raise HostMemoryError unless the host can hold what is not on it yet."""
        needed_bytes = sum(s.size_bytes for block in blocks for s in block if s.device.type != "cpu")
        there_bytes = available_bytes(needed_bytes)
        if needed_bytes > there_bytes:
            self.close()
            raise HostMemoryError(needed_bytes=needed_bytes, available_bytes=there_bytes, remedy=_REMEDY)
