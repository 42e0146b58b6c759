# SPDX-License-Identifier: Apache-2.0
"""A device as the mechanisms see it: streams, events, times, memory statistics and pinned host memory.

A copy is asynchronous: it runs on a copy stream, one for each direction, after the events it is given, and returns
the event that marks its end. Latency-sensitive copies have streams of their own: new weights for the running forward,
and tensors awaited by host threads, such as gradients.

Lifetime is references and events: nothing here calls `record_stream`, and nothing allocates inside a copy stream's
context. Streams are made once a device and reused, because every new stream would keep an allocator pool of its own.

Every copy, event, pin and change of stream of this package goes through a method of `Device`. Explained in
docs/design.md.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch


class Event(Protocol):
    """A point in a device's work that is reached once."""

    def query(self) -> bool:
        """Return whether the point has been reached, without waiting."""

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached. Releases the GIL."""


class Reached:
    """An event that is over already, such as each of the CPU twin."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


REACHED = Reached()


class EventGroup:
    """Several events as one: a device waits for the events of its own work, a thread for all."""

    __slots__ = ("events",)

    def __init__(self, events: tuple[Event, ...]) -> None:
        self.events = events

    def query(self) -> bool:
        """Return whether all are reached."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """Wait for one after the other; raises their errors."""
        for event in self.events:
            event.synchronize()


def together(*events: Event) -> Event:
    """Return one event that is reached when all of `events` are."""
    if events[1:] == (REACHED,):
        # Of every copy to pinned memory.
        return events[0]
    pending = tuple(event for event in events if event is not REACHED)
    return EventGroup(pending) if len(pending) > 1 else (pending or (REACHED,))[0]


class StagedCopies(Protocol):
    """Copies between a device and pageable host memory, on the live current stream."""

    def copy_out(self, host: torch.Tensor, source: torch.Tensor) -> Event:
        """Start filling `host`; return the event that its readers on the host wait for beside the stream."""

    def copy_in(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Start filling `target`, after all copies on their way into `host`; `host` may be written on return."""

    def expect(self, host: torch.Tensor | None) -> None:
        """Read `host` ahead during the next copy in: it is copied in behind that one, and not written before."""

    def synchronize(self) -> None:
        """Wait until all bytes copied out are in their own memory."""


# The words of CUDA and its libraries where memory is short: pinned memory, an event, a library's handle.
_SHORT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "NOT_INITIALIZED")


class PinningError(RuntimeError):
    """The driver does not lock so much host memory."""


def device_is_full(error: BaseException) -> bool:
    """Return whether `error` says that a device or one of its libraries has found no memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORT_OF_MEMORY)
    )


def device_is_lost(error: BaseException) -> bool:
    """Return whether the device is gone after `error`: an error of CUDA that is no lack of memory lasts."""
    is_of_device = isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
    )
    return is_of_device and not device_is_full(error)


class Mark(Protocol):
    """A point in a device's work that keeps its time."""

    def seconds_until(self, later: Any) -> float:
        """Return the seconds from here to `later`, a mark of the same device; waits until that is reached."""


class Allocator(Protocol):
    """Statistics of a device's own memory."""

    @property
    def live_bytes(self) -> int:
        """Bytes that tensors hold now."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes that tensors held at once since `reset_peak`."""

    def reset_peak(self) -> None:
        """Start a new peak from the bytes that are live now."""

    @property
    def retries(self) -> int:
        """How often the cache had to be given back before memory was found."""

    @property
    def segments_grow(self) -> bool:
        """Whether a segment can grow: if not, a cache in pieces has no room for a tensor that is longer than each."""

    def let_segments_grow(self) -> Callable[[], None]:
        """Let the process's segments grow, and return the call that undoes it; the user's environment comes first."""

    def limit(self, limit_bytes: int | None) -> None:
        """Refuse to take more than `limit_bytes` from the driver, cache included; None lifts it."""

    def private_segments(self) -> list[tuple[int, int]]:
        """Return the addresses, begin and end, of memory pools that are not everybody's: graphs know theirs.

        Not for the hot path.
        """

    def make_room(self, sizes: Iterable[int]) -> None:
        """Make one free piece for the next allocations, of `sizes` bytes, if the device has one of that length."""

    def give_back(self) -> None:
        """Give the allocator's cache back to the driver. Not for the hot path."""

    def free_bytes(self) -> int:
        """Give the allocator's cache back and return the bytes that any process may take. Not for the hot path."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the device, taken or not."""


