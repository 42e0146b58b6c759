"""Chunks pass through the GPU: in, updated by the fused kernel, and out again, all three at once.

Copies in run on the H2D stream, updates on a stream of their own, copies out on the D2H stream; a chunk's events
order the three, and a slot's event orders its next chunk behind its last. As soon as a chunk's way out is queued, the
next that is still to come is given its slot, long before its own turn, so that both directions of the link begin at
once. The host waits for nothing, and queues no more than `_AHEAD` chunks beyond what somebody waits for: a full launch
queue would make it wait until most of the update is done, before the forward that should hide it has been launched.
Slots that fall free at the end take the first chunks of the next step, which therefore arrive behind forward and
backward.

It knows chunks and gradients; which of them take part, and who waits for the weights, is `streamed_share`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from reference_impl.device import REACHED, Device, Event, OnStream
from reference_impl.memory.ring import Slot
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.clip_decision import Verdict
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.streamed.chunks import MASTER, Chunk, Weights
from reference_impl.optimizers.streamed.packing import LOW, integers
from reference_impl.optimizers.streamed.rounded_update import Operands, RoundedUpdate
from reference_impl.optimizers.streamed.scratch import Scratch
from reference_impl.optimizers.streamed.slots import LEAST_SLOTS, Slots

# Up to ten launches a chunk, of about a thousand that a stream holds before the host has to wait.
_AHEAD = 64


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

    @property
    def grad_scale(self) -> torch.Tensor | None:
        """What gradients are divided by, if by anything."""
        return None if self.verdict is None else self.verdict.grad_scale

    @property
    def found_inf(self) -> torch.Tensor | None:
        """Whether the step is skipped, where somebody judges it."""
        return None if self.verdict is None else self.verdict.found_inf


class StreamedUpdate:
    """Updates chunks through a ring of device buffers."""

    def __init__(self, device: Device, algorithm: Algorithm) -> None:
        """Take nothing yet."""
        self._device = device
        self._algorithm = algorithm
        self._scratch = Scratch(device)
        self._rounded = RoundedUpdate(device, algorithm)
        self._numbers: Mapping[Member, torch.Tensor] = {}
        self.slots = Slots(device)
        self._loaded: dict[Chunk, tuple[Slot, Event]] = {}
        self._next: list[Chunk] = []
        self._due: deque[Chunk] = deque()
        self._to_come: deque[Chunk] = deque()
        self._chunks_until: dict[Member, int] = {}
        self._round: StreamedRound | None = None
        self._ready: Event = REACHED
        self.updated: dict[Member, Event] = {}

    def make_room(self, chunks: Sequence[Chunk], *, slots: int) -> None:
        """Allocate what `chunks`, all there are, need on the live current stream; no update runs.

        Three of `slots` buffers stay; the others may be borrowed, see `borrow`.
        """
        self.finish()
        self.forget()
        self._scratch.make_room(chunks)
        sizes = [chunk.home.nbytes for chunk in chunks if not chunk.resident]
        self.slots.make(max(sizes, default=0), stay=min(LEAST_SLOTS, len(sizes)), most=min(slots, len(sizes)))

    def begin(self, chunks: Sequence[Chunk], round_: StreamedRound, *, at_once: int) -> None:
        """Start the update of `chunks` in this order, behind the live current stream, `at_once` or more of them now.

        Pieces of members without a gradient are left as they are. Members get the event after which their weight is
        new in `updated` as soon as their last chunk is queued. The caller keeps what is in `round_` alive until then.
        """
        self.finish()
        rounded = (piece.member for chunk in chunks if chunk.rounded for piece in chunk.pieces)
        taking_part = [member for member in dict.fromkeys(rounded) if member in round_.gradients]
        # Kept until the next step, which begins behind all updates of this one.
        self._numbers = self._rounded.numbers(taking_part, round_.steps, round_.groups)
        self._round, self._ready = round_, self._device.record()
        self._next, self._due = list(chunks), deque(chunks)
        self._chunks_until = {
            piece.member: count for count, chunk in enumerate(chunks, start=1) for piece in chunk.pieces
        }
        self._expect()
        self._advance(max(at_once, _AHEAD))

    def queue(self, members: Iterable[Member]) -> None:
        """Queue the update of `members`, and of `_AHEAD` chunks that follow."""
        wanted = max((self._chunks_until.get(member, 0) for member in members), default=0)
        if wanted:
            self._advance(wanted + _AHEAD - (len(self._next) - len(self._due)))
        self.slots.reap()

    def finish(self) -> None:
        """Queue all that is left of the step, and the first chunks of the next."""
        self._advance(len(self._due))

    def _advance(self, count: int) -> None:
        if count <= 0 or not self._due:
            return
        with torch.inference_mode(False), torch.no_grad():
            for _ in range(min(count, len(self._due))):
                self._queue(self._due.popleft())
                if not self._due:
                    self._prefetch()

    def _queue(self, chunk: Chunk) -> None:
        if chunk.resident:
            updated = self._update(chunk, chunk.home, after=(self._ready,))
        else:
            slot, arrived = self._take(chunk)
            buffer = _buffer(chunk, slot)
            updated = self._update(chunk, buffer, after=(self._ready, arrived))
            slot.free = chunk.stored = self._device.copy_out(chunk.home, buffer, after=(updated,))
            self.slots.put(slot, needed=len(self._to_come))
            self._load_ahead()
        for piece in chunk.pieces:
            self.updated[piece.member] = updated

    def _expect(self) -> None:
        """Note which chunks of this step are still to come, and begin with them."""
        self._to_come = deque(
            chunk for chunk in self._due if not chunk.resident and chunk not in self._loaded
        )
        self._load_ahead()

    def _load_ahead(self) -> None:
        while self._to_come and self.slots.idle:
            self._load(self._to_come.popleft())

    def _prefetch(self) -> None:
        """Start bringing in the next step's first chunks, each once one of the slots that stay falls free."""
        self._round = None
        self.slots.put_back_borrowed()
        for chunk in self._next:
            if not self.slots.idle:
                return
            if not chunk.resident and chunk not in self._loaded:
                self._load(chunk)

    def borrow(self, chunks: deque[Chunk], *, room_bytes: int | None) -> None:
        """Bring in `chunks`, the next step's first, taking them from the left, as far as buffers can be borrowed.

        These are allocated on the live current stream, of at most `room_bytes` in all where known, and go back once
        their chunks have left again.
        """
        self.finish()
        while chunks and (self.slots.idle or self.slots.borrow(room_bytes)):
            chunk = chunks.popleft()
            if not chunk.resident and chunk not in self._loaded:
                self._load(chunk)

    def forget(self) -> None:
        """Let go of chunks that have come in for the next step, and wait until their homes may be written."""
        for slot, arrived in self._loaded.values():
            arrived.synchronize()
            slot.free = arrived
            self.slots.put(slot, needed=0)
        self._loaded.clear()
        self.slots.put_back_borrowed()
        self.slots.reap()

    def close(self) -> None:
        """Let the buffers go, once all copies are done."""
        self._scratch.close()
        self._loaded.clear()
        self._due.clear()
        self.slots = Slots(self._device)

    def _take(self, chunk: Chunk) -> tuple[Slot, Event]:
        """Return where `chunk` is or will be, and the event after which it is there."""
        if chunk not in self._loaded:
            # The order has changed since the prefetch: what came in last is needed last.
            _, (slot, arrived) = self._loaded.popitem()
            slot.free = arrived
            self.slots.put(slot, needed=1)
            self._load(chunk)
            self._expect()
        return self._loaded.pop(chunk)

    def _load(self, chunk: Chunk) -> None:
        slot = self.slots.idle.popleft()
        arrived = self._device.copy_in(_buffer(chunk, slot), chunk.home, after=(slot.free, chunk.stored))
        self._loaded[chunk] = slot, arrived

    def _update(self, chunk: Chunk, buffer: torch.Tensor, *, after: tuple[Event, ...]) -> Event:
        """Update the pieces that have a gradient, and their weights."""
        round_ = self._round
        assert round_ is not None
        pieces = [piece for piece in chunk.pieces if piece.member in round_.gradients]
        with _on_update(self._device):
            for event in after:
                self._device.wait(event)
            if chunk.rounded:
                self._update_rounded(chunk, buffer, pieces, round_)
            else:
                self._update_exactly(chunk, buffer, pieces, round_)
            return self._device.record()

    def _update_exactly(
        self, chunk: Chunk, buffer: torch.Tensor, pieces: Sequence[Piece], round_: StreamedRound
    ) -> None:
        """Unpack, run the fused kernel, round masters to weights, pack."""
        weights = [round_.weights.of(piece) for piece in pieces]
        widened = [self._scratch.gradient(piece) for piece in pieces]
        # The kernel writes the scaled gradient back, so it gets a copy also where none is needed to widen.
        torch._foreach_copy_(widened, [round_.gradient(piece) for piece in pieces])
        states = self._scratch.unpack(chunk, buffer, round_.weights)
        masters = states.get(MASTER, chunk.masters)
        self._algorithm.update(
            weights if masters is None else _cut(masters, pieces),
            widened,
            [_cut(states[name], pieces) for name in self._algorithm.moments],
            [round_.steps[piece.member] for piece in pieces],
            round_.groups[chunk.group],
            grad_scale=round_.grad_scale,
            found_inf=round_.found_inf,
        )
        self._scratch.pack(chunk, buffer)
        if chunk.has(LOW):
            torch._foreach_copy_(weights, [self._scratch.new_weight(piece) for piece in pieces])
        elif masters is not None:
            torch._foreach_copy_(weights, _cut(masters, pieces))

    def _update_rounded(
        self, chunk: Chunk, buffer: torch.Tensor, pieces: Sequence[Piece], round_: StreamedRound
    ) -> None:
        """Run the one kernel for all of that, once a piece."""
        whole = {field.name: chunk.field(field.name, buffer) for field in chunk.fields}
        if chunk.masters is not None:
            whole[MASTER] = chunk.masters
        own = MASTER not in whole and LOW not in whole
        for piece in pieces:
            states = {name: _part(state, piece) for name, state in whole.items()}
            weight = round_.weights.of(piece)
            self._rounded.update(
                Operands(
                    weight=None if own else weight.view(torch.int16) if LOW in states else weight,
                    low=states.get(LOW),
                    master=weight if own else states.get(MASTER),
                    gradient=round_.gradient(piece),
                    moments=[integers(states[name]) for name in self._algorithm.moments],
                ),
                first=chunk.firsts[piece],
                step=round_.steps[piece.member],
                numbers=self._numbers[piece.member],
                grad_scale=round_.grad_scale,
                found_inf=round_.found_inf,
            )


def _cut(state: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    return [_part(state, piece) for piece in pieces]


def _part(state: torch.Tensor, piece: Piece) -> torch.Tensor:
    return state[piece.offset : piece.offset + piece.numel]


def _buffer(chunk: Chunk, slot: Slot) -> torch.Tensor:
    return slot.bytes[: chunk.home.nbytes]


def _on_update(device: Device) -> AbstractContextManager[object]:
    return OnStream(_update_stream(device.torch_device)) if device.is_cuda else nullcontext()


@cache
def _update_stream(torch_device: torch.device) -> torch.cuda.Stream:
    # Updates are short and a forward may wait for them, so they go before its other kernels.
    return torch.cuda.Stream(torch_device, priority=-1)
