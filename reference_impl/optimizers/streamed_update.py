"""Chunks pass through the GPU: in, updated by the fused kernel, and out again, all three at once.

Copies in run on the H2D stream, updates on a stream of their own, copies out on the D2H stream; a chunk's events
order the three, and a slot's event orders its next chunk behind its last. The whole step is queued at once and the
host waits for nothing, so the link never idles. Slots that fall free at the end take the first chunks of the next
step, which therefore arrive behind forward and backward. Nothing is allocated on the way.

It knows chunks and gradients; which of them take part, and who waits for the weights, is `streamed_share`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.ring import DeviceRing, Slot
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.chunks import MASTER, Chunk, Weights
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.packing import LOW
from reference_impl.optimizers.streamed_scratch import Scratch
from reference_impl.optimizers.verdict import Verdict


@dataclass(frozen=True, slots=True)
class StreamedRound:
    """One step: `gradients` shaped like parameters, `steps` that count it already, hyper-parameters by group."""

    gradients: Mapping[Member, torch.Tensor]
    steps: Mapping[Member, torch.Tensor]
    verdict: Verdict | None
    groups: Sequence[Mapping[str, Any]]
    weights: Weights

    def gradient(self, piece: Piece) -> torch.Tensor:
        """Return the gradient of `piece`."""
        return piece.member.flat(self.gradients[piece.member])[piece.start : piece.stop]


class StreamedUpdate:
    """Updates chunks through a ring of device buffers."""

    def __init__(self, device: Device, algorithm: Algorithm) -> None:
        """Take nothing yet."""
        self._device = device
        self._algorithm = algorithm
        self._scratch = Scratch(device)
        self._idle: deque[Slot] = deque()
        self._loaded: dict[Chunk, tuple[Slot, Event]] = {}

    def make_room(self, chunks: Sequence[Chunk], *, slots: int) -> None:
        """Allocate what `chunks`, all there are, need of `slots` buffers on the live current stream; no update runs."""
        self._scratch.make_room(chunks)
        sizes = [chunk.home.nbytes for chunk in chunks if not chunk.resident]
        slot_bytes, slots = max(sizes, default=0), min(slots, len(sizes))
        self.forget()
        if self._idle and slot_bytes <= self._idle[0].bytes.numel() and slots <= len(self._idle):
            return
        for slot in self._idle:
            self._device.wait(slot.free)
        self._idle = deque(DeviceRing(self._device, slot_bytes=slot_bytes, slots=slots).slots)

    def run(
        self,
        chunks: Sequence[Chunk],
        round_: StreamedRound,
    ) -> dict[Member, Event]:
        """Queue the update of `chunks` in this order, behind the live current stream.

        Pieces of members without a gradient are left as they are. Returns the event after which each of the others
        has its new weight; the caller keeps what is in `round_` alive until then.
        """
        ready = self._device.record()
        published = {}
        for chunk in chunks:
            if chunk.resident:
                updated = self._update(chunk, chunk.home, round_, after=(ready,))
            else:
                slot, arrived = self._take(chunk)
                buffer = _buffer(chunk, slot)
                updated = self._update(chunk, buffer, round_, after=(ready, arrived))
                slot.free = chunk.stored = self._device.copy_out(chunk.home, buffer, after=(updated,))
                self._idle.append(slot)
            published.update({piece.member: updated for piece in chunk.pieces})
        return {member: published[member] for member in round_.gradients if member in published}

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        """Start bringing in as many of `chunks` as there are slots, each once its slot falls free."""
        for chunk in chunks:
            if not self._idle:
                return
            if not chunk.resident and chunk not in self._loaded:
                self._loaded[chunk] = self._load(chunk)

    def forget(self) -> None:
        """Let go of chunks that have come in for the next step, and wait until their homes may be written."""
        for slot, arrived in self._loaded.values():
            arrived.synchronize()
            self._idle.append(slot)
        self._loaded.clear()

    def close(self) -> None:
        """Let the buffers go, once all copies are done."""
        self._scratch.close()
        self._loaded.clear()
        self._idle.clear()

    def _take(self, chunk: Chunk) -> tuple[Slot, Event]:
        if chunk in self._loaded:
            return self._loaded.pop(chunk)
        if not self._idle:
            # The order has changed since the prefetch: what came in last is needed last.
            _, (slot, arrived) = self._loaded.popitem()
            slot.free = arrived
            self._idle.append(slot)
        return self._load(chunk)

    def _load(self, chunk: Chunk) -> tuple[Slot, Event]:
        slot = self._idle.popleft()
        return slot, self._device.copy_in(_buffer(chunk, slot), chunk.home, after=(slot.free, chunk.stored))

    def _update(
        self,
        chunk: Chunk,
        buffer: torch.Tensor,
        round_: StreamedRound,
        *,
        after: tuple[Event, ...],
    ) -> Event:
        """Unpack, run the fused kernel on the pieces that have a gradient, round masters to weights, pack."""
        pieces = [piece for piece in chunk.pieces if piece.member in round_.gradients]
        weights = [round_.weights.of(piece) for piece in pieces]
        arrived = [round_.gradient(piece) for piece in pieces]
        widened = [self._scratch.gradient(piece) for piece in pieces]
        steps = [round_.steps[piece.member] for piece in pieces]
        with _on_update(self._device):
            for event in after:
                self._device.wait(event)
            # The kernel writes the scaled gradient back, so it gets a copy also where none is needed to widen.
            torch._foreach_copy_(widened, arrived)
            states = self._scratch.unpack(chunk, buffer, round_.weights)
            masters = states.get(MASTER, chunk.masters)
            moments = [states[name] for name in self._algorithm.moments]
            self._algorithm.update(
                weights if masters is None else _cut(masters, pieces),
                widened,
                [_cut(moment, pieces) for moment in moments],
                steps,
                round_.groups[chunk.group],
                grad_scale=None if round_.verdict is None else round_.verdict.grad_scale,
                found_inf=None if round_.verdict is None else round_.verdict.found_inf,
            )
            self._scratch.pack(chunk, buffer, steps[0])
            if chunk.has(LOW):
                torch._foreach_copy_(weights, [self._scratch.new_weight(piece) for piece in pieces])
            elif masters is not None:
                torch._foreach_copy_(weights, _cut(masters, pieces))
            return self._device.record()


def _cut(state: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    return [state[piece.offset : piece.offset + piece.numel] for piece in pieces]


def _buffer(chunk: Chunk, slot: Slot) -> torch.Tensor:
    return slot.bytes[: chunk.home.nbytes]


def _on_update(device: Device) -> AbstractContextManager[object]:
    return torch.cuda.stream(_update_stream(device.torch_device)) if device.is_cuda else nullcontext()


@cache
def _update_stream(torch_device: torch.device) -> torch.cuda.Stream:
    # Updates are short and a forward may wait for them, so they go before its other kernels.
    return torch.cuda.Stream(torch_device, priority=-1)
