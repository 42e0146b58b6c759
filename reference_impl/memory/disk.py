"""The disk tier: what pinned memory cannot hold goes on to a file, with threads of its own.

The file has no name from the start, so a process that is killed leaves nothing behind. Copies run through
pinned staging blocks: D2H, then a write; a read, then H2D. Writes never hold up training until the staging is
full; reads are started ahead by `prepare`. A disk is slower than a link by a factor of ten or more, so this is
a spill for the part that pinned memory cannot take, not a place for everything.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.arena import HostArena, HostBlock
from reference_impl.memory.host import HostMemoryError
from reference_impl.memory.spill_file import PAGE_BYTES, DiskError, SpillFile
from reference_impl.memory.tiers import HostTier, StoredBytes

_STAGING_BYTES = 2 * 2**30
_DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """A directory, how much of its disk may be used, and how much pinned memory the copies may pass through."""

    path: str | Path
    limit_bytes: int
    staging_bytes: int = _STAGING_BYTES

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that hold nothing."""
        for name, size_bytes in (("limit_bytes", self.limit_bytes), ("staging_bytes", self.staging_bytes)):
            if size_bytes < PAGE_BYTES:
                raise ValueError(
                    f"{name}={size_bytes}; expected at least a page of {PAGE_BYTES} bytes; try {name}={2**31}"
                )


class SpillTier:
    """Pinned memory first, then disk."""

    def __init__(self, host: HostTier, disk: DiskTier) -> None:
        self._host = host
        self._disk = disk

    def store(self, source: torch.Tensor, *, after: Event) -> StoredBytes:
        """Start storing in the first tier that has space. Raises DiskError when neither has."""
        try:
            return self._host.store(source, after=after)
        except HostMemoryError:
            return self._disk.store(source, after=after)

    def close(self) -> None:
        """Close both."""
        self._disk.close()
        self._host.close()


