# SPDX-License-Identifier: Apache-2.0
"""CUDA: asynchronous copies on streams of their own, ordered by events.

Explained in docs/design.md (decisions 5 and 10 to 12).
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial

import torch

from reference_impl.device.base import REACHED, Device, Event, EventGroup, Mark, PinningError, together

# The user's settings of torch's allocator.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GROWING = "expandable_segments"
# With these, long blocks are not cut to the requested sizes, or blocks are longer than requested.
_CUTTING = ("max_split_size_mb", "roundup_power2_divisions")
# The allocator compares the requested bytes with its limit, and then lets a segment grow by whole pages.
_PAGE_BYTES = 20 * 2**20
# Sizes of allocations are multiples of it.
_BLOCK_BYTES = 512
# A latency-sensitive copy out waits 1.2 ms at most.
_TURN_OUT_BYTES = 64 * 2**20
# Another copy in waits 1.2 ms at most if that happens once a step, and 0.3 ms if it happens all the time; longer if
# several GPUs share the link.
_PART_IN_BYTES, _SMALL_PART_IN_BYTES = 32 * 2**20, 8 * 2**20


class AlternatingStreams:
    """The copies of one direction, in order, on two streams that can take turns of `turn_bytes`.

    A copy engine works on one stream until nothing on it is ready, whatever priorities say: behind 2.5 GiB, a copy of
    8 MiB on another stream waited 42 ms. When a stream waits for another, the engine looks for work elsewhere, so that
    the small copy was through after 1.3 ms (measured: one NVIDIA H200, driver 580).

    Copies out that wait for their turn lose up to 7 %: activations went out at 51.6 GB/s, and on one stream at 55.3.
    Copies in lose nothing in turns of 8 MiB, 51.9 GB/s for 49.7; with copies out beside them they go at 43.9 GB/s, in
    turns of 16 MiB at 40.8 and of 4 MiB at 36.2. 32 kB on another stream are through after 0.03 ms, beside copies out
    after 0.09, and without turns behind all that is queued. A part takes the calling thread 0.03 to 0.04 ms, which is
    0.3 s for 64 GB in parts of 8 MiB (one NVIDIA H100, driver 580). Copies of up to about 24 kB do not use the engine.
    """

    def __init__(self, torch_device: torch.device, turn_bytes: int) -> None:
        self.stream, self._other = torch.cuda.Stream(torch_device), torch.cuda.Stream(torch_device)
        # The end of the other's turn. A wait keeps the mark that it was given for, so one event serves all turns.
        self._turn = torch.cuda.Event()
        # Held by a thread whose copy has several parts.
        self.lock = threading.RLock()
        self._turn_bytes = turn_bytes
        self._since_turn_bytes = 0

    def take(self, size_bytes: int, *, in_turns: bool) -> torch.cuda.Stream:
        """Return the stream for the next copy, which has `size_bytes`."""
        with self.lock:
            if in_turns and self._since_turn_bytes >= self._turn_bytes:
                self.stream, self._other = self._other, self.stream
                self._turn.record(self._other)
                self._turn.wait(self.stream)
                self._since_turn_bytes = 0
            self._since_turn_bytes += size_bytes
            return self.stream


def parts_of(tensor: torch.Tensor, part_bytes: int) -> Sequence[torch.Tensor]:
    """Return views of a flat tensor, of at most `part_bytes` each; a tensor of other dims is one part."""
    if tensor.ndim != 1 or tensor.nbytes <= part_bytes:
        return (tensor,)
    parts: Sequence[torch.Tensor] = tensor.split(part_bytes // tensor.itemsize)
    return parts


class OnStream:
    """Makes a stream current for the calling thread.

    `torch.cuda.stream` does too, but asks the environment and the driver first whether there is CUDA, each time, and
    makes an object of Python for the stream that was current: 10 us in place of 3 (one H100's host).
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        """Remember the current device and streams."""
        self._device_index = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device_index)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        """Restore it."""
        torch.accelerator.set_stream(self._before)
        # A stream of another device has made that one current.
        if self._device_index != self._stream.device_index:
            torch.cuda.set_device(self._device_index)


