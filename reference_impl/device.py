"""The device that training runs on: CUDA with streams and events, or its CPU twin.

Every mechanism in this package is written once against `Device`. On CUDA a copy is asynchronous: it runs on a
copy stream of its own, one for each direction, after the event it is given, and returns the event that marks
its end. What somebody waits for has a stream of its own besides, each way: new weights, which a forward is about to
need, and what threads of the host need, such as gradients. It does not queue behind the gigabytes of others, because
these give way (`GivingWay`) while anybody is in a hurry (`Device.hurried`).
The CPU twin makes the same copies between two tiers of ordinary memory, at once, so that the same
engine can be tested for values, lifetime and memory where there is no GPU.

Lifetime is references and events: nothing here calls `record_stream`, and nothing allocates inside a copy
stream's context. Streams are made once a device and reused, because every new stream would keep an allocator
pool of its own.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch

# Others wait 1.2 ms at most.
_TURN_BYTES = 64 * 2**20


class Event(Protocol):
    """A point in a device's work that is reached once."""

    def query(self) -> bool:
        """Return whether the point has been reached, without waiting."""

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached. Releases the GIL."""


class Reached:
    """The event of the CPU twin: its work is over when the call returns."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


REACHED = Reached()


class Device(ABC):
    """One device and its copy streams."""

    def __init__(self, torch_device: torch.device) -> None:
        """Keep the torch device that tensors of the device tier live on."""
        self.torch_device = torch_device
        # Whose small copies somebody waits for: while there is any, bulk copies give way. Nobody else pays for that.
        self.hurried: weakref.WeakSet[object] = weakref.WeakSet()

    @staticmethod
    def of(device: torch.device | str) -> Device:
        """Return the one `Device` for a torch device, `cuda` meaning the current one.

        Raises ValueError for a type that is neither `cuda` nor `cpu`.
        """
        torch_device = torch.device(device)
        if torch_device.type == "cuda" and torch_device.index is None:
            torch_device = torch.device("cuda", torch.cuda.current_device())
        return _device(torch_device)

    @property
    @abstractmethod
    def is_cuda(self) -> bool:
        """Whether work is asynchronous."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the hardware calls itself."""

    @abstractmethod
    def current_stream_id(self) -> int:
        """Return a number that tells the live current stream from others."""

    @abstractmethod
    def record(self, *, for_threads: bool = False) -> Event:
        """Mark the end of what the live current stream has been given so far.

        `for_threads`: a thread that waits for it sleeps, instead of burning the core that others need.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make the live current stream wait for `event`; the host goes on."""

    @abstractmethod
    def on_d2h(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Make the D2H copy stream current for a copy of `size_bytes`. Nothing may be allocated inside."""

    @abstractmethod
    def on_d2h_for_threads(self) -> AbstractContextManager[object]:
        """Make the stream current on which goes out what threads wait for. Nothing may be allocated inside."""

    @abstractmethod
    def on_h2d(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Make the H2D copy stream current for a copy of `size_bytes`. Nothing may be allocated inside."""

    @abstractmethod
    def on_h2d_of_weights(self) -> AbstractContextManager[object]:
        """Make the stream current on which new weights come home. Nothing may be allocated inside."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all work of this device is done. Not for the hot path."""

    @abstractmethod
    def refuse_capture(self, what: str) -> None:
        """Raise RuntimeError when a CUDA graph is being captured: host-driven copies cannot be replayed."""

    def copy_out(
        self, host: torch.Tensor, source: torch.Tensor, *, after: Iterable[Event], for_threads: bool = False
    ) -> Event:
        """Start the D2H copy of `source` into `host` (same dtype and numel) once all of `after` are reached.

        Returns the event of its end, see `record`. The caller keeps both tensors alive until then.
        """
        with self.on_d2h_for_threads() if for_threads else self.on_d2h(host.nbytes):
            for event in after:
                self.wait(event)
            host.copy_(source, non_blocking=True)
            return self.record(for_threads=for_threads)

    def copy_in(self, target: torch.Tensor, host: torch.Tensor, *, after: Iterable[Event]) -> Event:
        """Start the H2D copy of `host` into `target` (same dtype and numel) once all of `after` are reached.

        Returns the event of its end. The caller keeps both tensors alive until then.
        """
        with self.on_h2d(host.nbytes):
            for event in after:
                self.wait(event)
            target.copy_(host, non_blocking=True)
            return self.record()


class GivingWay:
    """The copies of one direction, in order, on two streams that can take turns.

    A copy engine works on one stream until nothing on it is ready, whatever priorities say: behind 2.5 GiB, a copy of
    8 MiB on another stream waited 42 ms. When a stream waits for another, the engine looks for work elsewhere, so that
    the small copy was through after 1.3 ms. Copies that wait for their turn lose up to 7 %: activations went out at
    51.6 GB/s, and on one stream at 55.3 (measured: one NVIDIA H200, driver 580).
    """

    def __init__(self, torch_device: torch.device) -> None:
        """Make the streams."""
        self.stream, self._other = torch.cuda.Stream(torch_device), torch.cuda.Stream(torch_device)
        self._since_turn_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int, *, in_turns: bool) -> torch.cuda.Stream:
        """Return the stream for the next copy, which has `size_bytes`."""
        with self._lock:
            if in_turns and self._since_turn_bytes >= _TURN_BYTES:
                self.stream, self._other = self._other, self.stream
                self.stream.wait_stream(self._other)
                self._since_turn_bytes = 0
            self._since_turn_bytes += size_bytes
            return self.stream


