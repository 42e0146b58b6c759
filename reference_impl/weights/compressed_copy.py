# SPDX-License-Identifier: Apache-2.0
"""One block of the host in compressed spans, which the device decompresses as they arrive.

A span passes through one of two device buffers: while its weights are written in their place, the next one is on the
link. So a block takes no more memory than without compression but these buffers, and its kernels find it as they
would.

Explained in docs/layer-streaming.md, "Twelve bits for sixteen".
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from offload_arithmetic.sizes import DECOMPRESSED_BYTES, DECOMPRESSION_BUFFERS
from reference_impl.device import Device, Event, together
from reference_impl.memory.absent import is_unread, mark_unread, read_now
from reference_impl.memory.arena import HostArena
from reference_impl.memory.ledger import unseen
from reference_impl.memory.pinned import PinnedMemoryError
from reference_impl.weights.compression import (
    Form,
    compress,
    decompress,
    decompress_on_host,
    most_compressed_bytes,
)
from reference_impl.weights.host_copies import Loader, PinnedCopy, Started
from reference_impl.weights.storages import ALIGNMENT_BYTES, placed


def bytes_of_buffers(storage_bytes: int) -> int:
    """Return the device bytes of all buffers, where the longest storage of a block has `storage_bytes`."""
    return DECOMPRESSION_BUFFERS * most_compressed_bytes(min(storage_bytes, DECOMPRESSED_BYTES))


@dataclass(frozen=True)
class Span:
    """Bytes `[start, end)` of a block on the device, and where they begin on the host: of a form, or as they are."""

    start: int
    end: int
    source: int
    source_bytes: int
    form: Form | None

    def on_host(self, whole: torch.Tensor) -> torch.Tensor:
        """Return its bytes of the host's `whole` block."""
        return whole[self.source : self.source + self.source_bytes]


class Decompressor:
    """Brings spans to the device and decompresses them there, one behind the other."""

    def __init__(self, device: Device, storage_bytes: int) -> None:
        """Make buffers on the live current stream; the longest storage of a block has `storage_bytes`."""
        self.span_bytes = min(storage_bytes, DECOMPRESSED_BYTES)
        self._device = device
        memory = torch.empty(bytes_of_buffers(storage_bytes), dtype=torch.uint8, device=device.torch_device)
        self.buffer_bytes = memory.numel()
        self._buffers = memory.chunk(DECOMPRESSION_BUFFERS)
        self._free: list[Event] = [device.record()] * DECOMPRESSION_BUFFERS
        self._next = 0

    def compress(self, piece: torch.Tensor) -> tuple[Form | None, torch.Tensor]:
        """Return the form of a `piece` of a storage (flat uint8), None where it stays as it is, and its bytes."""
        found = None
        if piece.numel() % 2 == 0:
            found = compress(piece.to(self._device.torch_device).view(torch.int16))
        return found or (None, piece)

    def bring(
        self,
        target: torch.Tensor,
        whole: torch.Tensor,
        spans: Sequence[Span],
        *,
        after: Sequence[Event],
        expect_next: Callable[[], None],
    ) -> Event:
        """Start filling `target` with `spans` of the host's `whole` block once all of `after` are reached.

        `expect_next` is called in front of the last one, for the block behind.
        """
        ends: dict[bool, Event] = {}
        try:
            for span, following in itertools.zip_longest(spans, spans[1:]):
                if following is None:
                    expect_next()
                else:
                    self._device.expect_copy_in(following.on_host(whole))
                start = self._copy if span.form is None else self._decompress
                ends[span.form is None] = start(
                    target[span.start : span.end], span.on_host(whole), span, after
                )
        except BaseException:
            self._device.forget_expected()
            # Kernels may be writing memory that goes back now.
            self._device.synchronize()
            raise
        return together(*ends.values())

    def _copy(self, target: torch.Tensor, host: torch.Tensor, span: Span, after: Sequence[Event]) -> Event:
        return self._device.copy_in(target, host, after=after)

    def _decompress(
        self, target: torch.Tensor, host: torch.Tensor, span: Span, after: Sequence[Event]
    ) -> Event:
        assert span.form is not None
        place = self._next
        self._next = (place + 1) % DECOMPRESSION_BUFFERS
        buffer = self._buffers[place][: host.numel()]
        arrived = self._device.copy_in(buffer, host, after=(self._free[place],))
        with self._device.on_decompression_stream():
            for event in (*after, arrived):
                self._device.wait(event)
            decompress(self._device, target.view(torch.int16), span.form, buffer)
            self._free[place] = self._device.record()
        return self._free[place]