class DiskTier:
    """One unnamed file, a thread that writes, a thread that reads, and staging memory between."""

    def __init__(self, device: Device, space: DiskSpace) -> None:
        """Open the file. Raises DiskError for a directory that cannot be written or has too little space."""
        self.device = device
        self.file = SpillFile(space.path, limit_bytes=space.limit_bytes)
        self.staging = HostArena(device, limit_bytes=space.staging_bytes, remedy="try more staging_bytes")
        self.staging.reserve(space.staging_bytes)
        self.writer = ThreadPoolExecutor(1, "disk-write")
        self.reader = ThreadPoolExecutor(1, "disk-read")
        self._staging_bytes = space.staging_bytes
        self._largest_bytes = 0
        self._freed = threading.Condition()
        self._released: deque[DiskBytes] = deque()
        self._failure: DiskError | None = None

    def store(self, source: torch.Tensor, *, after: Event) -> StoredBytes:
        """Start the D2H copy and the write behind it; waits while the staging memory is full.

        Raises DiskError when the disk has failed or is full, HostMemoryError when the staging is too small.
        """
        size_bytes = -(-source.numel() // PAGE_BYTES) * PAGE_BYTES
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        offset = self.file.allocate(size_bytes)
        try:
            block = self.wait_for_staging(size_bytes, unless=self._raise_failure)
        except BaseException:
            self.file.free(offset, size_bytes)
            raise
        return DiskBytes(self, block, offset, size_bytes, source, after)

    def wait_for_staging(self, size_bytes: int, *, unless: Callable[[], None] = lambda: None) -> HostBlock:
        """Return a staging block as soon as the threads have freed one; `unless` may raise while it waits."""
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            unless()
            self.sweep()
            try:
                return self.staging.allocate(size_bytes)
            except HostMemoryError:
                if size_bytes > self._staging_bytes or time.monotonic() > deadline:
                    raise
            with self._freed:
                self._freed.wait(0.01)

    def try_staging(self, size_bytes: int) -> HostBlock | None:
        """Return a staging block for reading ahead, if that leaves enough for a storage that is needed at once."""
        if self.staging.live_bytes + size_bytes + self._largest_bytes > self._staging_bytes:
            return None
        try:
            return self.staging.allocate(size_bytes)
        except HostMemoryError:
            return None

    def free_staging(self, block: HostBlock, *, after: Event) -> None:
        """Take a block back whose bytes are in the file; its next user comes behind `after`."""
        self.staging.free(block, after=after)
        with self._freed:
            self._freed.notify_all()

    def fail(self, error: DiskError) -> None:
        """Remember an error of a thread for the next call of `store`."""
        self._failure = error

    def take_back_later(self, stored: DiskBytes) -> None:
        """Take back what `stored` occupies later. Takes no lock, so a finalizer may call it."""
        self._released.append(stored)

    def sweep(self) -> None:
        """Take back what was released and no thread uses."""
        with self._freed:
            for _ in range(len(self._released)):
                stored = self._released.popleft()
                if not stored.give_back():
                    self._released.append(stored)

    def close(self) -> None:
        """Wait for the threads and give everything back. Calling it again does nothing."""
        self.writer.shutdown(cancel_futures=True)
        self.reader.shutdown(cancel_futures=True)
        self.sweep()
        self.staging.close()
        self.file.close()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class DiskBytes:
    """One storage on its way to the file, in it, or on its way back."""

    def __init__(
        self,
        tier: DiskTier,
        block: HostBlock,
        offset: int,
        size_bytes: int,
        source: torch.Tensor,
        after: Event,
    ) -> None:
        self._tier = tier
        self._block: HostBlock | None = block
        self._offset = offset
        self._padded_bytes = size_bytes
        self._size_bytes = source.numel()
        self._lock = threading.Lock()
        self._reading: Future[None] | None = None
        # Once backward is near, the block stays until the copy to the device has been started.
        self._is_wanted = False
        self._is_written = False
        host = block.view(torch.uint8, (self._size_bytes,))
        self.stored = tier.device.copy_out(host, source, after=(after, block.ready), for_threads=True)
        self._last_copy = self.stored
        self._writing: Future[None] = tier.writer.submit(self._write)

    def prepare(self) -> None:
        """Queue the read when staging memory is free; does nothing while the bytes still are in memory."""
        with self._lock:
            self._is_wanted = True
            if self._block is not None:
                return
            self._block = self._tier.try_staging(self._padded_bytes)
            if self._block is not None:
                self._reading = self._tier.reader.submit(self._read)

    def load(self, target: torch.Tensor) -> Event:
        """Start the H2D copy once the bytes are in memory, which this waits for. Raises DiskError.

        The block goes back behind the copy, since more may be loaded ahead than the staging memory holds at once.
        """
        block = self._in_memory()
        host = block.view(torch.uint8, (self._size_bytes,))
        loaded = self._tier.device.copy_in(target, host, after=(self._tier.device.record(), self._last_copy))
        with self._lock:
            self._last_copy = loaded
            self._is_wanted = False
            self._free_staging()
        return loaded

    def release(self) -> None:
        """Let the tier's next sweep take everything back."""
        self._tier.take_back_later(self)

    def give_back(self) -> bool:
        """Give the extent and the staging block back if no thread uses them; return whether that was so."""
        self._writing.cancel()
        if not self._writing.done() or (self._reading is not None and not self._reading.done()):
            return False
        if self._block is not None:
            self._tier.staging.free(self._block, after=self._last_copy)
            self._block = None
        self._tier.file.free(self._offset, self._padded_bytes)
        return True

    def _in_memory(self) -> HostBlock:
        with self._lock:
            self._is_wanted = True
            if self._block is None:
                self._block = self._tier.wait_for_staging(self._padded_bytes)
                self._reading = self._tier.reader.submit(self._read)
            reading, block = self._reading, self._block
        if reading is not None:
            reading.result(_DEADLINE_S)
        return block

    def _write(self) -> None:
        block = self._block
        assert block is not None
        self.stored.synchronize()
        try:
            self._tier.file.write(self._offset, block.view(torch.uint8, (self._padded_bytes,)))
        except DiskError as error:
            # The bytes stay in memory, so the step in flight can still finish.
            self._tier.fail(error)
            return
        with self._lock:
            self._is_written = True
            self._free_staging()

    def _free_staging(self) -> None:
        """Give the block back if the file has the bytes and nobody is about to copy them."""
        if self._block is not None and self._is_written and not self._is_wanted:
            block, self._block = self._block, None
            self._tier.free_staging(block, after=self._last_copy)

    def _read(self) -> None:
        block = self._block
        assert block is not None
        block.ready.synchronize()
        self._tier.file.read(self._offset, block.view(torch.uint8, (self._padded_bytes,)))
