"""Copies between the device and pageable memory, through a ring of pinned buffers.

Pageable memory is what exceeds `pinned.limit_pinned_memory`. On the way in the calling thread fills a buffer and starts
its H2D copy; it waits only where the buffer's last copy is still under way. On the way out the D2H copy into a buffer
starts at once, and a thread empties it, so a training thread waits only where all buffers are on their way. Events of
the device are what they are for pinned memory; who reads the host's side waits for the thread too (`Landing`).

Each direction has buffers of its own, so neither can hold up the other. A device has one ring, from its first pageable
slab to the end of the limit.

Explained in docs/fitting.md, "Pinned memory".
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

import torch

from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.memory.pinned import at_end_of_limit, pinned_book
from reference_impl.memory.slab import Slab
from reference_impl.memory.worker import Worker, is_done

# Of each direction: one is filled, one copied, and two are between.
_BUFFERS = 4
# A copy to the host that takes longer is lost.
_DEADLINE_S = 600.0


class Landing:
    """An event: a thread has brought what was copied out to where it belongs."""

    __slots__ = ("_future", "_worker")

    def __init__(self, worker: Worker, future: Future[None]) -> None:
        self._worker, self._future = worker, future

    def query(self) -> bool:
        """Return whether the thread is done with it."""
        return is_done(self._future)

    def synchronize(self) -> None:
        """Wait for the thread; raise what it has raised, and RuntimeError when it has died."""
        self._worker.wait(self._future, deadline_s=_DEADLINE_S)


class _Buffers:
    """The pinned buffers of one direction, each with the event after which it may be written."""

    def __init__(self, parts: tuple[torch.Tensor, ...]) -> None:
        self.lock = threading.Lock()
        self._turn: deque[tuple[torch.Tensor, Event]] = deque((part, REACHED) for part in parts)
        self.size_bytes = parts[0].numel()

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return the buffer whose turn it is, once it is free."""
        buffer, free = self._turn[0]
        free.synchronize()
        return buffer[:size_bytes]

    def give_back(self, *, after: Event) -> None:
        """Let the next one have its turn."""
        buffer, _ = self._turn.popleft()
        self._turn.append((buffer, after))


class Ring:
    """The `StagedCopies` of one device, with `size_bytes` of pinned buffers."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        """Pin the buffers. Raises HostMemoryError, and what the driver raises."""
        self._device = device
        self._slab = Slab(
            device, size_bytes, remedy="try a smaller limit", for_ring=True, most_bytes=size_bytes
        )
        buffers = self._slab.bytes.split(size_bytes // (2 * _BUFFERS))[: 2 * _BUFFERS]
        self._out, self._in = _Buffers(buffers[:_BUFFERS]), _Buffers(buffers[_BUFFERS:])
        self._worker = Worker("staged-copies")
        # What is on its way to the host: from which address to which, and when it is there.
        self._landing: deque[tuple[int, int, Landing]] = deque()

    def serve(self, slab: Slab) -> None:
        """Take over the copies of a pageable slab until it is forgotten."""
        self._device.pageable[slab.bytes.untyped_storage().data_ptr()] = self

    def copy_out(self, host: torch.Tensor, source: torch.Tensor) -> Event:
        """Start filling `host`; return what its readers on the host wait for beside the stream."""
        landed: Event = REACHED
        with deferred_interrupts(), self._out.lock, self._settled_after_failure():
            for part, piece in _pieces(host, source, self._out.size_bytes):
                buffer = self._out.take(part.numel())
                self._device.copy(buffer, piece)
                landed = self._land(part, buffer, self._device.record(for_threads=True))
                self._out.give_back(after=landed)
        return landed

    def copy_in(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Start filling `target`, after all that is on its way into `host`, which may be written on return."""
        self._wait_landed(host)
        with deferred_interrupts(), self._in.lock, self._settled_after_failure():
            for part, piece in _pieces(target, host, self._in.size_bytes):
                buffer = self._in.take(part.numel())
                buffer.copy_(piece)
                self._device.copy(part, buffer)
                self._in.give_back(after=self._device.record(for_threads=True))

    def synchronize(self) -> None:
        """Wait until all that was copied out is where it belongs."""
        for _, _, landing in tuple(self._landing):
            landing.synchronize()

    def close(self) -> None:
        """Unlock the buffers. Raises RuntimeError where pageable memory is still in use."""
        if any(staged is self for staged in self._device.pageable.values()):
            raise RuntimeError(
                "pageable memory of an offloader is still in use; expected all to be closed before the limit on pinned "
                "memory is lifted; try closing them first"
            )
        self.synchronize()
        self._worker.close()
        self._device.synchronize()
        self._slab.close()

    def _land(self, part: torch.Tensor, buffer: torch.Tensor, copied: Event) -> Landing:
        """Have the thread copy `buffer` to `part` once `copied` is reached."""
        landing = Landing(self._worker, self._worker.submit(partial(_bring, part, buffer, copied)))
        while self._landing and self._landing[0][2].query():
            self._landing.popleft()
        self._landing.append((*_addresses(part), landing))
        return landing

    def _wait_landed(self, host: torch.Tensor) -> None:
        start, stop = _addresses(host)
        for first, end, landing in tuple(self._landing):
            if first < stop and start < end:
                landing.synchronize()

    @contextmanager
    def _settled_after_failure(self) -> Iterator[None]:
        """Wait for the device after an error: nobody knows how far the copy of the last buffer has come."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self._device.synchronize()
            raise


_rings: dict[Device, Ring] = {}
_making = threading.Lock()


def ring_of(device: Device) -> Ring:
    """Return the ring of `device`, made where there is none yet. Raises what `Ring` does."""
    with _making:
        if device not in _rings:
            _rings[device] = Ring(device, pinned_book.ring_bytes)
            at_end_of_limit.append(partial(_close_ring, device))
        return _rings[device]


def _close_ring(device: Device) -> None:
    with _making:
        _rings[device].close()
        del _rings[device]


def _bring(part: torch.Tensor, buffer: torch.Tensor, copied: Event) -> None:
    copied.synchronize()
    part.copy_(buffer)


def _addresses(host: torch.Tensor) -> tuple[int, int]:
    return host.data_ptr(), host.data_ptr() + host.nbytes


def _pieces(
    target: torch.Tensor, source: torch.Tensor, size_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both, flat tensors of one dtype, in pieces of as many bytes."""
    if target.numel():
        flat = (each.detach().view(torch.uint8) for each in (target, source))
        yield from zip(*(each.split(size_bytes) for each in flat), strict=True)
