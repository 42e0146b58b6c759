# SPDX-License-Identifier: Apache-2.0
"""A file without a name that holds extents of bytes.

It is unlinked as soon as it is open, so nothing is left behind however the process ends. Reads and writes go
past the page cache where the file system allows it: spilling is to avoid a second copy in host memory.

Every extent has a checksum, which reading verifies: changed bytes on the disk would make a wrong gradient. It is the
sum of each page's 64-bit words, and the CRC-32 of these sums in order. It finds every flipped bit and every old or
misplaced page, at 10 GB/s on one core. The CRC-32 of all bytes would run at 1.6 GB/s (measured: one AMD EPYC core).

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy
import torch

from reference_impl.memory.closing import owned
from reference_impl.memory.interrupts import UninterruptedLock

# O_DIRECT wants addresses, offsets and lengths in multiples of the logical block; a page suits every disk.
PAGE_BYTES = 4096


class DiskError(OSError):
    """The spill file cannot be made, written or read."""

    def __init__(self, action: str, path: Path, reason: object, remedy: str) -> None:
        super().__init__(f"cannot {action} in {path}: {reason}; {remedy}")


class SpillFile:
    """Extents of one unnamed file in the directory `path`, at most `limit_bytes` in all."""

    def __init__(self, path: str | Path, *, limit_bytes: int) -> None:
        """Open. Raises DiskError when the directory cannot be written or has less than `limit_bytes` free."""
        self._path = Path(path)
        self._limit_bytes = limit_bytes
        self._lock = UninterruptedLock()
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._checksums: dict[int, int] = {}
        self.live_bytes = 0
        try:
            free_bytes = shutil.disk_usage(self._path).free
            # A file that is dropped without close() gives the disk its space back too.
            descriptor, self._close = owned(self, partial(_opened_without_name, self._path), os.close)
        except OSError as error:
            raise DiskError(
                "make a spill file",
                self._path,
                error.strerror,
                "expected a writable directory; try another path",
            ) from error
        if free_bytes < limit_bytes:
            self.close()
            raise DiskError(
                "reserve space",
                self._path,
                f"{limit_bytes / 2**30:.2f} GiB needed, {free_bytes / 2**30:.2f} GiB free",
                "try a smaller limit_bytes or another disk",
            )
        self._descriptor = descriptor
        self.is_direct = self._try_direct()

    def allocate(self, size_bytes: int) -> int:
        """Return the offset of a free extent of `size_bytes`, a multiple of the page. Raises DiskError when full."""
        offset: int | None = None
        try:
            with self._lock:
                same_size = self._free.get(size_bytes)
                if same_size:
                    offset = same_size.pop()
                elif self._end + size_bytes <= self._limit_bytes:
                    offset, self._end = self._end, self._end + size_bytes
                else:
                    raise DiskError(
                        "store",
                        self._path,
                        f"{size_bytes / 2**30:.2f} GiB needed, {(self._limit_bytes - self._end) / 2**30:.2f} GiB left "
                        f"of limit_bytes={self._limit_bytes}",
                        "try a larger limit_bytes or fewer layers",
                    )
                self.live_bytes += size_bytes
            return offset
        except BaseException:
            # An interrupt on the way out: nobody else would give the extent back.
            if offset is not None:
                self.free(offset, size_bytes)
            raise

    def free(self, offset: int, size_bytes: int) -> None:
        """Take an extent back."""
        with self._lock:
            self._free.setdefault(size_bytes, []).append(offset)
            self.live_bytes -= size_bytes

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Write all of `source`, whole pages of host memory. Raises DiskError, for a full disk among others."""
        self._checksums.pop(offset, None)
        checksum = _checksum(source)
        self._transfer(os.pwrite, "write", offset, source)
        self._checksums[offset] = checksum

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fill `target`, whole pages of host memory, with the bytes that were written at `offset`.

        Raises DiskError, also for other bytes than the written ones.
        """
        self._transfer(lambda fd, view, at: os.preadv(fd, [view], at), "read", offset, target)
        written, read = self._checksums.get(offset), _checksum(target)
        if read != written:
            expected = "nothing written" if written is None else f"{written:08x}"
            raise DiskError(
                "read",
                self._path,
                f"{target.numel()} bytes at offset {offset} of the spill file have changed: checksum {read:08x}, "
                f"expected {expected}",
                "try this step again, or another disk",
            )

    def close(self) -> None:
        """Give the disk its space back. Calling it again does nothing."""
        self._close()
        self._descriptor = -1

    def _transfer(
        self, call: Callable[[int, memoryview, int], int], action: str, offset: int, memory: torch.Tensor
    ) -> None:
        view = memory.numpy().data
        done = 0
        while done < len(view):
            try:
                count = call(self._descriptor, view[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self.is_direct:
                    self._stop_direct()
                    continue
                reason = f"{error.strerror} (at offset {offset + done})"
                raise DiskError(action, self._path, reason, "try another disk or fewer layers") from error
            if count == 0:
                raise DiskError(action, self._path, "the file ends early", "try another disk")
            done += count
            if count % PAGE_BYTES and self.is_direct:
                # The rest of a short transfer is no longer aligned.
                self._stop_direct()

    def _try_direct(self) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            return False
        return True

    def _stop_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False


def _opened_without_name(path: Path) -> int:
    descriptor, name = tempfile.mkstemp(dir=path, prefix="offload-")
    try:
        os.unlink(name)
    except BaseException:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return descriptor


def _checksum(pages: torch.Tensor) -> int:
    words = pages.numpy().view(numpy.uint64)
    return zlib.crc32(words.reshape(-1, PAGE_BYTES // words.itemsize).sum(axis=1))
