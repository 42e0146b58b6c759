# SPDX-License-Identifier: Apache-2.0
"""One forward pass and its backward: the saved storages, their way back, and their prefetch.

A storage is offloaded once, however many tensors view it. Its memory belongs to autograd's tokens. When the last token
of a storage is freed, with or without a backward, its host block and its device buffer are returned.

Storages are numbered as they are saved. The order in which backward needs them is learnt from the last run of the
same length; until then the reverse order is assumed. When backward asks for a storage, the next ones are prefetched,
as many as the headroom allows. A wrong guess costs a copy on demand, never a wrong value. Runs are independent of
each other, so several may be in flight. `engine` decides which storages move, not this module.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from reference_impl.activations.geometry import Extent, Geometry, VersionProbe
from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.in_flight import InFlight
from reference_impl.memory.tiers import StoredBytes

_REMEMBERED_ORDERS = 64
# The storages beyond the prefetched ones that a slow tier may start to read.
_PREPARED_AHEAD = 4


class Source(Protocol):
    """The source of a storage's bytes in backward."""

    @property
    def may_come_early(self) -> bool:
        """Whether prefetching them saves time."""

    def bring(self) -> tuple[torch.Tensor, Event]:
        """Return flat uint8 memory of the live current stream, and the event after which it holds the bytes."""

    def prepare(self) -> None:
        """Start the work that makes `bring` quick."""

    def release(self) -> None:
        """Give up the bytes. Safe in a finalizer."""


class Replay(Source, Protocol):
    """A source that computes the bytes again; `tape` makes them."""

    def compute(self) -> torch.Tensor:
        """Return the result in new memory of the live current stream."""

    def sources(self) -> set[int]:
        """Return the numbers of the saved storages read by it."""

    def seconds(self) -> float:
        """Return how long its operations took when they were timed; waits for their end."""


class Copied:
    """A source that copies `size_bytes` from a tier."""

    may_come_early = True

    __slots__ = ("_device", "_size_bytes", "_stored")

    def __init__(self, device: Device, stored: StoredBytes, size_bytes: int) -> None:
        self._device = device
        self._stored = stored
        self._size_bytes = size_bytes

    def bring(self) -> tuple[torch.Tensor, Event]:
        """Start the copy into new memory of the live current stream."""
        buffer = torch.empty(self._size_bytes, dtype=torch.uint8, device=self._device.torch_device)
        return buffer, self._stored.load(buffer)

    def prepare(self) -> None:
        """Let the tier start reading."""
        self._stored.prepare()

    def release(self) -> None:
        """Give the tier its memory back."""
        self._stored.release()


class BackwardOrders:
    """The order of the last run of each length."""

    def __init__(self) -> None:
        self._by_length: dict[int, list[int]] = {}

    def learn(self, length: int, trace: Sequence[int]) -> None:
        """Remember `trace`, the indices in the order in which backward first asked for them."""
        self._by_length.pop(length, None)
        self._by_length[length] = list(trace)
        if len(self._by_length) > _REMEMBERED_ORDERS:
            del self._by_length[next(iter(self._by_length))]

    def of(self, length: int) -> Sequence[int]:
        """Return the learnt order for a run of `length` storages, or the reverse order of saving."""
        return self._by_length.get(length, range(length - 1, -1, -1))


class PrefetchHeadroom(Protocol):
    """Says how many bytes may be prefetched; `headroom` has the implementation."""

    def on_request(self, run: ForwardPass, asked: int, passed: int) -> None:
        """Note that backward of `run` asks for one more storage, having gone on `passed` times since number `asked`."""

    def prefetched(self, run: ForwardPass) -> None:
        """Note that all prefetches after a request have been started."""

    def goes_on(self, run: ForwardPass, asked: int, passed: int) -> bool:
        """Note that backward of `run` has gone on `passed` times since request `asked`; return if memory fell."""

    def free_bytes(self, asked: int, passed: int, last: int) -> int | None:
        """Return the bytes that may be prefetched from there until request number `last`; None if unknown."""


