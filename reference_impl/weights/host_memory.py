"""The host memory of one streamer: which blocks are pinned, and the staging buffers for those that are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.memory.host import HostMemoryError, available_bytes
from reference_impl.weights.frozen import FrozenStorage, layout
from reference_impl.weights.host_copy import STAGING_SLOTS, HostCopy, PageableCopy, PinnedCopy, Staging
from reference_impl.weights.residency import pinned_within

_SLAB_BYTES = 2**28
_REMEDY = (
    "try more resident_layers, a larger budget_bytes, or host_limit_bytes for weights that come from files"
)


class HostMemory:
    """Room on the host for the storages of `blocks`, at most `limit_bytes` of it pinned."""

    def __init__(
        self, device: Device, blocks: Sequence[Sequence[FrozenStorage]], limit_bytes: int | None
    ) -> None:
        """Pin the staging buffers if there will be unpinned blocks. Raises HostMemoryError."""
        sizes = [layout(block)[1] for block in blocks]
        self._device = device
        self._arena = HostArena(device, slab_bytes=max(min(sum(sizes), _SLAB_BYTES), 1), remedy=_REMEDY)
        self._staging: Staging | None = None
        self._is_pinned = [True] * len(sizes)
        if limit_bytes is not None and sum(sizes) > limit_bytes:
            staging_bytes = STAGING_SLOTS * max(sizes)
            if limit_bytes < staging_bytes:
                raise HostMemoryError(
                    needed_bytes=staging_bytes,
                    available_bytes=limit_bytes,
                    remedy=f"try host_limit_bytes={staging_bytes}, the room for {STAGING_SLOTS} blocks",
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

    def _require(self, blocks: Sequence[Sequence[FrozenStorage]]) -> None:
        """Raise HostMemoryError unless the host has room for what is not on it yet."""
        needed_bytes = sum(s.size_bytes for block in blocks for s in block if s.device.type != "cpu")
        if needed_bytes > available_bytes():
            self.close()
            raise HostMemoryError(
                needed_bytes=needed_bytes, available_bytes=available_bytes(), remedy=_REMEDY
            )