class Device(ABC):
    """One device and its copy streams.

    A class for one type of torch device names it: `class CudaDevice(Device, torch_type="cuda")`. A class without a
    type, as tests derive from the twin, serves where it is passed.
    """

    # Whether the device works on its own, beside the host, and has memory of its own. The CPU twin does not.
    is_accelerator: ClassVar[bool]
    # Whether kernels of its own (with triton) update packed states, or the source of these runs eagerly, in blocks.
    compiles: ClassVar[bool]
    # Whether host memory has to be pinned for copies, see `pin`.
    pins_host_memory: ClassVar[bool]

    # The class for each type of torch device.
    classes: ClassVar[dict[str, type[Device]]] = {}

    def __init_subclass__(cls, *, torch_type: str | None = None) -> None:
        """Make `cls` the class of torch devices of `torch_type`."""
        super().__init_subclass__()
        if torch_type is not None:
            Device.classes[torch_type] = cls

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        # Whose small copies out are waited for: while there is any, bulk copies out alternate between two streams. That
        # costs something, so nobody else pays for it.
        self.latency_sensitive: weakref.WeakSet[object] = weakref.WeakSet()
        # Who waits for small copies in all through a step: while there is any, bulk copies in have smaller parts.
        self.gathering: weakref.WeakSet[object] = weakref.WeakSet()
        # By its address, pageable memory that copies reach through pinned memory only; see `memory.staged`.
        self.pageable: dict[int, StagedCopies] = {}

    @staticmethod
    def of(device: torch.device | str) -> Device:
        """Return the one `Device` for a torch device, `cuda` meaning the current one.

        Raises ValueError for a type other than `cuda` and `cpu`, or a missing accelerator.
        """
        try:
            torch_device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"device is {device!r}; expected a torch device; try 'cuda', or 'cpu'"
            ) from error
        kind = Device.classes.get(torch_device.type)
        if kind is None:
            raise ValueError(
                f"device {torch_device} is not supported; expected {' or '.join(sorted(Device.classes))}; "
                "try moving the model there"
            )
        if kind.count() == 0:
            raise ValueError(
                f"device {str(device)!r}: torch {torch.__version__} sees no {torch_device.type.upper()} device; "
                "expected one; try cpu"
            )
        return _device(kind, kind.with_index(torch_device))

    @staticmethod
    def available(name: str | None = None) -> Device:
        """Return the device called `name`; without a name an accelerator if there is one, else the CPU twin.

        Raises ValueError for an unsupported type, or a missing accelerator.
        """
        if name is None:
            usable = (each for each, kind in Device.classes.items() if kind.is_accelerator and kind.count())
            return Device.of(next(usable, "cpu"))
        return Device.of(name)

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return how many devices of this class the machine has, 0 where torch sees none."""

    @classmethod
    def with_index(cls, torch_device: torch.device) -> torch.device:
        """Return `torch_device` with the index of the current device where it has none."""
        return torch_device

    @property
    def has_kernels(self) -> bool:
        """Whether kernels of this package run here, or their source on the twin: a GPU needs triton for them."""
        return not self.compiles or find_spec("triton") is not None

    @property
    @abstractmethod
    def name(self) -> str:
        """The hardware's own name."""

    @property
    @abstractmethod
    def allocator(self) -> Allocator | None:
        """Statistics of the device's memory; None on the CPU twin, where `memory.ledger` counts."""

    @abstractmethod
    def use_in_thread(self) -> None:
        """Make this the calling thread's current device. A new thread would wake the first one instead."""

    @abstractmethod
    def current_stream_id(self) -> int:
        """Return a number that tells the live current stream from others."""

    @abstractmethod
    def current_stream(self) -> Any:
        """Return the live current stream, for `on`."""

    @abstractmethod
    def record(self, *, for_threads: bool = False) -> Event:
        """Mark the end of the live current stream's work so far.

        `for_threads`: a thread that waits for it sleeps, instead of occupying a core.
        """

    @abstractmethod
    def mark(self) -> Mark:
        """Mark the end of the live current stream's work so far, with its time; dearer than `record`."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make the live current stream wait for `event`, or for the device's own part of several; the host goes on."""

    @abstractmethod
    def on_d2h(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Make the D2H copy stream current for a copy of `size_bytes`. Nothing may be allocated inside."""

    @abstractmethod
    def on_d2h_for_threads(self) -> AbstractContextManager[object]:
        """Make the D2H stream current for copies that threads of the host wait for. Nothing may be allocated inside."""

    @abstractmethod
    def on_h2d(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Make the H2D copy stream current for a copy of `size_bytes`. Nothing may be allocated inside."""

    @abstractmethod
    def on_h2d_of_weights(self) -> AbstractContextManager[object]:
        """Make the H2D stream of new weights current. Nothing may be allocated inside."""

    @abstractmethod
    def on_update_stream(self) -> AbstractContextManager[object]:
        """Make the stream of optimizer updates current, which goes before the kernels of others.

        Nothing may be allocated inside that is used on another stream.
        """

    @abstractmethod
    def on_decompression_stream(self) -> AbstractContextManager[object]:
        """Make the stream of kernels current that write arriving weights. Nothing may be allocated inside."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make another `stream` current, such as one of FSDP. Only on a compute stream may anything be allocated."""

    def synchronize(self) -> None:
        """Block until all work of this device is done, and all copies are there. Not for the hot path."""
        self.finish_work()
        for staged in set(self.pageable.values()):
            staged.synchronize()

    @abstractmethod
    def finish_work(self) -> None:
        """Block until every stream of the device is done."""

    @property
    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether a graph of kernels is being captured on the current stream."""

    @abstractmethod
    def refuse_capture(self, caller: str) -> None:
        """Raise RuntimeError when a graph of kernels is being captured: host-driven copies cannot be replayed."""

    @abstractmethod
    def pin(self, memory: torch.Tensor) -> None:
        """Page-lock `memory` (flat uint8 on the host, present), so that copies to and from it are asynchronous.

        Raises RuntimeError when the driver refuses.
        """

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo `pin` of the memory at `address`."""

    def is_pageable(self, host: torch.Tensor) -> bool:
        """Return whether copies reach `host` through pinned memory only."""
        return bool(self.pageable) and host.untyped_storage().data_ptr() in self.pageable

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy between host and device on the live current stream; the host goes on. Allocates nothing.

        Returns the event that readers of a `target` on the host wait for beside the stream, if it is pageable.
        """
        if self.pageable:
            if (staged := self.pageable.get(target.untyped_storage().data_ptr())) is not None:
                return staged.copy_out(target, source)
            if (staged := self.pageable.get(source.untyped_storage().data_ptr())) is not None:
                staged.copy_in(target, source)
                return REACHED
        target.copy_(source, non_blocking=True)
        return REACHED

    def expect_copy_in(self, host: torch.Tensor) -> None:
        """Read pageable `host` ahead during the next copy in: it is copied in behind that one, and not written before.

        If it will not come, `forget_expected` comes before a write.
        """
        if self.pageable and (staged := self.pageable.get(host.untyped_storage().data_ptr())) is not None:
            staged.expect(host)

    def forget_expected(self) -> None:
        """Forget pageable bytes that were read ahead: they may be written."""
        for staged in set(self.pageable.values()):
            staged.expect(None)

    def launch(self, kernel: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Launch `kernel`, and once more if there was no memory to load it; it changes its arguments.

        CUDA loads a kernel with its first launch, into memory that the allocator's cache may have taken: the cache is
        given back first. A launch that has raised has changed nothing.
        """
        try:
            kernel(*arguments, **options)
        except RuntimeError as error:
            if not device_is_full(error):
                raise
            if self.allocator is not None:
                self.allocator.give_back()
            kernel(*arguments, **options)

    def copy_out(
        self, host: torch.Tensor, source: torch.Tensor, *, after: Iterable[Event], for_threads: bool = False
    ) -> Event:
        """Start the D2H copy of `source` into `host` (same dtype and numel) once all of `after` are reached.

        Returns the event of its end, see `record`. The caller keeps both tensors alive until then.
        """
        with self.on_d2h_for_threads() if for_threads else self.on_d2h(host.nbytes):
            for event in after:
                self.wait(event)
            landed = self.copy(host, source)
            return together(self.record(for_threads=for_threads), landed)

    def copy_in(self, target: torch.Tensor, host: torch.Tensor, *, after: Iterable[Event]) -> Event:
        """Start the H2D copy of `host` into `target` (same dtype and numel) once all of `after` are reached.

        Returns the event of its end. The caller keeps both tensors alive until then.
        """
        with self.on_h2d(host.nbytes):
            for event in after:
                self.wait(event)
            self.copy(target, host)
            return self.record()


@cache
def _device(kind: type[Device], torch_device: torch.device) -> Device:
    return kind(torch_device)