class OnStream:
    """Makes a stream current for the calling thread.

    `torch.cuda.stream` does too, but asks the environment and the driver first whether there is CUDA, each time.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Change nothing yet."""
        self._stream = stream

    def __enter__(self) -> None:
        """Remember what is current."""
        self._device_index = torch.cuda.current_device()
        self._before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        """Restore it."""
        torch.cuda.set_stream(self._before)
        # A stream of another device has made that one current.
        if self._device_index != self._stream.device_index:
            torch.cuda.set_device(self._device_index)


class CudaDevice(Device):
    """One CUDA device; D2H and H2D run side by side, each stream in order."""

    def __init__(self, torch_device: torch.device) -> None:
        """Make the copy streams, which live as long as the process."""
        super().__init__(torch_device)
        # Given a number, torch looks nothing up.
        self._index: int = torch_device.index
        self._d2h, self._h2d = GivingWay(torch_device), GivingWay(torch_device)
        self.d2h_for_threads = torch.cuda.Stream(torch_device)
        # For the kernels that round masters to weights there; copies know no priority.
        self.h2d_of_weights = torch.cuda.Stream(torch_device, priority=-1)

    @property
    def d2h(self) -> torch.cuda.Stream:
        """The stream whose turn it is to copy out."""
        return self._d2h.stream

    @property
    def h2d(self) -> torch.cuda.Stream:
        """The stream whose turn it is to copy in."""
        return self._h2d.stream

    @property
    def is_cuda(self) -> bool:
        """Return True."""
        return True

    @property
    def name(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self.torch_device)

    def current_stream_id(self) -> int:
        """Return the driver's handle of the stream."""
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def record(self, *, for_threads: bool = False) -> Event:
        """Record on the stream that is current for the calling thread, which in a hook is autograd's."""
        # A stream holds 56 events that a thread may sleep on; the next one makes the host wait until one is reached.
        # Of others it holds 1021 (measured: one NVIDIA H200, driver 580, whatever the size of copies between them).
        event = torch.cuda.Event(blocking=for_threads)
        event.record(torch.cuda.current_stream(self._index))
        return event

    def wait(self, event: Event) -> None:
        """Enqueue the wait; the CPU twin's event needs none."""
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self._index).wait_event(event)

    def on_d2h(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Switch to the D2H stream."""
        return OnStream(self._d2h.take(size_bytes, in_turns=bool(self.hurried)))

    def on_d2h_for_threads(self) -> AbstractContextManager[object]:
        """Switch to the stream of what threads wait for."""
        return OnStream(self.d2h_for_threads)

    def on_h2d(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Switch to the H2D stream."""
        return OnStream(self._h2d.take(size_bytes, in_turns=bool(self.hurried)))

    def on_h2d_of_weights(self) -> AbstractContextManager[object]:
        """Switch to the stream of weights."""
        return OnStream(self.h2d_of_weights)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self.torch_device)

    def refuse_capture(self, what: str) -> None:
        """Raise while the current stream is capturing."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{what} cannot run inside a CUDA graph capture: its copies are driven by the host; "
                "expected eager execution; try capturing the blocks without offload"
            )


class CpuTwin(Device):
    """The same engine without a GPU: copies are real, immediate and counted by the ledger."""

    @property
    def is_cuda(self) -> bool:
        """Return False."""
        return False

    @property
    def name(self) -> str:
        """That this is the twin."""
        return "CPU twin"

    def current_stream_id(self) -> int:
        """Return 0: there is one."""
        return 0

    def record(self, *, for_threads: bool = False) -> Event:
        """Return an event that is reached already."""
        return REACHED

    def wait(self, event: Event) -> None:
        """Return at once."""

    def on_d2h(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_d2h_for_threads(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_h2d(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_h2d_of_weights(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Return at once."""

    def refuse_capture(self, what: str) -> None:
        """Return: there is nothing to capture."""


@cache
def _device(torch_device: torch.device) -> Device:
    if torch_device.type == "cuda":
        return CudaDevice(torch_device)
    if torch_device.type == "cpu":
        return CpuTwin(torch_device)
    raise ValueError(
        f"device {torch_device} is not supported; expected a cuda device, or cpu for the twin; "
        "try moving the model to one of these"
    )
