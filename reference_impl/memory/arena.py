# SPDX-License-Identifier: Apache-2.0
"""Hands out blocks of pinned slabs, and takes them back even before their last copies end.

One arena serves one mechanism. A returned block carries the event of its last copy. The next user orders its own copy
behind that event on the device, so neither side waits on the host. Blocks of equal size are recycled first: from its
second step on training asks for the same sizes again.

No signal interrupts the bookkeeping half-way. Slabs are made while no lock is held, because that takes long.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.closing import undo_all
from reference_impl.memory.host import HostMemoryError, host_book
from reference_impl.memory.interrupts import UninterruptedLock
from reference_impl.memory.pinned import pinned_book
from reference_impl.memory.slab import Slab, SlabSupply
from reference_impl.memory.staged import ring_of

ALIGNMENT_BYTES = 256
_SLAB_BYTES = 256 * 2**20
_FIRST_SLAB_BYTES = 16 * 2**20


_arenas: weakref.WeakSet[HostArena] = weakref.WeakSet()


def bytes_by_service() -> dict[str, int]:
    """Return the bytes that all arenas have handed out, by their purpose."""
    found: defaultdict[str, int] = defaultdict(int)
    for arena in list(_arenas):
        found[arena._serves] += arena.live_bytes
    return {serves: size_bytes for serves, size_bytes in found.items() if size_bytes}


class HostBlock:
    """`size_bytes` of a slab from `offset`; `ready` is the event after which it may be written."""

    __slots__ = ("offset", "ready", "size_bytes", "slab")

    def __init__(self, slab: Slab, offset: int, size_bytes: int) -> None:
        self.slab = slab
        self.offset = offset
        self.size_bytes = size_bytes
        self.ready: Event = REACHED

    def view(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the block's first elements as a contiguous tensor of `dtype` and `shape`."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.slab.bytes[self.offset : self.offset + nbytes].view(dtype).view(shape)


class _Live:
    """The bytes that one arena has handed out, in step with the book of all arenas."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        # First, because it may find no memory: closing subtracts the bytes counted below.
        host_book.add(live=size_bytes)
        self.size_bytes += size_bytes

    def drop(self) -> None:
        self.add(-self.size_bytes)