class CompressedCopy:
    """One block of an arena, whose bf16 weights have 12 bits each."""

    def __init__(
        self,
        decompressor: Decompressor,
        loader: Loader,
        arenas: Sequence[HostArena],
        sources: Sequence[torch.Tensor],
        offsets: Sequence[int],
    ) -> None:
        """Compress `sources` into the first of `arenas` with room. Raises HostMemoryError."""
        self._decompressor = decompressor
        self._loader = loader
        self._spans: list[list[Span]] = []
        self._lent: list[weakref.ref[torch.Tensor]] = []
        with unseen():
            parts, size_bytes = self._compress(sources, offsets)
            self._in_order = [span for storage in self._spans for span in storage]
            starts = [span.source for span in self._in_order]
            self._copy = _kept(loader, arenas, parts, starts, size_bytes)

    @property
    def copied_bytes(self) -> int:
        """The compressed ones."""
        return self._copy.copied_bytes

    def load(self, target: torch.Tensor, *, after: Event) -> Started:
        """Start copies and kernels in turn; the thread does where copies pass through the ring."""
        loader, whole, spans = self._loader, self._copy.whole, self._in_order
        bring = functools.partial(
            self._decompressor.bring,
            target,
            whole,
            spans,
            after=(loader.device.record(), after),
            expect_next=loader.expect_next,
        )
        if loader.device.is_pageable(whole):
            return loader.in_turn(bring, reads=spans[0].on_host(whole))
        return loader.at_once(bring)

    def part(self, index: int) -> torch.Tensor:
        """Return the bytes in new memory, as `own`."""
        return self.own(index)

    def own(self, index: int) -> torch.Tensor:
        """Return the bytes in new memory."""
        spans = self._spans[index]
        result = torch.empty(spans[-1].end - spans[0].start, dtype=torch.uint8)
        self._read(index, result)
        return result

    def lend(self, index: int, tensor: torch.Tensor, shift_bytes: int) -> torch.Tensor:
        """See `HostCopy`; the bytes are written when somebody asks for them, and until then take no memory."""
        spans = self._spans[index]
        memory = torch.empty(spans[-1].end - spans[0].start, dtype=torch.uint8)
        lent = placed(memory, tensor, shift_bytes)
        mark_unread(lent, functools.partial(self._read, index, memory))
        self._lent = [each for each in self._lent if each() is not None] + [weakref.ref(lent)]
        return lent

    def release(self, *, after: Event) -> None:
        """Write the tensors that are lent still, and give the memory back."""
        for reference in self._lent:
            lent = reference()
            if lent is not None and is_unread(lent):
                read_now(lent)
        self._copy.release(after=after)

    def _compress(
        self, sources: Sequence[torch.Tensor], offsets: Sequence[int]
    ) -> tuple[list[torch.Tensor], int]:
        """Note the spans of `sources`, and return the bytes of each, and of all."""
        parts: list[torch.Tensor] = []
        end = 0
        for source, offset in zip(sources, offsets, strict=True):
            self._spans.append([])
            pieces = source.split(self._decompressor.span_bytes)
            for start, piece in zip(
                itertools.accumulate(map(len, pieces), initial=offset), pieces, strict=False
            ):
                form, part = self._decompressor.compress(piece)
                self._spans[-1].append(Span(start, start + piece.numel(), end, part.numel(), form))
                parts.append(part)
                end += math.ceil(part.numel() / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return parts, end

    def _read(self, index: int, memory: torch.Tensor) -> None:
        """Write the bytes of storage `index` to `memory`."""
        first = self._spans[index][0].start
        for span in self._spans[index]:
            target, host = memory[span.start - first : span.end - first], span.on_host(self._copy.whole)
            if span.form is None:
                target.copy_(host)
            else:
                decompress_on_host(target.view(torch.int16), span.form, host)


def _kept(
    loader: Loader,
    arenas: Sequence[HostArena],
    parts: Sequence[torch.Tensor],
    starts: Sequence[int],
    size_bytes: int,
) -> PinnedCopy:
    """Return `parts` in the first of `arenas` that may take them. Raises HostMemoryError."""
    *others, last = arenas
    for arena in others:
        # They may be longer than was expected.
        with suppress(PinnedMemoryError):
            return PinnedCopy(loader, arena, parts, starts, size_bytes)
    return PinnedCopy(loader, last, parts, starts, size_bytes)
