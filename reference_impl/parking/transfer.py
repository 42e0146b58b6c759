# SPDX-License-Identifier: Apache-2.0
"""Moves storages to the host and back as one transaction, and keeps the host memory for it.

Copies run on the current stream: nobody works beside them, and copy streams would lose time by letting others pass.
On the way out nothing is freed before all bytes are on the host. On the way back no tensor may be used before all
bytes are on the device. So an error leaves all storages parked or all present, and parking can go on.

Explained in docs/parking.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

import torch

from reference_impl.device import Device
from reference_impl.device.base import device_is_full
from reference_impl.memory.arena import HostArena
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.memory.worker import Worker
from reference_impl.parking.storage import Fingerprints, ParkedStorage, set_versions
from reference_impl.parking.tensors import FoundStorage, Kind
from reference_impl.parking.views import UnnamedViews

_RETRY_S = 0.05
# The next piece is allocated while this one is filled: the first is soon there, and each is twice as long as the one
# before. The driver takes long pieces back sooner: with the longest of 2**27 bytes two H200 at once gave 48 GB each
# back in 0.074 s, with 2**30 in 0.060, with 2**32 in 0.055.
_FIRST_PIECE_BYTES, _LONGEST_PIECE_BYTES = 2**27, 2**32


class Transfer:
    """Storages on their way between `device` and at most `host_limit_bytes` of host memory."""

    def __init__(self, device: Device, *, host_limit_bytes: int | None) -> None:
        self._device, self._host_limit_bytes = device, host_limit_bytes
        self._arena: HostArena | None = None
        self._preparing: tuple[Worker, Future[HostArena]] | None = None
        self._views = UnnamedViews()
        # By the storage that each is of.
        self._known: dict[int, ParkedStorage] = {}

    @property
    def parked(self) -> list[ParkedStorage]:
        """The storages whose bytes are on the host."""
        return [each for each in self._known.values() if each.is_parked]

    @property
    def host_bytes(self) -> int:
        """Host memory that is held."""
        return 0 if self._arena is None else self._arena.reserved_bytes

    def prepare(self, sizes: Iterable[int]) -> None:
        """Start to pin host memory for storages of `sizes` bytes in the background, unless there is some."""
        if self._arena is None and self._preparing is None:
            worker = Worker("prepare-parking", prepare=self._device.use_in_thread)
            self._preparing = worker, worker.submit(partial(self._reserved, list(sizes)))

    def take(self, found: Sequence[FoundStorage]) -> list[ParkedStorage]:
        """Return `found` with host memory; storages of the last time keep theirs. Raises HostMemoryError."""
        known = {key: each for key, each in self._known.items() if each.is_parked}
        for each in found:
            before = self._known.get(each.storage._cdata)
            is_same = before is not None and before.finds(each)
            known[each.storage._cdata] = before if before and is_same else ParkedStorage(self._device, each)
        arena = self._arena = self._arena or self._prepared()
        with deferred_interrupts():
            for gone in set(self._known.values()) - set(known.values()):
                gone.give_block(arena)
            self._known = known
        storages = [storage for storage in known.values() if not storage.is_parked]
        if not arena.reserved_bytes:
            arena.reserve_blocks(storage.size_bytes for storage in storages)
        with deferred_interrupts():
            for storage in storages:
                storage.take_block(arena)
        return storages

    def start_early(self, kinds: Collection[Kind]) -> None:
        """Start the copies out of the last parking's storages, before anybody looks which storages there are now.

        To look takes 0.015 s for a thousand storages, as long as the link takes for 0.8 GB. A storage not found again
        has been copied in vain; its host memory is written by others only behind this copy.
        """
        for each in self._known.values():
            if each.kind in kinds and not each.is_parked:
                each.start_early()

    def start_out(self, storages: Sequence[ParkedStorage]) -> int:
        """Start the copies out that have not begun, and return the bytes of all: none of unchanged frozen weights.

        The tensors that nobody has named are looked for while copies run.
        """
        fingerprints = Fingerprints(self._device)
        copied_bytes = sum(each.start_copy_out(fingerprints) for each in storages)
        self._views.add_to(each.found for each in storages if each.found is not None)
        return copied_bytes

    def leave_to_graphs(self, storages: list[ParkedStorage]) -> Mapping[str, str]:
        """Take out of `storages` the ones whose address a graph may know, and return their names with the reason."""
        pools = self._pools()
        left: dict[str, str] = {}
        for each in list(storages) if pools else ():
            if any(start <= each.address < stop for start, stop in pools):
                left[each.name] = (
                    "it is in a memory pool of its own, as of a CUDA graph, which knows its address"
                )
                each.abandon()
                storages.remove(each)
        return left

    @property
    def has_graphs(self) -> bool:
        """Whether there is memory of CUDA graphs, or another pool of its own."""
        return bool(self._pools())

    def finish_out(self, storages: Sequence[ParkedStorage]) -> None:
        """Have the tensors of `storages` refuse to be computed with, and wait until all bytes are on the host."""
        # There is time for it while the copies run.
        for each in storages:
            each.be_absent()
        self._device.synchronize()

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Leave everything on the device where parking is not to be, once no copy runs."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self._device.synchronize()
            for each in self._known.values():
                if not each.is_parked:
                    each.abandon()
            raise

    def free_device(self, storages: Sequence[ParkedStorage]) -> None:
        """Take the memory from under the tensors of `storages`, of all or, after an error, of none."""
        with deferred_interrupts():
            try:
                for each in storages:
                    each.free_device()
            except BaseException:
                # Storages that are free already fit again.
                self.bring_back([each for each in storages if each.is_parked], timeout_s=0.0)
                self.be_present(storages)
                raise

    def give_back(self) -> None:
        """Give free memory of the device to the driver, and so to other processes."""
        if self._device.allocator is not None:
            self._device.allocator.give_back()

    def bring_back(self, storages: Sequence[ParkedStorage], *, timeout_s: float) -> None:
        """Have the bytes of all `storages` on the device, not yet for use; after an error none of them.

        Raises OutOfMemoryError where there is no memory for them within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                for neighbours in _neighbours(storages):
                    self._make_room(neighbours)
                    for each in neighbours:
                        each.take_memory()
                    for each in neighbours:
                        each.start_copy_in()
                self._device.synchronize()
                return
            except Exception as error:
                self.free_again(storages)
                if not device_is_full(error):
                    raise
                if time.monotonic() >= deadline_s:
                    size_bytes = sum(each.size_bytes for each in storages)
                    raise torch.OutOfMemoryError(
                        f"restore() found no memory for {size_bytes / 2**30:.2f} GiB within {timeout_s:g} s; expected "
                        "the device to be free again; everything is still parked; try again once others have given "
                        "their memory back, or a longer timeout_s"
                    ) from error
            time.sleep(_RETRY_S)

    def be_present(
        self, storages: Sequence[ParkedStorage], *, then: Callable[[], None] = lambda: None
    ) -> None:
        """Let the tensors of `storages` be computed with, all of them, also after an error in between; run `then`."""

        def all_are() -> None:
            # In one call: a thousand take a millisecond.
            set_versions([version for each in storages for version in each.versions])
            for each in storages:
                each.be_present()

        with deferred_interrupts():
            try:
                all_are()
            except BaseException:
                all_are()
                raise
            then()

    def free_again(self, storages: Sequence[ParkedStorage]) -> None:
        """Undo `bring_back`."""
        with suppress(Exception):
            self._device.synchronize()
        with deferred_interrupts():
            for each in storages:
                each.free_again()
        self.give_back()

    def drop_host(self) -> None:
        """Give the host memory back; nothing is parked."""
        if self._preparing is not None:
            self._arena = self._prepared()
        arena, self._arena, self._known = self._arena, None, {}
        if arena is not None:
            arena.close()

    def _pools(self) -> Sequence[tuple[int, int]]:
        allocator = self._device.allocator
        return [] if allocator is None else allocator.private_segments()

    def _make_room(self, storages: Sequence[ParkedStorage]) -> None:
        """Let `storages` be next to each other on the device: the driver takes few large pieces back sooner."""
        allocator = self._device.allocator
        if allocator is not None and not allocator.segments_grow:
            allocator.make_room(each.size_bytes for each in storages)

    def _reserved(self, sizes: Sequence[int]) -> HostArena:
        arena = self._new_arena()
        arena.reserve_blocks(sizes)
        return arena

    def _prepared(self) -> HostArena:
        """Return the arena that was prepared, or a new one."""
        preparing, self._preparing = self._preparing, None
        if preparing is None:
            return self._new_arena()
        worker, future = preparing
        try:
            return worker.wait(future)
        finally:
            worker.close()

    def _new_arena(self) -> HostArena:
        return HostArena(
            self._device,
            limit_bytes=self._host_limit_bytes,
            serves="parked training",
            remedy="try a larger host_limit_bytes, gradients='drop', or park(weights=False)",
        )


def _neighbours(storages: Sequence[ParkedStorage]) -> Iterator[list[ParkedStorage]]:
    """Yield `storages` in groups that are worth a piece of memory of their own, each group of one kind.

    Gradients get short pieces: a step frees them, and the first tensor that takes their place holds its whole piece.
    """
    group: list[ParkedStorage] = []
    size_bytes, piece_bytes = 0, _FIRST_PIECE_BYTES
    for each in storages:
        if group and each.kind != group[0].kind:
            yield group
            group, size_bytes = [], 0
        group.append(each)
        size_bytes += each.size_bytes
        if size_bytes >= (_FIRST_PIECE_BYTES if each.kind == "gradients" else piece_bytes):
            yield group
            if each.kind != "gradients":
                piece_bytes = min(2 * piece_bytes, _LONGEST_PIECE_BYTES)
            group, size_bytes = [], 0
    if group:
        yield group