class HostArena:
    """Host memory of one mechanism, at most `limit_bytes` in slabs of `slab_bytes` or more.

    `pinned=False` is for state of the CPU alone: no copy may read or write it asynchronously. Memory beyond the limit
    of pinning (see `memory.pinned`) is pageable, and its copies are staged. With `copied`, so are the copies of an
    unpinned arena under such a limit.
    """

    def __init__(
        self,
        device: Device,
        *,
        limit_bytes: int | None = None,
        slab_bytes: int = _SLAB_BYTES,
        remedy: str = "",
        pinned: bool = True,
        copied: bool = False,
        serves: str = "optimizer states",
    ) -> None:
        """`remedy` ends the message when the host lacks the memory; nothing is allocated yet.

        `serves` is the purpose of the bytes, for `bytes_by_service`.
        """
        self._serves = serves
        self._device = device
        # Blocks are multiples of the alignment: a smaller rest is useless.
        self._limit_bytes = None if limit_bytes is None else limit_bytes - limit_bytes % ALIGNMENT_BYTES
        self._slab_bytes = slab_bytes
        self._remedy = remedy or "try offloading less"
        self._pinned = pinned
        self._is_copied = pinned or copied
        self._lock = UninterruptedLock()
        self._returned: deque[HostBlock] = deque()
        self._slabs: list[Slab] = []
        self._free: list[HostBlock] = []
        self._recycled: defaultdict[int, deque[HostBlock]] = defaultdict(deque)
        self._supply = SlabSupply(device, remedy=self._remedy, pinned=pinned)
        self._live = _Live()
        # An arena dropped without close() leaves nothing in the book.
        weakref.finalize(self, self._live.drop)
        _arenas.add(self)

    @property
    def live_bytes(self) -> int:
        """Bytes now handed out."""
        return self._live.size_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs, handed out or not."""
        return sum(slab.size_bytes for slab in self._slabs)

    def reserve(self, size_bytes: int) -> None:
        """Make one slab of `size_bytes` now, so that no step pays for it. Raises HostMemoryError."""
        while not self._grow(size_bytes):
            pass

    def reserve_blocks(self, sizes: Iterable[int]) -> None:
        """Make one slab for blocks of these sizes, or two if only the first of them may be pinned.

        The blocks have to be allocated in this order. Raises HostMemoryError.
        """
        first_bytes = rest_bytes = 0
        left_bytes = pinned_book.left_bytes() if self._pinned else None
        for size_bytes in map(_aligned, sizes):
            if rest_bytes or (left_bytes is not None and first_bytes + size_bytes > left_bytes):
                rest_bytes += size_bytes
            else:
                first_bytes += size_bytes
        for reserved_bytes in (first_bytes, rest_bytes):
            if reserved_bytes:
                self.reserve(reserved_bytes)

    def expect(self, sizes: Iterable[int]) -> None:
        """Prepare for blocks of these sizes, in this order, in the background; free blocks count.

        Too large a guess costs host memory; a small or wrong one costs only time.
        """
        with self._lock:
            self._take_back()
            spare = sum(block.size_bytes for block in self._free) + self._supply.ordered_bytes
            gathered = 0
            for size_bytes in sizes:
                size_bytes = _aligned(size_bytes)
                if spare >= size_bytes:
                    spare -= size_bytes
                    continue
                gathered += size_bytes
                if gathered >= self._slab_bytes:
                    self._order(gathered)
                    gathered = 0
            if gathered:
                self._order(gathered)

    def allocate(self, size_bytes: int) -> HostBlock:
        """Return a block of at least `size_bytes`, 256-byte aligned; write it after its `ready` event.

        Raises HostMemoryError when the limit or the host has too little left.
        """
        size_bytes = _aligned(size_bytes)
        block: HostBlock | None = None
        try:
            while True:
                with self._lock:
                    block = self._find(size_bytes)
                    ordered = self._supply.take() if block is None else None
                if block is not None:
                    return block
                if ordered is None:
                    self._grow(max(size_bytes, self._next_slab_bytes()))
                elif (slab := self._supply.made(ordered)) is not None:
                    self._add(slab)
        except BaseException:
            # An interrupt on the way out: nobody else would give the block back.
            if block is not None:
                self._returned.append(block)
            raise

    def free(self, block: HostBlock, *, after: Event = REACHED) -> None:
        """Take `block` back; its next user writes it only once `after` is reached.

        A finalizer may call this at any point of any thread, so it never waits for the lock: the lock's holder may be
        the very call interrupted by the garbage collector.
        """
        block.ready = after
        # In one call: from here on the block is back, whatever happens.
        self._returned.append(block)
        # Without memory or stack nothing is raised: the next allocation sorts the block in.
        with suppress(MemoryError, RecursionError):
            self._lock.run_if_free(self._take_back)

    def close(self) -> None:
        """Wait for copies in flight and unlock all slabs. Calling it again does nothing."""
        # The memory is freed also after a lost device: then no copy is in flight.
        undo_all([self._drop_all, self._supply.close, self._device.synchronize])

    def _drop_all(self) -> None:
        with self._lock:
            self._take_back()
            undo_all([slab.close for slab in self._slabs])
            self._slabs.clear()
            self._free.clear()
            self._recycled.clear()
            self._live.drop()

    def _find(self, size_bytes: int) -> HostBlock | None:
        """Hand out a block of the present slabs."""
        self._take_back()
        block = self._recycle(size_bytes) or self._carve(size_bytes)
        if block is None:
            self._merge()
            block = self._carve(size_bytes)
        if block is not None:
            try:
                self._live.add(size_bytes)
            except BaseException:
                self._recycled[size_bytes].append(block)
                raise
        return block

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned[0]
            if block.slab.is_open:
                same_size = self._recycled[block.size_bytes]
                same_size.append(block)
                try:
                    self._live.add(-block.size_bytes)
                except BaseException:
                    same_size.pop()
                    raise
            # Only here: after an earlier failure the next call tries again.
            self._returned.popleft()

    def _recycle(self, size_bytes: int) -> HostBlock | None:
        blocks = self._recycled.get(size_bytes)
        return blocks.popleft() if blocks else None

    def _carve(self, size_bytes: int) -> HostBlock | None:
        """Cut the smallest free range with enough bytes, a pinned one if possible."""
        fitting = [block for block in self._free if block.size_bytes >= size_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda block: (not block.slab.is_pinned, block.size_bytes))
        carved = HostBlock(best.slab, best.offset, size_bytes)
        best.offset += size_bytes
        best.size_bytes -= size_bytes
        if best.size_bytes == 0:
            self._free.remove(best)
        return carved

    def _merge(self) -> None:
        """Turn recycled blocks back into free ranges, joining neighbours, once no copy uses them."""
        free = list(self._free)
        in_use: defaultdict[int, deque[HostBlock]] = defaultdict(deque)
        for size_bytes, blocks in self._recycled.items():
            for block in blocks:
                (free if block.ready.query() else in_use[size_bytes]).append(block)
        free.sort(key=lambda block: (id(block.slab), block.offset))
        joined: list[HostBlock] = []
        for block in free:
            last = joined[-1] if joined else None
            if last and last.slab is block.slab and last.offset + last.size_bytes == block.offset:
                joined[-1] = HostBlock(last.slab, last.offset, last.size_bytes + block.size_bytes)
            else:
                joined.append(block)
        # Together: an exception before leaves every block in its list, with its size.
        self._free, self._recycled = joined, in_use

    def _next_slab_bytes(self) -> int:
        """Return the present size of all slabs: so a small model pins little, and a large one few slabs."""
        if self._limit_bytes is not None:
            return 0
        return min(self._slab_bytes, max(self.reserved_bytes, _FIRST_SLAB_BYTES))

    def _grow(self, size_bytes: int) -> bool:
        """Make a slab of `size_bytes`; False when another thread's came first. Raises HostMemoryError."""
        with self._lock:
            left_bytes = self._left_bytes
            if left_bytes is not None and size_bytes > left_bytes:
                self._drop_unused()
                left_bytes = self._left_bytes
            if left_bytes is not None and size_bytes > left_bytes:
                raise HostMemoryError(
                    needed_bytes=size_bytes, available_bytes=left_bytes, remedy=self._remedy
                )
            if self._pinned and (may_pin := pinned_book.left_bytes()) is not None and size_bytes <= may_pin:
                # Rounded up, the slab would be pageable.
                left_bytes = may_pin if left_bytes is None else min(left_bytes, may_pin)
        return self._add(
            Slab(
                self._device,
                size_bytes,
                remedy=self._remedy,
                pinned=self._pinned,
                or_pageable=True,
                most_bytes=left_bytes,
            )
        )

    @property
    def _left_bytes(self) -> int | None:
        return None if self._limit_bytes is None else self._limit_bytes - self.reserved_bytes

    def _drop_unused(self) -> None:
        """Unlock slabs without a block in use, left by a wrong guess."""
        for block in [block for block in self._free if block.size_bytes == block.slab.size_bytes]:
            self._free.remove(block)
            self._slabs.remove(block.slab)
            block.slab.close()

    def _order(self, size_bytes: int) -> None:
        left_bytes = self._left_bytes
        if left_bytes is None:
            self._supply.order(size_bytes)
        elif size_bytes <= left_bytes - self._supply.ordered_bytes:
            # Exactly as ordered: rounded up, a slab would leave too little room for the next orders.
            self._supply.order(size_bytes, most_bytes=size_bytes)

    def _add(self, slab: Slab) -> bool:
        """Take a new slab, unless another thread's has used up the limit meanwhile; return whether it is taken."""
        if self._is_copied and not slab.is_pinned:
            ring_of(self._device).serve(slab)
        with self._lock:
            left_bytes = self._left_bytes
            if left_bytes is not None and slab.size_bytes > left_bytes:
                slab.close()
                return False
            whole = HostBlock(slab, 0, slab.size_bytes)
            self._free.append(whole)
            self._slabs.append(slab)
            return True


def _aligned(size_bytes: int) -> int:
    return max(-(-size_bytes // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES
