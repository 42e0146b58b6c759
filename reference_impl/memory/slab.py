# SPDX-License-Identifier: Apache-2.0
"""Slabs: large pieces of host memory, page-locked when copies are to read or write them.

Pinning is where the first step's time goes: `torch.empty(pin_memory=True)` pins 3 GiB/s and rounds sizes up to powers
of two. 48 GB of huge pages, touched by eight threads a little at a time and registered once, take 2.4 s, 19 GiB/s
(measured on one NVIDIA H200 host, 16 virtual cores). A page new to the virtual machine costs its host a fault too,
which is several times slower. The mapping is private: by default a host gives huge pages to private memory alone. A
slab does not hand out parts of itself; `arena` does.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from reference_impl.device import Device
from reference_impl.memory.closing import do_undoably, undo_as_one
from reference_impl.memory.host import (
    HostMemoryError,
    available_bytes,
    host_book,
    host_storages,
    left_of_address_space,
)
from reference_impl.memory.pinned import PinnedMemoryError, pinned_book
from reference_impl.memory.worker import Worker

_HUGE_PAGE_BYTES = 2 * 2**20
# Bytes that slabs leave to everybody else.
RESERVE_BYTES = 2**30
# The threads that launch kernels need cores too.
TOUCHING_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
# A call that makes pages present holds the lock of the whole address space. Registering waits for it while holding
# the driver's own lock, so every launch waits too. On one H200 host a first step that pins 47.5 GB took 9.3 s with
# one call a slab; with calls of 128, 32 and 8 MiB it took 6.8, 4.9 and 4.8 s (four threads; eight: 4.5 s).
_TOUCHED_AT_ONCE_BYTES = 32 * 2**20
# Linux 5.14; Python's mmap module does not name it, and holds the interpreter lock while it advises.
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Promises:
    """Bytes of slabs that are being touched: the kernel still counts them as available."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size_bytes = 0

    def make(self, size_bytes: int, remedy: str) -> Callable[[], None]:
        """Promise `size_bytes`; return the call that keeps the promise. Raises HostMemoryError."""
        # Before the lock: finalizers may run.
        available_bytes(size_bytes + self._size_bytes + RESERVE_BYTES)
        with self._lock:
            available = available_bytes() - self._size_bytes - RESERVE_BYTES
            if size_bytes > available:
                raise HostMemoryError(needed_bytes=size_bytes, available_bytes=available, remedy=remedy)
            self._size_bytes += size_bytes
        return partial(self._keep, size_bytes)

    def _keep(self, size_bytes: int) -> None:
        with self._lock:
            self._size_bytes -= size_bytes


_promises = _Promises()


class Slab:
    """`bytes` is a flat uint8 tensor of zeros of `size_bytes`, or of up to a huge page more, but within `most_bytes`.

    With `pinned` it is page-locked if the device's copies need that; the CPU's own state does not.
    `or_pageable`: memory beyond the limit of pinning stays pageable; `is_pinned` tells. `for_ring`: it is the ring's.

    Raises HostMemoryError when the host lacks the memory, before anything is taken, PinnedMemoryError when so much may
    not be pinned, and RuntimeError when the driver refuses to register the pages (usually the memlock limit).
    """

    def __init__(
        self,
        device: Device,
        size_bytes: int,
        *,
        remedy: str,
        pinned: bool = True,
        or_pageable: bool = False,
        for_ring: bool = False,
        touching_threads: int = TOUCHING_THREADS,
        most_bytes: int | None = None,
    ) -> None:
        # Whole huge pages, as far as a limit allows.
        rounded_bytes = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self.size_bytes = (
            rounded_bytes if most_bytes is None else max(min(rounded_bytes, most_bytes), size_bytes)
        )
        # What gives back all that has been taken, the last first. A call that has failed stays, and is tried again, by
        # another close() or at the latest by the finalizer.
        self._unlocking: list[Callable[[], None]] = []
        promised: list[Callable[[], None]] = []
        try:
            try:
                do_undoably(partial(_promises.make, self.size_bytes, remedy), promised)
                self.is_pinned = pinned and self._may_pin(or_pageable, for_ring=for_ring)
                self._map(_mapped(self.size_bytes, remedy), device, touching_threads)
            except BaseException:
                undo_as_one(self._unlocking)
                raise
            finally:
                undo_as_one(promised)
        finally:
            # A signal may have come before the same line above.
            undo_as_one(promised)

    def _may_pin(self, or_pageable: bool, *, for_ring: bool) -> bool:
        """Count the bytes as pinned; beyond the limit return False if `or_pageable`, else raise."""
        try:
            do_undoably(partial(_counted, self.size_bytes, for_ring=for_ring), self._unlocking)
        except PinnedMemoryError:
            if not or_pageable:
                raise
            return False
        return True

    def _map(self, pages: mmap.mmap, device: Device, touching_threads: int) -> None:
        if self.is_pinned and device.pins_host_memory:
            # A forked child must neither copy locked pages nor make the parent write to others.
            pages.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        do_undoably(partial(_known, device, self.bytes.untyped_storage().data_ptr()), self._unlocking)
        _touch(self.bytes, touching_threads)
        # Pages that are locked and counted are sure to be released: the finalizer is there before either.
        on_device = device if self.is_pinned else None
        self._finalizer = weakref.finalize(self, _release_dropped, on_device, self._unlocking)
        do_undoably(partial(_reserved, self.size_bytes), self._unlocking)
        if self.is_pinned:
            do_undoably(partial(_pinned, device, self.bytes), self._unlocking)

    @property
    def is_open(self) -> bool:
        """Whether the pages are still locked and counted."""
        return bool(self._unlocking)

    def close(self) -> None:
        """Unlock the pages. Views handed out earlier stay readable but are pageable from then on."""
        undo_as_one(self._unlocking)
        self._finalizer.detach()


