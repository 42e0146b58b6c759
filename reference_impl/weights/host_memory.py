# SPDX-License-Identifier: Apache-2.0
"""Where a block's bytes are on the host: pinned, or in ordinary memory behind a small pinned ring.

Pinned memory is copied to the device directly. Weights beyond a streamer's own limit on it stay in their memory, for
a model loaded from safetensors a mapping of its files. They pass through two pinned buffers of a whole block. Weights
beyond the process's limit pass through the ring that all offloaders share. Either way a thread of the streamer waits
until buffers are filled, and the training thread goes on. The device side cannot tell the difference, except by the
speed of the disk. Compressed weights have memory of their own, pinned as far as that is allowed.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from offload_arithmetic.residency import pinned_within
from offload_arithmetic.sizes import COMPRESSED_SHARE
from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.arena import HostArena
from reference_impl.memory.closing import undo_all
from reference_impl.memory.copiers import Copiers
from reference_impl.memory.host import HostMemoryError, available_bytes
from reference_impl.memory.pinned import pinned_book
from reference_impl.weights.compressed_copy import CompressedCopy, Decompressor
from reference_impl.weights.host_copies import (
    HostCopy,
    Loader,
    PartlyPinnedCopy,
    PinnedCopy,
    PlainParts,
    Started,
)
from reference_impl.weights.storages import BlockStorage, layout, longest_bytes

_STAGING_SLOTS = 2
_SLAB_BYTES = 2**28
# A slab is rounded up by less: to huge pages.
_ROUNDING_BYTES = 2**21
_REMEDY = (
    "try more resident_layers, a larger budget_bytes, or host_limit_bytes for weights that come from files"
)


class Host(Protocol):
    """Keeps the bytes of blocks."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory in use."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the device that blocks pass through on their way."""

    def keep(
        self, index: int, sources: Sequence[torch.Tensor], offsets: Sequence[int], size_bytes: int
    ) -> HostCopy:
        """Return the host's copy of `sources`, of block `index`."""

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""


class Staging:
    """Two pinned buffers of a whole block, and the threads that fill them."""

    def __init__(self, loader: Loader, arena: HostArena, slot_bytes: int) -> None:
        """Pin the buffers. Raises HostMemoryError."""
        self.device = loader.device
        self._loader = loader
        self._blocks = [arena.allocate(slot_bytes) for _ in range(_STAGING_SLOTS)]
        self._free: list[Event] = [REACHED] * _STAGING_SLOTS
        self._next = 0
        self._copiers = Copiers("frozen-weights-copies")

    def load(
        self, target: torch.Tensor, parts: Sequence[torch.Tensor], offsets: Sequence[int], after: Event
    ) -> Started:
        """Queue reading `parts` and copying them to `offsets` of `target` once `after` is reached."""
        return self._loader.in_turn(functools.partial(self._pass_through, target, parts, offsets, after))

    def close(self) -> None:
        """End the threads; the arena keeps the buffers."""
        self._copiers.close()

    def _pass_through(
        self, target: torch.Tensor, parts: Sequence[torch.Tensor], offsets: Sequence[int], after: Event
    ) -> Event:
        slot = self._next
        self._next = (slot + 1) % _STAGING_SLOTS
        self._free[slot].synchronize()
        staged = self._blocks[slot].view(torch.uint8, target.shape)
        self._copiers.copy(
            (staged[offset : offset + part.numel()], part)
            for part, offset in zip(parts, offsets, strict=True)
        )
        self._free[slot] = self.device.copy_in(target, staged, after=(after,))
        return self._free[slot]


