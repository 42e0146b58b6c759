# SPDX-License-Identifier: Apache-2.0
"""The disk tier: its own threads write bytes without room in pinned memory to a file.

The file never has a name, so a killed process leaves nothing behind. Copies run through pinned staging
blocks: D2H, then a write; a read, then H2D. Writes never hold up training until the staging is full; reads are
started ahead by `prepare`. A disk is slower than a link by a factor of ten or more, so only the excess over pinned
memory is spilled.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.arena import HostArena, HostBlock
from reference_impl.memory.closing import undo_all
from reference_impl.memory.host import HostMemoryError
from reference_impl.memory.interrupts import UninterruptedCondition, UninterruptedLock
from reference_impl.memory.spill_file import PAGE_BYTES, SpillFile
from reference_impl.memory.tiers import HostTier, ReleasedOnce, StoredBytes
from reference_impl.memory.worker import Worker, is_done

_STAGING_BYTES = 2 * 2**30
# A disk that needs longer for one storage counts as lost.
_DEADLINE_S = 600.0
# If no write will free staging memory, another thread's backward may.
_OTHERS_TURN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """A directory, a limit of its disk space, and the pinned staging memory of its copies."""

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
        self.disk = disk

    def store(self, source: torch.Tensor, *, after: Event) -> StoredBytes:
        """Start storing in the first tier that has space. Raises DiskError when neither has."""
        try:
            return self._host.store(source, after=after)
        except HostMemoryError:
            return self.disk.store(source, after=after)

    def close(self) -> None:
        """Close both."""
        undo_all([self._host.close, self.disk.close])


class DiskTier:
    """One unnamed file, a writing thread, a reading thread, and staging memory between."""

    def __init__(self, device: Device, space: DiskSpace) -> None:
        """Open the file. Raises DiskError for a directory that cannot be written or has too little space."""
        self.device = device
        self.file = SpillFile(space.path, limit_bytes=space.limit_bytes)
        self.staging = HostArena(
            device,
            limit_bytes=space.staging_bytes,
            remedy="try more staging_bytes",
            serves="staging of the disk tier",
        )
        try:
            self.staging.reserve(space.staging_bytes)
        except BaseException as error:
            self.file.close()
            if type(error) is not HostMemoryError:
                raise
            raise HostMemoryError(
                needed_bytes=error.needed_bytes,
                available_bytes=error.available_bytes,
                remedy=f"try a smaller staging_bytes than {space.staging_bytes}",
                kind=error.kind,
            ) from error
        self.writer = Worker("disk-write")
        self.reader = Worker("disk-read")
        self._staging_bytes = space.staging_bytes
        self._largest_bytes = 0
        self._freed = UninterruptedCondition()
        self._released: deque[DiskBytes] = deque()
        # Storages that are in staging memory, or on their way there, before they are needed.
        self._ahead: weakref.WeakSet[DiskBytes] = weakref.WeakSet()
        self._failure: BaseException | None = None
        # How many failures have been raised. Bytes stored before the last one belong to a step that has failed.
        self.failures_raised = 0
        # Only the end of a write frees staging memory for waiters.
        self.last_write: Future[None] | None = None

    def store(self, source: torch.Tensor, *, after: Event) -> StoredBytes:
        """Start the D2H copy and the write behind it; waits while the staging memory is full.

        Raises DiskError when the disk is full, the error of the writing thread when it has failed, and
        HostMemoryError when the staging is too small.
        """
        size_bytes = -(-source.numel() // PAGE_BYTES) * PAGE_BYTES
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        offset = self.file.allocate(size_bytes)
        try:
            block = self.wait_for_staging(size_bytes, unless=self._raise_failure)
            try:
                stored = DiskBytes(self, block, offset, size_bytes, source, after)
            except BaseException:
                # Nobody knows how far the copy has come.
                with suppress(Exception):
                    self.device.synchronize()
                self.free_staging(block, after=REACHED)
                raise
        except BaseException:
            self.file.free(offset, size_bytes)
            raise
        try:
            stored.start_writing()
        except BaseException:
            # The thread may be writing already: its memory comes back behind it.
            stored.release()
            raise
        return stored

    def wait_for_staging(self, size_bytes: int, *, unless: Callable[[], None] = lambda: None) -> HostBlock:
        """Return a staging block as soon as the threads have freed one; `unless` may raise while it waits.

        Storages read ahead of their need make room: the free memory may be enough in sum, but in too small pieces.
        Raises HostMemoryError when none will come: no write is under way, and no copy either.
        """
        deadline = time.monotonic() + _DEADLINE_S
        hopeless_since: float | None = None
        while True:
            unless()
            self.sweep()
            write = self.last_write
            is_writing = write is not None and not is_done(write) and self.writer.is_alive
            try:
                return self.staging.allocate(size_bytes)
            except HostMemoryError:
                now = time.monotonic()
                if size_bytes > self._staging_bytes or now > deadline:
                    raise
                if is_writing:
                    hopeless_since = None
                elif hopeless_since is None:
                    self.device.synchronize()
                    self._give_up_ahead()
                    hopeless_since = now
                    continue
                elif now > hopeless_since + _OTHERS_TURN_S:
                    raise
            with self._freed:
                self._freed.wait(0.01)

    def try_staging(self, size_bytes: int) -> HostBlock | None:
        """Return a staging block for reading ahead, if enough is left for a storage needed at once."""
        if self.staging.live_bytes + size_bytes + self._largest_bytes > self._staging_bytes:
            return None
        try:
            return self.staging.allocate(size_bytes)
        except HostMemoryError:
            return None

    def free_staging(self, block: HostBlock, *, after: Event) -> None:
        """Take a block back; its next user comes behind `after`."""
        with self._freed:
            self.staging.free(block, after=after)
            self._freed.notify_all()

    def expect(self, stored: DiskBytes) -> None:
        """Note that `stored` is brought, or kept, ahead of its need."""
        with self._freed:
            self._ahead.add(stored)

    def _give_up_ahead(self) -> None:
        with self._freed:
            ahead = list(self._ahead)
            self._ahead.clear()
        for stored in ahead:
            stored.give_up()

    def fail(self, error: BaseException, failures_raised: int) -> None:
        """Remember an error of a thread for the next call of `store`, unless one was raised since then."""
        with self._freed:
            if failures_raised == self.failures_raised:
                self._failure = error

    def take_back_later(self, stored: DiskBytes) -> None:
        """Take back the memory of `stored` later. Takes no lock, so a finalizer may call it."""
        self._released.append(stored)

    def sweep(self) -> None:
        """Take back released storages without a thread at work on them."""
        with self._freed:
            for _ in range(len(self._released)):
                stored = self._released.popleft()
                if not stored.give_back():
                    self._released.append(stored)

    def close(self) -> None:
        """Wait for the threads and give everything back. Calling it again does nothing."""
        undo_all([self.file.close, self.staging.close, self.sweep, self.reader.close, self.writer.close])

    def _raise_failure(self) -> None:
        with self._freed:
            failure, self._failure = self._failure, None
            self.failures_raised += failure is not None
        if failure is not None:
            raise failure


class DiskBytes(ReleasedOnce):
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
        super().__init__()
        self._tier = tier
        self._failures_raised = tier.failures_raised
        self._block: HostBlock | None = block
        self._offset = offset
        self._padded_bytes = size_bytes
        self._size_bytes = source.numel()
        self._lock = UninterruptedLock()
        self._writing: Future[None] | None = None
        self._reading: Future[None] | None = None
        # Once backward is near, the block stays until the copy to the device has been started.
        self._is_wanted = False
        self._is_needed = False
        self._is_written = False
        host = block.view(torch.uint8, (self._size_bytes,))
        self.stored = tier.device.copy_out(host, source, after=(after, block.ready), for_threads=True)
        self._last_copy = self.stored

    def start_writing(self) -> None:
        """Queue the write behind the copy; it is the tier's last one."""
        with self._lock:
            self._writing = self._tier.last_write = self._tier.writer.submit(self._write)

    def prepare(self) -> None:
        """Queue the read when staging memory is free; does nothing while the bytes still are in memory."""
        self._tier.expect(self)
        with self._lock:
            self._is_wanted = True
            if self._block is None and (block := self._tier.try_staging(self._padded_bytes)) is not None:
                try:
                    self._start_reading(block)
                except BaseException:
                    self._tier.free_staging(block, after=block.ready)
                    raise

    def load(self, target: torch.Tensor) -> Event:
        """Wait until the bytes are in memory, and start the H2D copy. Raises DiskError.

        The block goes back behind the copy, since more may be loaded ahead than the staging memory holds at once. After
        an error it may be called again, and reads again.
        """
        block = self._in_memory()
        host = block.view(torch.uint8, (self._size_bytes,))
        loaded = self._tier.device.copy_in(target, host, after=(self._tier.device.record(), self._last_copy))
        with self._lock:
            self._last_copy = loaded
            self._is_wanted = self._is_needed = False
            self._free_staging()
        return loaded

    def give_up(self) -> None:
        """Leave staging memory to others that need it at once, if the file has the bytes; `load` reads them again."""
        reading = self._reading
        if reading is not None:
            with suppress(Exception):
                self._tier.reader.wait(reading, deadline_s=_DEADLINE_S)
        with self._lock:
            if not self._is_needed and not self._is_used(self._reading, self._tier.reader):
                self._is_wanted = False
                self._free_staging()

    def _on_release(self) -> None:
        """Let the tier's next sweep take everything back."""
        self._tier.take_back_later(self)

    def give_back(self) -> bool:
        """Give the extent and the staging block back if no thread uses them; return whether that was so."""
        if self._writing is not None:
            self._writing.cancel()
        if self._is_used(self._writing, self._tier.writer) or self._is_used(self._reading, self._tier.reader):
            return False
        if self._block is not None:
            block, self._block = self._block, None
            self._tier.staging.free(block, after=self._last_copy)
        self._tier.file.free(self._offset, self._padded_bytes)
        return True

    def _in_memory(self) -> HostBlock:
        """Return the block with the bytes; raises the error of reading them, and gives the block back then."""
        with self._lock:
            self._is_wanted = self._is_needed = True
            is_missing = self._block is None
        staging: HostBlock | None = None
        try:
            if is_missing:
                staging = self._tier.wait_for_staging(self._padded_bytes)
            with self._lock:
                if staging is not None and self._block is None:
                    self._start_reading(staging)
                    staging = None
                reading, block = self._reading, self._block
        finally:
            if staging is not None:
                self._tier.free_staging(staging, after=staging.ready)
        assert block is not None
        if reading is None:
            return block
        try:
            self._tier.reader.wait(reading, deadline_s=_DEADLINE_S)
        except BaseException:
            # Of an interrupted wait the thread still fills the block.
            with self._lock:
                if is_done(reading):
                    self._block, self._reading = None, None
                    self._is_wanted = self._is_needed = False
                    self._tier.free_staging(block, after=block.ready)
            raise
        return block

    def _start_reading(self, block: HostBlock) -> None:
        reading = self._tier.reader.submit(functools.partial(self._read, block))
        # Together: a block without its reading would pass for the bytes.
        self._reading, self._block = reading, block

    def _write(self) -> None:
        block = self._block
        assert block is not None
        try:
            self.stored.synchronize()
            self._tier.file.write(self._offset, block.view(torch.uint8, (self._padded_bytes,)))
        except BaseException as error:
            # The bytes stay in memory, so the step in flight can still finish. Nobody asks a write for its result.
            self._tier.fail(error.with_traceback(None), self._failures_raised)
            return
        with self._lock:
            self._is_written = True
            self._free_staging()

    def _free_staging(self) -> None:
        """Give the block back if the file has the bytes and nobody is about to copy them."""
        if self._block is not None and self._is_written and not self._is_wanted:
            block, self._block, self._reading = self._block, None, None
            self._tier.free_staging(block, after=self._last_copy)

    def _read(self, block: HostBlock) -> None:
        block.ready.synchronize()
        self._tier.file.read(self._offset, block.view(torch.uint8, (self._padded_bytes,)))

    @staticmethod
    def _is_used(future: Future[None] | None, worker: Worker) -> bool:
        return future is not None and not is_done(future) and worker.is_alive
