# SPDX-License-Identifier: Apache-2.0
"""One block's bytes on the host, and the copies of blocks to the device in the order of their need.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from reference_impl.device import Device, Event, together
from reference_impl.memory.arena import HostArena
from reference_impl.memory.worker import Worker
from reference_impl.weights.storages import placed

_DEADLINE_S = 600.0

# Asks for the event of a copy's end, and waits on the host until the copy has been started.
Started = Callable[[], Event]


class HostCopy(Protocol):
    """The bytes of one block's storages, in the order in which they were given."""

    @property
    def copied_bytes(self) -> int:
        """Bytes that one load copies to the device."""

    def load(self, target: torch.Tensor, *, after: Event) -> Started:
        """Start filling `target` behind the live current stream, once `after` is reached."""

    def part(self, index: int) -> torch.Tensor:
        """Return the bytes of storage `index`, not to be written."""

    def lend(self, index: int, tensor: torch.Tensor, shift_bytes: int) -> torch.Tensor:
        """Return `tensor`'s geometry over the bytes of storage `index`, `shift_bytes` further on.

        It has a storage of its own, so that saving it saves no more.
        """

    def own(self, index: int) -> torch.Tensor:
        """Return the bytes of storage `index` in memory that stays after `release`."""

    def release(self, *, after: Event) -> None:
        """Give the memory back once `after` is reached."""


class PlainParts:
    """Storages that lie on the host as they do on the device."""

    parts: list[torch.Tensor]

    @property
    def copied_bytes(self) -> int:
        """See `HostCopy`."""
        return sum(part.numel() for part in self.parts)

    def part(self, index: int) -> torch.Tensor:
        """See `HostCopy`."""
        return self.parts[index]

    def lend(self, index: int, tensor: torch.Tensor, shift_bytes: int) -> torch.Tensor:
        """See `HostCopy`; the memory is shared."""
        return placed(torch.from_numpy(self.parts[index].numpy()), tensor, shift_bytes)

    def own(self, index: int) -> torch.Tensor:
        """Return a copy in ordinary memory."""
        return self.parts[index].clone()


class Loader:
    """Starts H2D copies of blocks in the order of their need; a thread fills pinned buffers, if there are to be any."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._thread = Worker("frozen-weights", prepare=device.use_in_thread)
        # The thread's copies, in turn, each with the pageable memory that it reads; the caller adds and takes away.
        self._given: deque[tuple[Future[Event], torch.Tensor | None]] = deque()

    def load(self, target: torch.Tensor, host: torch.Tensor, *, after: Event) -> Started:
        """Start filling `target` from `host` behind the live current stream, once `after` is reached.

        A copy of pinned memory needs no thread. It is given to the thread behind copies that do: on the link beside
        them it would take half of the rate from blocks that are needed before it.
        """
        events = self.device.record(), after
        if self.device.is_pageable(host):
            return self.in_turn(functools.partial(self._copy_in, target, host, after=events), reads=host)
        return self.at_once(functools.partial(self.device.copy_in, target, host, after=events))

    def at_once(self, start: Callable[[], Event]) -> Started:
        """Have the caller `start` a copy of pinned memory; the thread, while it has earlier ones to start."""
        if self._is_busy:
            return self.in_turn(start)
        event = start()
        return lambda: event

    def in_turn(self, start: Callable[[], Event], *, reads: torch.Tensor | None = None) -> Started:
        """Have the thread `start` a copy behind its earlier copies, of pageable memory if it `reads` any."""
        started = self._thread.submit(start)
        self._given.append((started, reads))
        return functools.partial(self._thread.wait, started, deadline_s=_DEADLINE_S)

    def close(self) -> None:
        """End the thread. Calling it again does nothing."""
        self._thread.close()
        if self._given:
            self._given.clear()
            self.device.forget_expected()

    @property
    def _is_busy(self) -> bool:
        while self._given and self._given[0][0].done():
            self._given.popleft()
        return bool(self._given)

    def expect_next(self) -> None:
        """Have the first bytes of the next copy of pageable memory read ahead during the one that follows."""
        waiting = (
            reads
            for started, reads in tuple(self._given)
            if reads is not None and not (started.running() or started.done())
        )
        if (following := next(waiting, None)) is not None:
            self.device.expect_copy_in(following)

    def _copy_in(self, target: torch.Tensor, host: torch.Tensor, *, after: Iterable[Event]) -> Event:
        """Copy pageable memory in."""
        self.expect_next()
        try:
            return self.device.copy_in(target, host, after=after)
        except BaseException:
            self.device.forget_expected()
            raise


class PinnedCopy(PlainParts):
    """One block of an arena, pinned as far as that is allowed."""

    def __init__(
        self,
        loader: Loader,
        arena: HostArena,
        sources: Sequence[torch.Tensor],
        offsets: Sequence[int],
        size_bytes: int,
    ) -> None:
        """Copy `sources` in. Raises HostMemoryError."""
        self._loader = loader
        self._arena = arena
        self._block = arena.allocate(size_bytes)
        self._block.ready.synchronize()
        self.whole = self._block.view(torch.uint8, (size_bytes,))
        self.parts = [
            self.whole[offset : offset + source.numel()].copy_(source)
            for source, offset in zip(sources, offsets, strict=True)
        ]

    @property
    def copied_bytes(self) -> int:
        """Those of the block, gaps included."""
        return self.whole.numel()

    def load(self, target: torch.Tensor, *, after: Event) -> Started:
        """Start one H2D copy."""
        return self._loader.load(target, self.whole, after=after)

    def release(self, *, after: Event) -> None:
        """Hand the block back to the arena."""
        self._arena.free(self._block, after=after)


class PartlyPinnedCopy(PlainParts):
    """One block with its first parts pinned, and the others beyond the limit."""

    def __init__(self, pinned: PinnedCopy, beyond: PinnedCopy) -> None:
        self._copies = (pinned, beyond)
        self.parts = [*pinned.parts, *beyond.parts]

    def load(self, target: torch.Tensor, *, after: Event) -> Started:
        """Start the copy of the pinned part, and queue that of the rest."""
        first, second = self._copies
        size_bytes = first.whole.numel()
        started = first.load(target[:size_bytes], after=after), second.load(target[size_bytes:], after=after)
        return lambda: together(*(each() for each in started))

    def release(self, *, after: Event) -> None:
        """Hand both blocks back to their arenas."""
        for each in self._copies:
            each.release(after=after)