def compiled_code_is_replayed() -> bool:
    """Whether compiled code may run as a CUDA graph, which calls no operation."""
    # In torch/_inductor/cudagraph_trees.py, which `torch._dynamo.reset` loads too (2.11): then it has no graphs.
    graphs = "tree_manager_containers"
    return torch._C._is_key_in_tls(graphs) and bool(torch._C._get_obj_in_tls(graphs))


def _recorded(stream: torch.cuda.Stream, *, for_threads: bool = False) -> Event:
    """Return the event of the end of `stream`'s work so far."""
    # 1.4 us; `torch.cuda.Event`, which alone can let a thread sleep, takes 2.4 (one H100's host).
    event = torch.cuda.Event(blocking=True) if for_threads else torch.Event("cuda")
    event.record(stream)
    return event


def _await(stream: torch.cuda.Stream, event: Event) -> None:
    """Let `stream` wait for `event`, as far as it is one of the device's."""
    if isinstance(event, torch.Event | torch.cuda.Event):
        event.wait(stream)
    elif isinstance(event, EventGroup):
        for each in event.events:
            _await(stream, each)


class CudaMark(torch.cuda.Event):
    """An event with its time."""

    def seconds_until(self, later: torch.cuda.Event) -> float:
        """Wait for `later` and read both."""
        later.synchronize()
        return float(self.elapsed_time(later)) / 1e3