class PageableCopy(PlainParts):
    """The bytes as they lie in ordinary memory, mapped files included; nothing is copied on the host for good."""

    def __init__(self, staging: Staging, sources: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        """Keep `sources`, or copies of them if they are on the device."""
        self._staging = staging
        self._offsets = offsets
        self.parts = [source.cpu() for source in sources]

    def load(self, target: torch.Tensor, *, after: Event) -> Started:
        """Queue the way through the staging memory; nobody writes such weights, so there is no `after` to wait for."""
        return self._staging.load(target, self.parts, self._offsets, self._staging.device.record())

    def own(self, index: int) -> torch.Tensor:
        """Return the part itself: it has never been anywhere else."""
        return self.parts[index]

    def release(self, *, after: Event) -> None:
        """Let go of the parts; the staging memory is not theirs."""
        self.parts = []


class HostMemory:
    """Keeps the storages of `blocks` on the host, at most `limit_bytes` of them pinned."""

    def __init__(
        self,
        device: Device,
        blocks: Sequence[Sequence[BlockStorage]],
        limit_bytes: int | None,
        *,
        seldom: Collection[int] = (),
        compresses: bool = False,
    ) -> None:
        """Pin the staging buffers if there will be unpinned blocks. Raises HostMemoryError.

        `seldom`: the blocks copied less often than others in a step; they are pinned last. `compresses`: bf16 weights
        are kept in 12 bits each, and nothing but the process limits pinned memory.
        """
        sizes = [layout(block)[1] for block in blocks]
        self._decompressor = None
        if compresses:
            self._decompressor = Decompressor(device, longest_bytes(blocks))
            sizes = [int(size * COMPRESSED_SHARE) for size in sizes]
        slab_bytes = max(min(sum(sizes), _SLAB_BYTES), 1)
        if pinned_book.limit_bytes is not None:
            # A slab for each block: memory that a larger one leaves free would be missing for the next.
            slab_bytes = 1
        self._arena = HostArena(device, slab_bytes=slab_bytes, remedy=_REMEDY, serves="weights")
        # The bytes that the process may not pin.
        self._beyond = HostArena(
            device, slab_bytes=slab_bytes, remedy=_REMEDY, pinned=False, copied=True, serves="weights"
        )
        self._loader = Loader(device)
        self._staging: Staging | None = None
        self._is_pinned = [True] * len(sizes)
        # Of one block as many storages as the process may pin beside whole ones.
        self._partly, self._pinned_storages = -1, 0
        if limit_bytes is not None and sum(sizes) > limit_bytes:
            staging_bytes = _STAGING_SLOTS * max(sizes)
            if limit_bytes < staging_bytes:
                raise HostMemoryError(
                    needed_bytes=staging_bytes,
                    available_bytes=limit_bytes,
                    remedy=f"try host_limit_bytes={staging_bytes}, enough for {_STAGING_SLOTS} blocks",
                )
            self._staging = Staging(self._loader, self._arena, max(sizes))
            self._is_pinned = pinned_within(sizes, limit_bytes - staging_bytes, seldom=seldom)
        elif (left_bytes := pinned_book.left_bytes()) is not None and sum(sizes) > left_bytes:
            self._is_pinned = pinned_within(sizes, left_bytes, seldom=seldom)
            whole = [size for size, fits in zip(sizes, self._is_pinned, strict=True) if fits]
            left_bytes -= sum(whole) + (len(whole) + 1) * _ROUNDING_BYTES
            beyond = [index for index, fits in enumerate(self._is_pinned) if not fits]
            if not compresses:
                self._partly = min(beyond, key=lambda index: index in seldom)
                starts = layout(blocks[self._partly])[0]
                self._pinned_storages = max(bisect_right(starts, left_bytes) - 1, 0)
        self._require(blocks)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory in use."""
        return self._arena.live_bytes

    @property
    def buffer_bytes(self) -> int:
        """Those of compressed weights."""
        return 0 if self._decompressor is None else self._decompressor.buffer_bytes

    def keep(
        self, index: int, sources: Sequence[torch.Tensor], offsets: Sequence[int], size_bytes: int
    ) -> HostCopy:
        """Return the host's copy of `sources`, of block `index`. Raises HostMemoryError."""
        if self._decompressor is not None:
            arenas = (self._arena, self._beyond) if self._is_pinned[index] else (self._beyond,)
            return CompressedCopy(self._decompressor, self._loader, arenas, sources, offsets)
        if self._staging is not None and not self._is_pinned[index]:
            return PageableCopy(self._staging, sources, offsets)
        if index == self._partly and self._pinned_storages:
            return self._partly_pinned(sources, offsets, size_bytes)
        arena = self._arena if self._is_pinned[index] else self._beyond
        return PinnedCopy(self._loader, arena, sources, offsets, size_bytes)

    def _partly_pinned(
        self, sources: Sequence[torch.Tensor], offsets: Sequence[int], size_bytes: int
    ) -> HostCopy:
        count = self._pinned_storages
        cut = offsets[count]
        pinned = PinnedCopy(self._loader, self._arena, sources[:count], offsets[:count], cut)
        try:
            after = [offset - cut for offset in offsets[count:]]
            beyond = PinnedCopy(self._loader, self._beyond, sources[count:], after, size_bytes - cut)
        except BaseException:
            pinned.release(after=REACHED)
            raise
        return PartlyPinnedCopy(pinned, beyond)

    def close(self) -> None:
        """Wait for copies and give everything back. Calling it again does nothing."""
        self._loader.close()
        if self._staging is not None:
            self._staging.close()
        undo_all([self._beyond.close, self._arena.close])

    def _require(self, blocks: Sequence[Sequence[BlockStorage]]) -> None:
        """Raise HostMemoryError unless the host can hold the weights that are not on it yet."""
        needed_bytes = sum(s.size_bytes for block in blocks for s in block if s.device.type != "cpu")
        if self._decompressor is not None:
            needed_bytes = int(needed_bytes * COMPRESSED_SHARE)
        there_bytes = available_bytes(needed_bytes)
        if needed_bytes > there_bytes:
            self.close()
            raise HostMemoryError(needed_bytes=needed_bytes, available_bytes=there_bytes, remedy=_REMEDY)