class Observer(Protocol):
    """Profiles a run; `profile` has the implementation."""

    def saving(self) -> AbstractContextManager[None]:
        """Return a context around the engine's work on a storage in forward."""

    def saved(self, index: int, size_bytes: int, name: str, recipe: Replay | None) -> None:
        """Note the bytes of storage `index`, the operator `name` that made it, and its recipe, if it has one."""

    def start_loss(self) -> None:
        """Note that the last block has run."""

    def start_backward(self) -> None:
        """Note that backward begins."""

    def fetching(self) -> None:
        """Note that a storage is asked for."""

    def fetched(self, index: int, flat: torch.Tensor) -> None:
        """Note that storage `index` is on the device."""


class MovedTensor:
    """A saved tensor as a geometry over a `SavedStorage`."""

    __slots__ = ("_geometry", "_probe", "_saved", "round")

    def __init__(self, saved: SavedStorage, geometry: Geometry, probe: VersionProbe) -> None:
        self._geometry = geometry
        self._probe = probe
        self.round = saved.join()
        self._saved = saved

    @property
    def storage_index(self) -> int:
        """The number of its storage in the run."""
        return self._saved.index

    def restore(self) -> torch.Tensor:
        """Return a tensor with the saved values and strides on the device; the live current stream may use it.

        Raises RuntimeError when the original was written after it was saved.
        """
        self._probe.check()
        flat = self._saved.fetch(self)
        if self._saved.is_compact:
            return self._geometry.spread(flat)
        shift = int(flat.storage_offset()) - self._saved.start
        return self._geometry.over(flat.untyped_storage(), shifted_bytes=shift)

    def __del__(self) -> None:
        # A token whose construction was interrupted has not been counted.
        if hasattr(self, "_saved"):
            self._saved.forget(self)