def _mapped(size_bytes: int, remedy: str) -> mmap.mmap:
    """Return `size_bytes` of new pages. Raises HostMemoryError where the process may not map so many."""
    try:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        left_bytes = left_of_address_space()
        raise HostMemoryError(
            needed_bytes=size_bytes,
            available_bytes=available_bytes() if left_bytes is None else left_bytes,
            remedy=f"{remedy}, or a higher `ulimit -v`",
            kind="address space of this process",
        ) from error
    with suppress(OSError):
        # A kernel without huge pages does not know the advice.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _touch(bytes_: torch.Tensor, threads: int) -> None:
    """Make every page present, one slice a thread, so that page faults run in parallel."""
    if threads == 1:
        _populate(bytes_)
        return
    pages = -(-bytes_.numel() // _HUGE_PAGE_BYTES)
    worker = Worker("touch-pages", threads=threads)
    try:
        parts = bytes_.split(-(-pages // threads) * _HUGE_PAGE_BYTES)
        touched = [worker.submit(partial(_populate, part)) for part in parts]
        for each in touched:
            worker.wait(each)
    finally:
        worker.close()


def _populate(bytes_: torch.Tensor) -> None:
    for part in bytes_.split(_TOUCHED_AT_ONCE_BYTES):
        # Old kernels do not know the advice; writing has the same effect at the price of one more pass.
        if _libc.madvise(part.data_ptr(), part.numel(), _MADV_POPULATE_WRITE) != 0:
            part.zero_()


# Each of these takes something for a slab, and returns the call that gives it back.


def _counted(size_bytes: int, *, for_ring: bool) -> Callable[[], None]:
    pinned_book.take(size_bytes, for_ring=for_ring)
    return partial(pinned_book.give_back, size_bytes, for_ring=for_ring)


def _known(device: Device, address: int) -> Callable[[], None]:
    host_storages.add(address)

    def forget() -> None:
        host_storages.discard(address)
        device.pageable.pop(address, None)

    return forget


def _reserved(size_bytes: int) -> Callable[[], None]:
    host_book.add(reserved=size_bytes)
    return partial(host_book.add, reserved=-size_bytes)


def _pinned(device: Device, pages: torch.Tensor) -> Callable[[], None]:
    try:
        device.pin(pages)
    except BaseException:
        # Memory may be missing behind the registration, which would outlive the pages.
        if pages.is_pinned():
            device.unpin(pages.data_ptr())
        raise
    return partial(device.unpin, pages.data_ptr())


def _release_dropped(device: Device | None, unlocking: list[Callable[[], None]]) -> None:
    """Release a slab that nobody has closed. Copies on `device`, where its pages are pinned, may still use it."""
    if device is not None:
        device.finish_work()
    undo_as_one(unlocking)


@dataclass(frozen=True, slots=True)
class Order:
    """A slab of `size_bytes` that threads are to make."""

    size_bytes: int
    worker: Worker
    slab: Future[Slab]

    def wait(self) -> Slab:
        """Return the slab, or raise the error of making it."""
        return self.worker.wait(self.slab)


class SlabSupply:
    """Makes slabs ahead of their use, so that a first step does not wait for page-locking.

    They come in the order in which they were ordered; each is made by one thread. Touching fresh pages is bound by the
    kernel's zeroing, which runs side by side in as many threads; registering them with the driver then overlaps with
    the touching of the next. Nothing here knows how much will be needed: `arena` is told, and orders.

    A slab whose order is lost to a signal dies with it.
    """

    def __init__(self, device: Device, *, remedy: str, pinned: bool) -> None:
        self._device = device
        self._remedy = remedy
        self._pinned = pinned
        self._process = os.getpid()
        self._worker: Worker | None = None
        self._orders: deque[Order] = deque()

    @property
    def ordered_bytes(self) -> int:
        """Bytes that were ordered and not taken yet."""
        return sum(order.size_bytes for order in self._orders)

    def order(self, size_bytes: int, *, most_bytes: int | None = None) -> None:
        """Have a slab of `size_bytes`, rounded up within `most_bytes`, made in the background."""
        if self._worker is None:
            self._worker = Worker("make-slab", threads=TOUCHING_THREADS, prepare=self._device.use_in_thread)
        make = partial(
            Slab,
            self._device,
            size_bytes,
            remedy=self._remedy,
            pinned=self._pinned,
            or_pageable=True,
            touching_threads=1,
            most_bytes=most_bytes,
        )
        self._orders.append(Order(size_bytes, self._worker, self._worker.submit(make)))

    def take(self) -> Order | None:
        """Return the order that came first, for `made`; None when there is none."""
        if not self._orders:
            return None
        if os.getpid() != self._process:
            # A forked child has the orders, but not the threads that would carry them out.
            self._orders.clear()
            self._worker = None
            return None
        order = self._orders.popleft()
        if not self._orders:
            self._stop()
        return order

    def made(self, order: Order) -> Slab | None:
        """Wait for a slab that was ordered; None when there is no memory for it."""
        try:
            return order.wait()
        except Exception:
            # An order is a guess: a true need of the memory asks for it and gets the error.
            self.close()
            return None

    def close(self) -> None:
        """Forget all orders, and wait for the one that is being carried out. Calling it again does nothing."""
        under_way = [order for order in [*self._orders] if not order.worker.cancel(order.slab)]
        self._orders.clear()
        self._stop()
        for order in under_way:
            with suppress(Exception):
                order.wait().close()

    def _stop(self) -> None:
        # One that a signal has kept from being told ends where it is dropped.
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()