class CachingAllocator:
    """The statistics of torch's caching allocator."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self.segments_grow = f"{_GROWING}:True" in _allocator_settings()

    @property
    def live_bytes(self) -> int:
        """Read one number of the statistics."""
        return self._allocated_bytes("current")

    @property
    def peak_bytes(self) -> int:
        """Read one number of the statistics, as a first step with an activation offloader does hundreds of times."""
        return self._allocated_bytes("peak")

    def _allocated_bytes(self, which: str) -> int:
        # The flat form, which `torch.cuda.max_memory_allocated` reads too, would sort all numbers first.
        stats = torch.cuda.memory_stats_as_nested_dict(self._torch_device)
        return int(stats["allocated_bytes"]["all"][which])

    def reset_peak(self) -> None:
        """Reset all peaks of the allocator."""
        torch.cuda.reset_peak_memory_stats(self._torch_device)

    @property
    def retries(self) -> int:
        """Read one number of the statistics."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._torch_device)["num_alloc_retries"])

    def let_segments_grow(self) -> Callable[[], None]:
        """Add the setting to the environment variable's."""
        settings = _allocator_settings()
        if self.segments_grow or _GROWING in settings or torch.cuda.get_allocator_backend() != "native":
            return lambda: None

        def choose(grow: bool) -> None:
            # Settings that are not named here go back to their defaults.
            torch._C._accelerator_setAllocatorSettings(f"{settings},{_GROWING}:{grow}".lstrip(","))
            self.segments_grow = grow

        choose(True)
        return partial(choose, False)

    def limit(self, limit_bytes: int | None) -> None:
        """Set the share of the device that the allocator may reserve, a page less than the limit."""
        share = 1.0 if limit_bytes is None else (limit_bytes - _PAGE_BYTES) / self.total_bytes
        torch.cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0), self._torch_device)

    def private_segments(self) -> list[tuple[int, int]]:
        """Look through all segments."""
        return [
            (each["address"], each["address"] + each["total_size"])
            for each in torch.cuda.memory_snapshot()
            if tuple(each["segment_pool_id"]) != (0, 0) and each["device"] == self._torch_device.index
        ]

    def make_room(self, sizes: Iterable[int]) -> None:
        """Allocate and free it; the allocator takes less than a mebibyte from elsewhere."""
        if any(each in _allocator_settings() for each in _CUTTING):
            return
        rounded = (
            -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES for size_bytes in sizes if size_bytes > 2**20
        )
        if (size_bytes := sum(rounded)) > 0:
            with suppress(torch.OutOfMemoryError):
                torch.empty(size_bytes, dtype=torch.uint8, device=self._torch_device)

    def give_back(self) -> None:
        """Empty the cache."""
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Collect garbage, empty the cache and ask the driver."""
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._torch_device)[0])

    @property
    def total_bytes(self) -> int:
        """Ask the driver."""
        return int(torch.cuda.mem_get_info(self._torch_device)[1])


def _allocator_settings() -> str:
    return next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")


class CudaDevice(Device, torch_type="cuda"):
    """One CUDA device; D2H and H2D run side by side, each direction in order."""

    is_accelerator = True
    compiles = True
    pins_host_memory = True

    def __init__(self, torch_device: torch.device) -> None:
        """Make the copy streams, which live as long as the process."""
        super().__init__(torch_device)
        # Given a number, torch looks nothing up.
        self._index: int = torch_device.index
        self._d2h = AlternatingStreams(torch_device, _TURN_OUT_BYTES)
        self._h2d = AlternatingStreams(torch_device, _SMALL_PART_IN_BYTES)
        self._d2h_for_threads = torch.cuda.Stream(torch_device)
        # For the kernels that round masters to weights there; copies know no priority.
        self._h2d_of_weights = torch.cuda.Stream(torch_device, priority=-1)
        self._allocator = CachingAllocator(torch_device)
        # Streams that have been current, by torch's number: making a Python object takes longer than finding one.
        self._known_streams: dict[int, torch.cuda.Stream] = {}

    @classmethod
    def count(cls) -> int:
        """Ask torch, which answers 0 without a driver."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @classmethod
    def with_index(cls, torch_device: torch.device) -> torch.device:
        """Give `cuda` the current device's index."""
        if torch_device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return torch_device

    @property
    def d2h(self) -> torch.cuda.Stream:
        """The stream whose turn it is to copy out."""
        return self._d2h.stream

    @property
    def h2d(self) -> torch.cuda.Stream:
        """The stream whose turn it is to copy in."""
        return self._h2d.stream

    @property
    def name(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self.torch_device)

    @property
    def allocator(self) -> CachingAllocator:
        """Torch's caching allocator."""
        return self._allocator

    def use_in_thread(self) -> None:
        """Set the current device, which torch keeps a thread."""
        torch.cuda.set_device(self.torch_device)

    def current_stream_id(self) -> int:
        """Return the driver's handle of the stream."""
        return int(self.current_stream().cuda_stream)

    def current_stream(self) -> torch.cuda.Stream:
        """Ask torch for its number."""
        number = torch.accelerator.current_stream(self._index).stream_id
        stream = self._known_streams.get(number)
        if stream is None:
            stream = self._known_streams[number] = torch.cuda.current_stream(self._index)
        return stream

    def record(self, *, for_threads: bool = False) -> Event:
        """Record on the calling thread's current stream: in a hook, autograd's."""
        # A stream holds 56 events that a thread may sleep on; the next one makes the host wait until one is reached.
        # Of others it holds 1021 (measured: one NVIDIA H200, driver 580, whatever the size of copies between them).
        return _recorded(self.current_stream(), for_threads=for_threads)

    def mark(self) -> Mark:
        """Record an event that is timed."""
        event = CudaMark(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.current_stream())
        return event

    def wait(self, event: Event) -> None:
        """Enqueue the wait; the CPU twin's event needs none."""
        if event is not REACHED:
            _await(self.current_stream(), event)

    def on_d2h(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Switch to the D2H stream."""
        return OnStream(self._d2h.take(size_bytes, in_turns=bool(self.latency_sensitive)))

    def on_d2h_for_threads(self) -> AbstractContextManager[object]:
        """Switch to the stream of copies that threads wait for."""
        return OnStream(self._d2h_for_threads)

    def on_h2d(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Switch to the H2D stream."""
        return OnStream(self._h2d.take(size_bytes, in_turns=True))

    def copy_out(
        self, host: torch.Tensor, source: torch.Tensor, *, after: Iterable[Event], for_threads: bool = False
    ) -> Event:
        """Copy a tensor, and ask torch for the current stream once."""
        turns = bool(self.latency_sensitive)
        stream = self._d2h_for_threads if for_threads else self._d2h.take(host.nbytes, in_turns=turns)
        for event in after:
            _await(stream, event)
        with OnStream(stream):
            landed = self.copy(host, source)
        return together(_recorded(stream, for_threads=for_threads), landed)

    def copy_in(self, target: torch.Tensor, host: torch.Tensor, *, after: Iterable[Event]) -> Event:
        """Copy a flat tensor in parts: copies of other streams get through between them.

        These are a batch of tokens for the forward and, while an optimizer is `gathering`, FSDP2's tables of sizes for
        every gathered module.
        """
        if self.is_pageable(host):
            return self._copy_in_staged(target, host, after)
        part_bytes = _SMALL_PART_IN_BYTES if self.gathering else _PART_IN_BYTES
        targets, sources = parts_of(target, part_bytes), parts_of(host, part_bytes)
        with self._h2d.lock:
            stream = self._h2d.take(sources[0].nbytes, in_turns=True)
            for event in after:
                _await(stream, event)
            with OnStream(stream):
                self.copy(targets[0], sources[0])
                for to, part in zip(targets[1:], sources[1:], strict=True):
                    stream = self._h2d.take(part.nbytes, in_turns=True)
                    torch.accelerator.set_stream(stream)
                    self.copy(to, part)
            return _recorded(stream)

    def _copy_in_staged(self, target: torch.Tensor, host: torch.Tensor, after: Iterable[Event]) -> Event:
        """Copy all on one stream: its parts are as small, and others need not wait until threads have filled them."""
        with self._h2d.lock:
            stream = self._h2d.take(host.nbytes, in_turns=True)
            for event in after:
                _await(stream, event)
        with OnStream(stream):
            self.copy(target, host)
        return _recorded(stream)

    def on_h2d_of_weights(self) -> AbstractContextManager[object]:
        """Switch to the stream of weights."""
        return OnStream(self._h2d_of_weights)

    def on_update_stream(self) -> AbstractContextManager[object]:
        """Switch to the stream of updates."""
        return OnStream(self._updates)

    def on_decompression_stream(self) -> AbstractContextManager[object]:
        """Switch to the stream of arriving weights."""
        return OnStream(self._decompressions)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Switch to it."""
        return OnStream(stream)

    def finish_work(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self.torch_device)

    @property
    def is_capturing(self) -> bool:
        """Ask the runtime."""
        return torch.cuda.is_current_stream_capturing()

    def refuse_capture(self, caller: str) -> None:
        """Raise while the current stream is capturing."""
        if self.is_capturing:
            raise RuntimeError(
                f"{caller} cannot run inside a CUDA graph capture: its copies are driven by the host; "
                "expected eager execution; try capturing the blocks without offload"
            )

    def pin(self, memory: torch.Tensor) -> None:
        """Register existing pages with the runtime: the driver makes them DMA-able, and torch treats them as pinned."""
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(code) != 0:
            raise PinningError(
                f"cudaHostRegister of {memory.numel() / 2**30:.2f} GiB failed with code {int(code)}; expected 0; "
                "try raising the memlock limit (ulimit -l unlimited), or limit_pinned_memory(), behind which the rest "
                "is pageable"
            )

    def unpin(self, address: int) -> None:
        """Take the registration back."""
        torch.cuda.cudart().cudaHostUnregister(address)

    @cached_property
    def _updates(self) -> torch.cuda.Stream:
        # Updates are short and a forward may wait for them, so they go before its other kernels.
        return torch.cuda.Stream(self.torch_device, priority=-1)

    @cached_property
    def _decompressions(self) -> torch.cuda.Stream:
        # While one waits for a place among longer kernels, the link stands still.
        return torch.cuda.Stream(self.torch_device, priority=-1)
