# SPDX-License-Identifier: Apache-2.0
"""Counts the live bytes of each tier, on CUDA and on the CPU twin.

An accelerator's allocator counts its own bytes, and the ledger only reads the numbers. On the CPU twin both tiers are
ordinary memory, so the ledger watches every operation and follows each new storage until it is freed; it recognises
storages of the host tier by their address. It does not see memory that is not a tensor (the driver's context,
buffers of collectives).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from reference_impl.device import Device
from reference_impl.memory.absent import storage_of
from reference_impl.memory.host import host_book, host_storages

_active: list[_StorageWatch] = []
_open_on_allocators: list[Ledger] = []
# How many `unseen` each thread is in: tensors that others make meanwhile count.
_unseen = threading.local()
_resize = torch.UntypedStorage.resize_


class _StorageWatch(TorchDispatchMode):
    """Follows the storages of every tensor that an operation returns."""

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.marked_peak_bytes = 0
        self._watched: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Most operations return one tensor; a walk through it takes as long as the rest of this.
        leaves = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        self.watch(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start following the storages of `tensors` that are not followed yet; on `meta` none has memory."""
        if getattr(_unseen, "depth", 0):
            return
        for tensor in tensors:
            if tensor.is_meta:
                continue
            if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                # A subclass that handles operations itself has only the memory of its inner tensors.
                self.watch(_inner_tensors(tensor))
                continue
            storage = storage_of(tensor)
            key = storage._cdata
            known = self._watched.get(key)
            if (known and known[0]() is not None) or storage.data_ptr() in host_storages:
                continue
            self.check_room(storage.nbytes())
            self._watched[key] = (weakref.ref(storage, self._forget(key)), storage.nbytes())
            self._add(storage.nbytes())

    def check_room(self, more_bytes: int) -> None:
        """Raise OutOfMemoryError, as an allocator with this limit would, where so much more does not fit."""
        limit = self.limit_bytes
        if limit is not None and more_bytes > 0 and self.live_bytes + more_bytes > limit:
            raise torch.OutOfMemoryError(
                f"the ledger's limit: {more_bytes} bytes more than {self.live_bytes} of {limit}"
            )

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Correct the book after a storage changed its size."""
        known = self._watched.get(storage._cdata)
        if known and known[0]() is not None:
            self._watched[storage._cdata] = (known[0], storage.nbytes())
            self._add(storage.nbytes() - known[1])

    def moved_to_host(self, storage: torch.UntypedStorage) -> None:
        """Follow `storage` no longer: its memory is the host's."""
        known = self._watched.pop(storage._cdata, None)
        if known and known[0]() is not None:
            self.live_bytes -= known[1]

    def _forget(self, key: int) -> Any:
        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            known = self._watched.get(key)
            if known and known[0] is reference:
                del self._watched[key]
                self.live_bytes -= known[1]

        return forget

    def _add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.marked_peak_bytes = max(self.marked_peak_bytes, self.live_bytes)


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def resize_storage(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
    """Change a storage's size, tell every open ledger, and return it. A size of 0 frees its memory under living views.

    While a ledger watches operations, this takes the place of the storage's own method, which is no operation: FSDP2
    frees by it the tensors that it has gathered.
    """
    for watch in _active:
        watch.check_room(size_bytes - storage.nbytes())
    _resize(storage, size_bytes)
    for watch in _active:
        watch.resized(storage)
    return storage


@contextmanager
def unseen() -> Iterator[None]:
    """Leave out tensors that this thread makes inside: only the CPU twin needs them, and nobody keeps them."""
    _unseen.depth = getattr(_unseen, "depth", 0) + 1
    try:
        yield
    finally:
        _unseen.depth -= 1


@contextmanager
def on_host(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Count the memory of `tensors` to the host tier; the CPU twin's is all the same."""
    tensors = list(tensors)
    for tensor in tensors:
        note_on_host(tensor)
    try:
        yield
    finally:
        # They may have other memory by now.
        host_storages.difference_update([storage_of(tensor).data_ptr() for tensor in tensors])


def note_on_host(tensor: torch.Tensor) -> None:
    """Count the memory of `tensor` to the host tier until it is freed."""
    storage = storage_of(tensor)
    address = storage.data_ptr()
    weakref.finalize(storage, host_storages.discard, address)
    host_storages.add(address)
    for watch in _active:
        watch.moved_to_host(storage)


def note_on_device(tensor: torch.Tensor) -> None:
    """Count the memory of `tensor`, if it was the host's, to the device tier."""
    storage = storage_of(tensor)
    if storage.data_ptr() in host_storages:
        host_storages.discard(storage.data_ptr())
        for watch in _active:
            watch.watch([tensor])


def device_bytes(device: Device) -> int | None:
    """Return the live device bytes; on the CPU twin None while no ledger is open, since nobody counts there."""
    if device.allocator is not None:
        return device.allocator.live_bytes
    return _active[-1].live_bytes if _active else None


def mark_peak(device: Device) -> None:
    """Start a new peak for `marked_peak_bytes`: of an allocator its own, which open ledgers read first."""
    if device.allocator is not None:
        for ledger in _open_on_allocators:
            ledger.read_peak()
        device.allocator.reset_peak()
    elif _active:
        _active[-1].marked_peak_bytes = _active[-1].live_bytes


def marked_peak_bytes(device: Device) -> int | None:
    """Return the most live device bytes since the mark, or None where `device_bytes` is None."""
    if device.allocator is not None:
        return device.allocator.peak_bytes
    return _active[-1].marked_peak_bytes if _active else None


class Ledger:
    """Live and peak bytes of both tiers while the context is open.

    >>> with Ledger(Device.of("cpu"), track=model.parameters()) as ledger:
    ...     loss = model(batch).sum()
    ...     ledger.peak_device_bytes

    `track` names tensors that already live on the device when the ledger opens; an allocator counts them anyway.
    An allocation that would bring the device tier over `limit_bytes` while it is open raises torch.OutOfMemoryError.
    """

    def __init__(
        self, device: Device, *, track: Iterable[torch.Tensor] = (), limit_bytes: int | None = None
    ) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._watch = _StorageWatch(limit_bytes) if device.allocator is None else None
        self._track = list(track)
        self._peak_bytes = 0

    def __enter__(self) -> Ledger:
        """Start both peaks from the bytes that are live now."""
        if self._watch is not None:
            self._watch.watch(self._track)
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            _active.append(self._watch)
            torch.UntypedStorage.resize_ = resize_storage  # type: ignore[assignment, method-assign]
        else:
            _open_on_allocators.append(self)
            self._limit(self._limit_bytes)
        self._track.clear()
        self.reset_peak()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; the peaks stay readable."""
        if self._watch is not None:
            _active.remove(self._watch)
            if not _active:
                torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
            self._watch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        else:
            self.read_peak()
            _open_on_allocators.remove(self)
            self._limit(None)

    def _limit(self, limit_bytes: int | None) -> None:
        if self._limit_bytes is not None and self._device.allocator is not None:
            self._device.allocator.limit(limit_bytes)

    def lift_limit(self) -> None:
        """Let the device tier take all memory from here on."""
        if self._watch is not None:
            self._watch.limit_bytes = None
        self._limit(None)

    def reset_peak(self) -> None:
        """Start both peaks from the bytes that are live now."""
        host_book.reset_peak()
        if self._watch is None:
            mark_peak(self._device)
            self._peak_bytes = 0
        else:
            self._watch.peak_bytes = self._watch.live_bytes

    def read_peak(self) -> None:
        """Take over the allocator's peak before a reset."""
        allocator = self._device.allocator
        if allocator is not None:
            self._peak_bytes = max(self._peak_bytes, allocator.peak_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that live on the device tier now."""
        if self._watch is not None:
            return self._watch.live_bytes
        assert self._device.allocator is not None
        return self._device.allocator.live_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Most bytes that lived on the device tier at once since the last reset."""
        if self._watch is not None:
            return self._watch.peak_bytes
        if self in _open_on_allocators:
            self.read_peak()
        return self._peak_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that mechanisms hold on the host now."""
        return host_book.live_bytes

    @property
    def peak_host_bytes(self) -> int:
        """Most bytes that mechanisms held on the host at once since the last reset."""
        return host_book.peak_live_bytes