class SavedStorage:
    """The bytes of one extent, gone from the device and brought back from `source` on demand.

    The device buffer is held until every token has been restored from it once, so that q, k and v of one
    projection, or one norm output under two linears, come back once. A backward over a retained graph is a new round,
    and brings them again.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_device",
        "_is_ahead",
        "_is_awaited",
        "_live_tokens",
        "_loaded",
        "_on_device",
        "_stream",
        "_unserved_tokens",
        "index",
        "is_compact",
        "is_whole",
        "origin",
        "round",
        "run",
        "size_bytes",
        "source",
        "start",
        "version",
    )

    def __init__(
        self,
        run: ForwardPass,
        extent: Extent,
        source: Source,
        *,
        version: int,
        in_flight: torch.Tensor | None,
    ) -> None:
        """Stand for `extent` at in-place `version`; `in_flight` is the tensor that a copy out may be reading."""
        self._device = run.device
        self.run = run
        self.start = extent.start
        self.size_bytes = extent.size_bytes
        self.is_compact = extent.is_compact
        self.is_whole = extent.is_whole
        self.origin = weakref.ref(extent.storage)
        self.version = version
        # While the copy is in flight the original is alive, and a backward that comes so soon uses it again.
        self._on_device = None if in_flight is None else weakref.ref(in_flight)
        self._buffer: torch.Tensor | None = None
        self._loaded: Event = REACHED
        # On the device before it was asked for.
        self._is_ahead = False
        self._is_awaited = True
        self._stream = self._device.current_stream_id()
        self._live_tokens = 0
        self._unserved_tokens = 0
        self.round = 0
        self.index = run.add(self)
        # Last: if an earlier line raises, the caller releases the source.
        self.source = source

    def join(self) -> int:
        """Count a new token; return the round in which it is to be served."""
        self._live_tokens += 1
        self._unserved_tokens += 1
        return self.round

    def forget(self, token: MovedTensor) -> None:
        """Forget a token that died."""
        self._live_tokens -= 1
        if token.round == self.round:
            self._served_one()

    @property
    def is_held(self) -> bool:
        """Whether the bytes are on the device for backward."""
        return self._buffer is not None

    @property
    def is_on_device(self) -> bool:
        """Whether the bytes are on the device, perhaps only until their copy out is over."""
        return self.is_held or (self._on_device is not None and self._on_device() is not None)

    def hold(self) -> None:
        """Hold the bytes for backward: the original if it still is on the device, else a copy that begins now."""
        if self._buffer is not None:
            return
        original = None if self._on_device is None else self._on_device()
        if original is None:
            self.load()
        else:
            self.run.take_over(original)
            self._buffer = original
            self._count_ahead(True)

    def load(self) -> None:
        """Start bringing the bytes to the device, into memory of the live current stream."""
        self._stream = self._device.current_stream_id()
        buffer, self._loaded = self.source.bring()
        self._on_device = weakref.ref(buffer)
        self._is_awaited = False
        self._buffer = buffer
        self._count_ahead(True)

    def fetch(self, token: MovedTensor) -> torch.Tensor:
        """Return the bytes on the device for `token`, ready on the live current stream."""
        run = self.run
        if run.is_proving:
            return self._bring(token)
        if run.observer is not None:
            run.observer.fetching()
        run.ask(self.index, self.round)
        flat = self._bring(token)
        run.prefetch(after_copy=self.source.may_come_early)
        if run.observer is not None:
            run.observer.fetched(self.index, flat)
        return flat

    def _bring(self, token: MovedTensor) -> torch.Tensor:
        self.hold()
        if not self.run.is_proving:
            self._count_ahead(False)
        flat = self._buffer
        assert flat is not None
        self._device.wait(self._loaded)
        self._is_awaited = True
        if self._stream != self._device.current_stream_id():
            flat = self.run.copy_for_this_stream(flat)
        if token.round == self.round:
            token.round += 1
            self._served_one()
        return flat

    def _count_ahead(self, is_ahead: bool) -> None:
        if is_ahead != self._is_ahead:
            self._is_ahead = is_ahead
            self.run.ahead_bytes += self.size_bytes if is_ahead else -self.size_bytes

    def _served_one(self) -> None:
        self._unserved_tokens -= 1
        if self._unserved_tokens == 0:
            self.round += 1
            self._unserved_tokens = self._live_tokens
            self._drop_buffer()

    def _drop_buffer(self) -> None:
        if self._buffer is None:
            return
        self._count_ahead(False)
        if not self._is_awaited:
            # No stream that may reuse this memory waits yet for the copy into it.
            self.run.abandon(self._loaded, self._buffer)
        self._buffer = None

    def __del__(self) -> None:
        if hasattr(self, "source"):
            self._drop_buffer()
            self.source.release()


class ForwardPass:
    """The storages of one forward, in the order in which they were saved."""

    def __init__(
        self,
        device: Device,
        orders: BackwardOrders,
        in_flight: InFlight,
        headroom: PrefetchHeadroom,
    ) -> None:
        """`headroom` says how much may come in early."""
        self.device = device
        self._orders = orders
        self._in_flight = in_flight
        self._headroom = headroom
        self._storages: list[weakref.ref[SavedStorage] | None] = []
        self._order: Sequence[int] = ()
        self._rank: dict[int, int] = {}
        self._trace: dict[int, None] = {}
        self._ordered_length = -1
        self._next = 0
        self._reached = 0
        # How often backward has gone on in a layer since the last request.
        self._passed = 0
        self._round = 0
        # Bytes on the device that backward has not asked for yet.
        self.ahead_bytes = 0
        # Whether storages are brought back for a proof, outside of the step.
        self.is_proving = False
        self.observer: Observer | None = None

    @property
    def is_over(self) -> bool:
        """Whether backward has begun, or the graph has died without one."""
        return bool(self._trace) or (self.has_saved and not self.is_pending)

    @property
    def is_pending(self) -> bool:
        """Whether backward may still ask for something."""
        return any(saved and saved() for saved in self._storages)

    @property
    def has_saved(self) -> bool:
        """Whether anything was saved."""
        return bool(self._storages)

    @property
    def length(self) -> int:
        """How many storages were saved so far."""
        return len(self._storages)

    def moved_sizes(self, since: int) -> list[int]:
        """Return the bytes of each storage that went to the tier, in the order of saving, from number `since` on."""
        saved = [reference() for reference in self._storages[since:] if reference is not None]
        return [each.size_bytes for each in saved if each is not None and each.source.may_come_early]

    def add(self, saved: SavedStorage) -> int:
        """Give `saved` its number."""
        self._storages.append(weakref.ref(saved))
        return len(self._storages) - 1

    def skip(self) -> None:
        """Give a number to a storage that stays on the device."""
        self._storages.append(None)

    def start_backward(self) -> None:
        """Start the copies that backward needs first."""
        if self.observer is not None:
            self.observer.start_backward()
        self._recall_order()
        self.prefetch(after_copy=True)

    def ask(self, index: int, round_: int) -> None:
        """Note that backward asks for storage `index` in its `round_`."""
        if round_ == 0 and index not in self._trace:
            self._headroom.on_request(self, len(self._trace), self._passed)
            self._trace[index] = None
        self._recall_order()
        if round_ > self._round:
            self._round, self._next, self._reached = round_, 0, 0
        self._passed = 0
        # A storage saved by several operations is asked for again later; this is no step back.
        self._reached = max(self._reached, self._rank.get(index, -1) + 1)
        self._next = max(self._next, self._reached)

    def go_on(self) -> None:
        """Note that backward takes a tensor of a layer that was computed again, and has freed others before."""
        self._passed += 1
        if self._headroom.goes_on(self, self._asked, self._passed):
            self._prefetch()

    def prefetch(self, *, after_copy: bool) -> None:
        """Start the copies of the next storages; `after_copy`: the last one came by a copy, not by computation."""
        self._prefetch()
        # A computation has needed its memory before these copies were there.
        if after_copy:
            self._headroom.prefetched(self)

    def take_over(self, original: torch.Tensor) -> None:
        """Note that `original`, with its copy out in flight, is held for backward: from now on it counts as early."""
        self._in_flight.hand_over(original)

    def abandon(self, loaded: Event, buffer: torch.Tensor) -> None:
        """Keep the unneeded `buffer` until its copy is over. Safe in a finalizer."""
        self._in_flight.keep_until(loaded, buffer)

    def copy_for_this_stream(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a copy that belongs to the live current stream; the stream that owns `flat` may reuse it early."""
        copy = flat.clone()
        self._in_flight.keep_until(self.device.record(), flat)
        return copy

    @property
    def _asked(self) -> int:
        """How many storages this backward has asked for."""
        return self._reached if self._round else len(self._trace)

    def _recall_order(self) -> None:
        if self._ordered_length != len(self._storages):
            self._ordered_length = len(self._storages)
            self._order = self._orders.of(self._ordered_length)
            self._rank = {index: rank for rank, index in enumerate(self._order)}

    def _prefetch(self) -> None:
        while self._next < len(self._order):
            saved = self._pending(self._next)
            if saved is not None and not saved.is_held:
                # A prefetched storage lies there through all segments up to its use.
                free_bytes = self._headroom.free_bytes(self._asked, self._passed, self._next)
                # Holding an original that waits for its copy out takes no further memory.
                if not self._fits(0 if saved.is_on_device else saved.size_bytes, free_bytes):
                    break
                saved.hold()
            self._next += 1
        for rank in range(self._next, min(self._next + _PREPARED_AHEAD, len(self._order))):
            saved = self._pending(rank)
            if saved is not None:
                saved.source.prepare()

    def _fits(self, size_bytes: int, free_bytes: int | None) -> bool:
        """Whether `size_bytes` more may be prefetched; while the headroom is unknown, one storage at a time may."""
        if free_bytes is None:
            return self.ahead_bytes == 0
        return self.ahead_bytes + size_bytes <= free_bytes

    def _pending(self, rank: int) -> SavedStorage | None:
        """Return the storage at `rank` of the order if backward still needs it and it may come early."""
        reference = self._storages[self._order[rank]]
        saved = reference() if reference is not None else None
        if saved is None or saved.round > self._round or not saved.source.may_come_early:
            return None
        return saved

    def __del__(self) -> None:
        # Its construction may have been interrupted.
        if getattr(self, "_trace", None):
            self._orders.learn(len(self._storages), list(self._trace))
