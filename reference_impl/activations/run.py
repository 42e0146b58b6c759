"""One forward pass and the backward that answers it: which storage is needed next, and what may come early.

Storages are numbered as they are saved. The order in which backward needs them is learnt from the last run of
the same length; until then it is the reverse. Each storage that backward asks for starts the copies of the
next ones, as many as the room allows. A wrong guess costs a copy on demand, never a wrong value. Runs know
nothing of each other, so several may be in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from reference_impl.activations.saved import SavedStorage
from reference_impl.device import Device, Event
from reference_impl.memory.in_flight import InFlight

if TYPE_CHECKING:
    from reference_impl.activations.geometry import Extent
    from reference_impl.activations.tape import Node

_REMEMBERED_ORDERS = 64
# How many storages beyond the prefetched ones a slow tier may start to read.
_PREPARED_AHEAD = 4


class BackwardOrders:
    """The order of the last run of each length."""

    def __init__(self) -> None:
        """Know nothing."""
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


class PrefetchRoom(Protocol):
    """How much may come early; `room` knows."""

    def asked(self, run: Run) -> None:
        """Note that backward of `run` asks for one more storage."""

    def settled(self, run: Run) -> None:
        """Note that what comes early is on its way."""

    def free_bytes(self, first: int, last: int) -> int | None:
        """Return how many bytes may be early while `first` to `last` storages were asked for, or None: unknown."""


class Observer(Protocol):
    """Somebody who profiles a run."""

    def saving(self) -> AbstractContextManager[None]:
        """Return a context around what the engine does with a storage in forward."""

    def saved(self, index: int, extent: Extent, node: Node) -> None:
        """Note that storage `index` stands for `extent`, which the tape knows as `node`."""

    def start_loss(self) -> None:
        """Note that the last block has run."""

    def start_backward(self) -> None:
        """Note that backward begins."""

    def fetching(self) -> None:
        """Note that a storage is asked for."""

    def fetched(self, index: int, flat: torch.Tensor) -> None:
        """Note that storage `index` is on the device."""


class Run:
    """The storages of one forward, in the order in which they were saved."""

    def __init__(
        self,
        device: Device,
        orders: BackwardOrders,
        in_flight: InFlight,
        room: PrefetchRoom,
    ) -> None:
        """Start empty; `room` says how much may come early."""
        self.device = device
        self._orders = orders
        self._in_flight = in_flight
        self._room = room
        self._storages: list[weakref.ref[SavedStorage] | None] = []
        self._order: Sequence[int] = ()
        self._rank: dict[int, int] = {}
        self._trace: dict[int, None] = {}
        self._ordered_length = -1
        self._next = 0
        self._reached = 0
        self._round = 0
        # On the device before anybody asked for it.
        self.ahead_bytes = 0
        # Whether somebody brings storages back for a proof, which is no part of the step.
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
            self._trace[index] = None
            self._room.asked(self)
        self._recall_order()
        if round_ > self._round:
            self._round, self._next, self._reached = round_, 0, 0
        # What several operations have saved is asked for again later, which is no step back.
        self._reached = max(self._reached, self._rank.get(index, -1) + 1)
        self._next = max(self._next, self._reached)

    def prefetch(self, *, after_copy: bool) -> None:
        """Start the copies of what follows the storage that was asked for, which came by a copy or was computed."""
        self._prefetch()
        # A computation has needed its memory before these copies were there.
        if after_copy:
            self._room.settled(self)

    def take_over(self, original: torch.Tensor) -> None:
        """Note that `original`, whose copy out is in flight, is held for backward: from now on it came early."""
        self._in_flight.hand_over(original)

    def abandon(self, loaded: Event, buffer: torch.Tensor) -> None:
        """Keep `buffer`, which nobody needs any more, until its copy is over. Safe in a finalizer."""
        self._in_flight.leave(loaded, buffer)

    def copy_for_this_stream(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a copy that belongs to the live current stream; the stream that owns `flat` may reuse it early."""
        copy = flat.clone()
        self._in_flight.leave(self.device.record(), flat)
        return copy

    def _recall_order(self) -> None:
        if self._ordered_length != len(self._storages):
            self._ordered_length = len(self._storages)
            self._order = self._orders.of(self._ordered_length)
            self._rank = {index: rank for rank, index in enumerate(self._order)}

    def _prefetch(self) -> None:
        while self._next < len(self._order):
            saved = self._pending(self._next)
            if saved is not None and not saved.is_held:
                # What comes early lies there through all segments up to its use.
                free_bytes = self._room.free_bytes(self._reached, self._next)
                # What waits for its copy out takes no more room by being held.
                if not self._fits(0 if saved.is_on_device else saved.size_bytes, free_bytes):
                    break
                saved.hold()
            self._next += 1
        for rank in range(self._next, min(self._next + _PREPARED_AHEAD, len(self._order))):
            saved = self._pending(rank)
            if saved is not None:
                saved.source.prepare()

    def _fits(self, size_bytes: int, free_bytes: int | None) -> bool:
        """Whether so much more may come early; one storage may where nobody knows how much is free."""
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
        if self._trace:
            self._orders.learn(len(self._storages), list(self._trace))
