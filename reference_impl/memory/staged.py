# SPDX-License-Identifier: Apache-2.0
"""Copies between the device and pageable memory, through a ring of pinned buffers.

Memory beyond `pinned.limit_pinned_memory` is pageable. As many threads as cores are idle fill and empty the buffers
(`copiers`), awaited ones first. On the way in the calling thread waits until they are full, one after the other, and
starts the H2D copy of each; half of them are filled while the link reads the others. A caller that knows the next copy
says so (`expect`): its first buffers are filled while this copy waits for its last ones. On the way out the D2H copy
into a buffer starts at once, and threads empty the buffer after its end. So a training thread waits only if all buffers
are on their way. Events of the device mean the same as for pinned memory; who reads the host's side waits for the
threads too (`Landing`).

Each direction has buffers of its own, so neither can hold up the other; until something leaves, all are for the way in.
A device has one ring, from its first pageable slab to the end of the limit.

Explained in docs/fitting.md, "Pinned memory".
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch

from reference_impl.device import REACHED, Device, Event, together
from reference_impl.memory.copiers import Copiers, Copy
from reference_impl.memory.interrupts import UninterruptedLock
from reference_impl.memory.pinned import at_end_of_limit, pinned_book
from reference_impl.memory.slab import Slab
from reference_impl.memory.worker import Worker, is_done

# Of each direction, where both are used. Eight of half the size took 4 to 12 percent more of a step (two hosts).
_BUFFERS = 4
# A copy to the host that takes longer is lost.
_DEADLINE_S = 600.0


class Landing:
    """An event: bytes copied out through a buffer, and all before them, have arrived in their own memory."""

    __slots__ = ("_arrival", "_before", "_copiers", "_worker")

    def __init__(
        self, worker: Worker, arrival: Future[Copy], copiers: Copiers, before: Landing | None
    ) -> None:
        """`arrival` is of `worker`: it starts the copy of `copiers` once the buffer is full."""
        self._worker, self._arrival, self._copiers, self._before = worker, arrival, copiers, before

    def query(self) -> bool:
        """Return whether it is there, or never will be."""
        if (before := self._before) is not None:
            if not before.query():
                return False
            self._before = None
        return self.has_failed or (is_done(self._arrival) and self._arrival.result().is_over)

    @property
    def has_failed(self) -> bool:
        """Whether it never will be there."""
        return is_done(self._arrival) and (_failed(self._arrival) or self._arrival.result().error is not None)

    def synchronize(self) -> None:
        """Wait for it: it is needed first. Raises the error of a thread, and RuntimeError when one has died."""
        if (before := self._before) is not None:
            # Its own error is for its waiters.
            with suppress(Exception):
                before.synchronize()
            self._before = None
        self._copiers.wait(self._worker.wait(self._arrival, deadline_s=_DEADLINE_S))


class _Buffers:
    """The pinned buffers of one direction, each with the event after which it may be written."""

    def __init__(self, parts: tuple[torch.Tensor, ...]) -> None:
        self.lock = UninterruptedLock()
        self._turn: deque[tuple[torch.Tensor, Event]] = deque((part, REACHED) for part in parts)
        self.size_bytes = parts[0].numel() if parts else 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._turn)

    def hand_over(self, other: _Buffers, count: int) -> None:
        """Give `count` buffers to `other`, each with its event."""
        with self.lock:
            while other.count < count:
                other._turn.append(self._turn[-1])
                self._turn.pop()
            other.size_bytes = self.size_bytes

    def take(self, size_bytes: int, *, place: int = 0) -> torch.Tensor:
        """Return the buffer at `place` in turn, once it is free."""
        buffer, free = self._turn[place]
        try:
            free.synchronize()
        except Exception:
            # Who reads these bytes is told; the buffer is none the worse.
            if not free.query():
                raise
        return buffer[:size_bytes]

    def give_back(self, *, after: Event, place: int = 0) -> None:
        """Make the buffer at `place` the last one in turn: it may be written after `after`."""
        buffer, _ = self._turn[place]
        del self._turn[place]
        self._turn.append((buffer, after))


class _Ahead:
    """The first buffers of the host memory that is copied in next: the first ones in turn."""

    def __init__(self) -> None:
        self.addresses = (0, 0)
        self.fills: deque[tuple[torch.Tensor, Copy]] = deque()

    def is_of(self, host: torch.Tensor) -> bool:
        """Return whether they are filled with the bytes of `host`."""
        return bool(self.fills) and self.addresses == _addresses(host)


class Ring:
    """The `StagedCopies` of one device, with `size_bytes` of pinned buffers."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        """Pin the buffers. Raises HostMemoryError, and errors of the driver."""
        self._device = device
        # Copies on their way to the host, and lost ones: first and last address, and the event of the arrival.
        self._landing: deque[tuple[int, int, Landing]] = deque()
        self._lost: list[tuple[int, int, Landing]] = []
        self._putting_away = UninterruptedLock()
        # The host memory that is copied in behind the next copy in, and buffers that are filled with it already.
        self._expected: torch.Tensor | None = None
        self._ahead = _Ahead()
        self._slab = Slab(
            device, size_bytes, remedy="try a smaller limit", for_ring=True, most_bytes=size_bytes
        )
        try:
            buffers = self._slab.bytes.split(size_bytes // (2 * _BUFFERS))[: 2 * _BUFFERS]
            self._out, self._in = _Buffers(()), _Buffers(buffers)
            self._copiers = Copiers("host-copies")
            # Waits for buffers that are being filled by the device.
            self._worker = Worker("staged-copies")
        except BaseException:
            # An error that is kept would keep the pages, and with them the ring's part of the limit.
            self._slab.close()
            raise

    def serve(self, slab: Slab) -> None:
        """Take over the copies of a pageable slab until it is forgotten."""
        # An earlier slab at this address may have been dropped with its failed copy.
        self._forget(slab.bytes)
        self._device.pageable[slab.bytes.untyped_storage().data_ptr()] = self

    def copy_out(self, host: torch.Tensor, source: torch.Tensor) -> Event:
        """Start filling `host`; return the event that its readers on the host wait for beside the stream."""
        landings: list[Event] = []
        with self._out.lock, self._copies_ended_on_error():
            if self._out.count < _BUFFERS:
                self._in.hand_over(self._out, _BUFFERS)
            self._begin_anew(host)
            for part, piece in _pieces(host, source, self._out.size_bytes):
                buffer = self._out.take(part.numel())
                self._device.copy(buffer, piece)
                landings.append(self._land(part, buffer, self._device.record(for_threads=True)))
                self._out.give_back(after=landings[-1])
        return together(*landings)

    def copy_in(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Start filling `target`, after all copies on their way into `host`; `host` may be written on return."""
        self._wait_landed(host)
        # Buffers that are being filled, the first one first.
        filling: deque[tuple[torch.Tensor, torch.Tensor, Copy]] = deque()
        with self._in.lock, self._copies_ended_on_error(filling):
            expected, self._expected = self._expected, None
            if expected is not None and _addresses(expected) == _addresses(host):
                # What was copied in between was pinned.
                expected = None
            pieces = _pieces(target, host, self._in.size_bytes)
            if self._ahead.is_of(host):
                filling.extend(
                    (part, *fill) for fill, (part, _) in zip(self._ahead.fills, pieces, strict=False)
                )
                self._ahead.fills.clear()
            elif expected is not None:
                self._drop_ahead()
            # Of others, which come first in turn.
            ahead = len(self._ahead.fills)
            # The link reads the other half: who fills all of them waits for the one sent last, alone on the link.
            most = min(self._in.count // 2, self._in.count - ahead)
            for part, piece in pieces:
                while len(filling) >= most:
                    self._send(filling, ahead)
                buffer = self._in.take(part.numel(), place=ahead + len(filling))
                filling.append((part, buffer, self._copiers.start(buffer, piece, is_needed=True)))
            following = iter(()) if expected is None or ahead else self._begin_ahead(expected)
            while filling:
                for piece in islice(following, max(most - len(filling) - len(self._ahead.fills), 0)):
                    buffer = self._in.take(piece.numel(), place=len(filling) + len(self._ahead.fills))
                    self._ahead.fills.append((buffer, self._copiers.start(buffer, piece, is_needed=True)))
                self._send(filling, ahead)

    def expect(self, host: torch.Tensor | None) -> None:
        """Have the next copy in fill free buffers with `host`, which is copied in behind it and not written before.

        With None, forget it: what was to be copied in is not.
        """
        self._expected = host
        if host is None:
            with self._in.lock:
                self._drop_ahead()

    def synchronize(self) -> None:
        """Wait until all bytes copied out are in their own memory; raise once why it is not."""
        for _, _, landing in tuple(self._landing):
            try:
                landing.synchronize()
            except BaseException:
                self._put_away()
                raise

    def close(self) -> None:
        """Unlock the buffers. Raises RuntimeError where pageable memory is still in use."""
        if any(staged is self for staged in self._device.pageable.values()):
            raise RuntimeError(
                "pageable memory of an offloader is still in use; expected all to be closed before the limit on pinned "
                "memory is lifted; try closing them first"
            )
        # Nobody is left to read bytes that have not come.
        with suppress(Exception):
            self.synchronize()
        self._worker.close()
        self._copiers.close()
        self._device.synchronize()
        self._slab.close()

    def _land(self, part: torch.Tensor, buffer: torch.Tensor, copied: Event) -> Landing:
        """Have `buffer` copied to `part` once `copied` is reached."""
        arrival = self._worker.submit(partial(_begin_landing, self._copiers, part, buffer, copied))
        before = self._landing[-1][2] if self._landing else None
        landing = Landing(self._worker, arrival, self._copiers, before)
        self._put_away()
        self._landing.append((*_addresses(part), landing))
        return landing

    def _put_away(self) -> None:
        """Forget ended landings, and remember failed ones."""
        with self._putting_away:
            while self._landing and self._landing[0][2].query():
                if self._landing[0][2].has_failed:
                    self._lost.append(self._landing[0])
                self._landing.popleft()

    def _send(self, filling: deque[tuple[torch.Tensor, torch.Tensor, Copy]], place: int) -> None:
        """Wait until the first of `filling`, at `place` in turn, is full, and start its H2D copy."""
        part, buffer, filled = filling[0]
        self._copiers.wait(filled)
        self._device.copy(part, buffer)
        self._in.give_back(after=self._device.record(for_threads=True), place=place)
        filling.popleft()

    def _begin_ahead(self, host: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return the pieces of `host` to fill buffers with: none where bytes of it are still on their way there."""
        if any(_overlaps(entry, host) for entry in (*self._lost, *self._landing)):
            return iter(())
        self._ahead.addresses = _addresses(host)
        return (piece for _, piece in _pieces(host, host, self._in.size_bytes))

    def _drop_ahead(self) -> None:
        """Stop filling buffers ahead: the expected copy does not come, or comes with other bytes."""
        self._copiers.stop_writing(copy for _, copy in self._ahead.fills)
        self._ahead.fills.clear()

    def _wait_landed(self, host: torch.Tensor) -> None:
        """Wait for the landings in `host`; raise the error of a failed one, until its bytes are copied out again."""
        for entry in (*self._lost, *self._landing):
            if _overlaps(entry, host):
                entry[2].synchronize()

    def _begin_anew(self, host: torch.Tensor) -> None:
        """Have nothing on its way into `host`: threads would land it behind the bytes that are copied out next."""
        for entry in tuple(self._landing):
            if _overlaps(entry, host):
                with suppress(Exception):
                    entry[2].synchronize()
        self._forget(host)

    def _forget(self, host: torch.Tensor) -> None:
        """Forget the landings in `host`, ended or not, and its bytes of before."""
        if self._ahead.fills and _overlaps(self._ahead.addresses, host):
            self.expect(None)
        with self._putting_away:
            self._landing = deque(entry for entry in self._landing if not _overlaps(entry, host))
            self._lost = [entry for entry in self._lost if not _overlaps(entry, host)]

    @contextmanager
    def _copies_ended_on_error(
        self, filling: Iterable[tuple[torch.Tensor, torch.Tensor, Copy]] | None = None
    ) -> Iterator[None]:
        """Wait for the device and for `filling` after an error: nobody knows how far these copies have come."""
        try:
            yield
        except BaseException:
            if filling is not None:
                self._copiers.stop_writing(copy for _, _, copy in filling)
                self._drop_ahead()
            with suppress(Exception):
                self._device.synchronize()
            raise


_rings: dict[Device, Ring] = {}
_making = threading.Lock()


def ring_of(device: Device) -> Ring:
    """Return the ring of `device`, made where there is none yet. Raises as `Ring`."""
    with _making:
        if device not in _rings:
            # First, so that a ring is sure to be closed.
            at_end_of_limit.append(partial(_close_ring, device))
            _rings[device] = Ring(device, pinned_book.ring_bytes)
        return _rings[device]


def _close_ring(device: Device) -> None:
    with _making:
        if device in _rings:
            _rings[device].close()
            del _rings[device]


def _begin_landing(copiers: Copiers, part: torch.Tensor, buffer: torch.Tensor, copied: Event) -> Copy:
    copied.synchronize()
    return copiers.start(part, buffer, is_needed=False)


def _failed(future: Future[Any]) -> bool:
    """Return whether a future is over without a result."""
    return future.cancelled() or (future.done() and future.exception() is not None)


def _overlaps(entry: tuple[int, int, *tuple[Landing, ...]], host: torch.Tensor) -> bool:
    """Return whether `host` has some of the bytes from the first address of `entry` to its last."""
    start, stop = _addresses(host)
    return entry[0] < stop and start < entry[1]


def _addresses(host: torch.Tensor) -> tuple[int, int]:
    return host.data_ptr(), host.data_ptr() + host.nbytes


def _pieces(
    target: torch.Tensor, source: torch.Tensor, size_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both, flat tensors of one dtype, in pieces of as many bytes."""
    if target.numel():
        flat = (each.detach().view(torch.uint8) for each in (target, source))
        yield from zip(*(each.split(size_bytes) for each in flat), strict=True)
