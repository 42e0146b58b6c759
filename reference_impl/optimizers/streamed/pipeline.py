# SPDX-License-Identifier: Apache-2.0
"""Chunks pass through the GPU: copied in, updated by a kernel, copied out, all three at once.

Copies in run on the H2D stream, updates on a stream of their own, copies out on the D2H stream. The events of a chunk
order its three stages, and the event of a slot orders its next chunk behind its last. As soon as a chunk's copy out is
queued, its slot takes the next waiting chunk, long before its turn: both directions of the link begin at once. The host
waits for nothing, and queues few chunks (`_QUEUED_AHEAD`) beyond the awaited ones. The forward that hides the update is
launched after them: a full launch queue would make the host wait for most of the update. Slots free at the end take the
first chunks of the next step; these arrive behind forward and backward.

Chunks of resident states with gradients from the host have slots of their own, as long as their gradients. Such a
slot is free long before one read by a copy out, and neither kind waits for the other.

The pipeline knows chunks and gradients. `share` decides their part in a step and the waits for weights. A chunk is
loaded while a slot holds it; there is no other account.

A step is planned (`plan`, which allocates and changes nothing) and begun (`begin`). Then `advance`, `queue_for` and
`finish` queue its chunks. The weights of a chunk may have to visit the device first: that may raise, and the chunk is
then queued by a later call. All else is kernels and copies, for which all memory is there (`as_one`).

Explained in docs/optimizer-state-offloading.md, "A step".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from offload_arithmetic.sizes import LEAST_SLOTS
from reference_impl.device import REACHED, Device, Event, EventGroup, together
from reference_impl.memory.slots import Slot, Slots
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.step import as_one, as_steps_run
from reference_impl.optimizers.streamed.chunks import Chunk
from reference_impl.optimizers.streamed.step import StreamedStep
from reference_impl.optimizers.streamed.update import ChunkUpdate, StepNumbers

# Chunks of `launch_cost` 1, which take up to ten launches; a stream holds about a thousand before the host has to wait.
_QUEUED_AHEAD = 64
# Chunks whose updates are collectives, likewise: their number may not depend on a rank's other chunks.
_EXCHANGES_AHEAD = 2


@dataclass(slots=True)
class ChunkQueue:
    """The chunks that one step updates, in order, and its numbers: None once all of them are queued.

    `chunks_until` counts, for each member, how many of them make its weight new. `at_once` are queued at once.
    `numbers` are the kernels' numbers. Chunks whose updates are collectives have these `exchanges` places, counted from
    1; `due` counts, for each member, how many of them are to be queued with it, by the order of the forward alone.
    """

    chunks: list[Chunk]
    chunks_until: Mapping[Member, int]
    step: StreamedStep | None
    at_once: int
    numbers: StepNumbers = field(default_factory=dict)
    exchanges: Sequence[int] = ()
    due: Mapping[Member, int] = field(default_factory=dict)

    def with_exchanges(self, count: int, exchanges: int) -> int:
        """Return how many chunks are to be queued, about `count`, so that so many `exchanges` are among them.

        All ranks queue as many at the same place of the program, whatever chunks they have beside these: otherwise one
        would wait in an exchange, and another in a gather, for each other.
        """
        least = self.exchanges[min(exchanges, len(self.exchanges)) - 1] if self.exchanges and exchanges else 0
        most = self.exchanges[exchanges] - 1 if exchanges < len(self.exchanges) else len(self.chunks)
        return min(max(count, least), most)


class StreamedPipeline:
    """Updates chunks through slots, one step at a time.

    `updated` holds, for each member, the event after which its weight is new, unless all has been waited for. It is
    valid once the member's last chunk has been queued.
    """

    def __init__(
        self, device: Device, algorithm: Algorithm, *, ahead: int | None = None, follows_writes: bool = True
    ) -> None:
        """Queue chunks of at most `ahead` launches beyond the awaited ones, by default `_QUEUED_AHEAD`."""
        self._device = device
        self._launches_ahead = _QUEUED_AHEAD if ahead is None else ahead
        self._exchanges_ahead = _EXCHANGES_AHEAD if self._launches_ahead else 0
        # The chunks that so many launches are.
        self._ahead = 0
        self._update = ChunkUpdate(device, algorithm, follows_writes=follows_writes)
        # For chunks with incoming states, and for chunks with gradients alone.
        self._slots, self._gradient_slots = Slots(device), Slots(device)
        # The last step; its unqueued chunks, and of these the unloaded ones, by their slots.
        self._queue = ChunkQueue([], {}, None, 0)
        self._unqueued: deque[Chunk] = deque()
        self._unloaded: dict[Slots, deque[Chunk]] = {}
        # The event behind which the step's updates run.
        self._step_start: Event = REACHED
        # By the first chunk of a step, the chunks of the step that came after it.
        self._following: dict[Chunk, list[Chunk]] = {}
        self.updated: dict[Member, Event] = {}

    @property
    def loaded(self) -> tuple[Chunk, ...]:
        """Chunks on the device or on their way in, not updated yet, of each kind in the order of their copies."""
        return tuple(slot.holder for slots in (self._gradient_slots, self._slots) for slot in slots.held)

    @property
    def unqueued(self) -> int:
        """How many chunks of the step have not been queued yet."""
        return len(self._unqueued)

    def is_unqueued(self, member: Member) -> bool:
        """Whether a chunk of `member` has not been queued yet."""
        queued = len(self._queue.chunks) - len(self._unqueued)
        return self._queue.chunks_until.get(member, 0) > queued

    @property
    def extra_bytes(self) -> int:
        """Device bytes of all extra slots."""
        return self._slots.extra_bytes

    @property
    def at_slot_limit(self) -> bool:
        """Whether no extra slot may be added, however much memory is free."""
        return self._slots.at_limit

    def synchronize(self) -> None:
        """Block until all queued work of the step has happened."""
        for event in (self._step_start, *self.updated.values()):
            event.synchronize()
        # A reader of many states, one parameter at a time, would wait for all of them each time.
        self.updated.clear()

    def allocate(self, chunks: Sequence[Chunk], *, slots: int) -> None:
        """Allocate the buffers of `chunks`, all there are, on the live current stream.

        A step that has begun is finished first. At most `slots` slots for states will exist, three of them permanent.
        When it raises, all buffers are as they were or larger.
        """
        self.finish()
        self.drop_prefetched()
        self._update.allocate(chunks)
        cost = sum(chunk.launch_cost for chunk in chunks)
        self._ahead = -(-self._launches_ahead * len(chunks) // max(cost, 1))
        for kind, most in ((self._slots, slots), (self._gradient_slots, LEAST_SLOTS)):
            sizes = [
                chunk.slot_bytes for chunk in chunks if chunk.comes_in and self._slots_for(chunk) is kind
            ]
            kind.allocate(
                max(sizes, default=0), permanent=min(LEAST_SLOTS, len(sizes)), most=min(most, len(sizes))
            )

    def plan(self, chunks: Sequence[Chunk], step: StreamedStep, *, at_once: int) -> ChunkQueue:
        """Plan to update `chunks` in this order, and to queue `at_once` or more of them at once.

        Slots that were freed are allocated again on the live current stream, and so is the scratch of the kernels;
        nothing else changes.
        """
        self._slots.restore()
        self._gradient_slots.restore()
        until = {piece.member: count for count, chunk in enumerate(chunks, start=1) for piece in chunk.pieces}
        numbers = self._update.numbers(step, chunks)
        queue = ChunkQueue(list(chunks), until, step, max(at_once, self._ahead), numbers)
        queue.exchanges = [place for place, chunk in enumerate(chunks, start=1) if chunk.exchanges]
        if queue.exchanges:
            deadlines = [chunks[place - 1].deadline for place in queue.exchanges]
            # As they are now: a forward that waits for members learns when it uses them.
            queue.due = {member: bisect_right(deadlines, member.order) for member in until}
        return queue

    def begin(self, queue: ChunkQueue) -> None:
        """Begin a step that was planned, behind the live current stream, once the last one is finished.

        It is counted, and as many chunks come in as there are idle slots. Pieces of members without a gradient stay as
        they are. The caller keeps the tensors of the step alive until the events in `updated`.
        """
        assert queue.step is not None
        with as_one():
            for first in self._queue.chunks[:1]:
                self._following[first] = queue.chunks
            self._queue, self._unqueued = queue, deque(queue.chunks)
            queue.step.count(self._device)
            self._step_start = self._device.record()
            self._note_unloaded()
            self._load_idle()
            if not queue.chunks:
                self._end_step()

    def start(self) -> None:
        """Queue arrived chunks behind the live current stream: the link is busy from here on."""
        self._queue_until(self._queue.with_exchanges(min(LEAST_SLOTS, self._queue.at_once), 0))

    def advance(self) -> None:
        """Queue the chunks of `ChunkQueue.at_once`, behind the live current stream."""
        self._queue_until(self._queue.with_exchanges(self._queue.at_once, self._exchanges_ahead))

    def queue_for(self, members: Iterable[Member], *, ahead: bool = True) -> None:
        """Queue the update of `members`, and unless told not to, of as many chunks that follow as are queued ahead."""
        listed, until = list(members), self._queue.chunks_until
        wanted = max((until.get(member, 0) for member in listed), default=0)
        exchanges = max((self._queue.due.get(member, 0) for member in listed), default=0)
        # Without a chunk, as an empty shard is, they wait for the step's beginning alone.
        count = wanted + self._ahead if ahead and wanted else wanted
        if exchanges and ahead:
            exchanges += self._exchanges_ahead
        self._queue_until(max(wanted, self._queue.with_exchanges(count, exchanges)))
        self._slots.free_retired()

    def queue_what_stays(self) -> None:
        """Queue the chunks at the head whose weights are on the device for good: nothing has to be brought for them."""
        count = sum(
            1 for _ in takewhile(lambda chunk: chunk.home is None and not chunk.exchanges, self._unqueued)
        )
        self._queue_until(len(self._queue.chunks) - len(self._unqueued) + count)

    def finish(self) -> None:
        """Queue the rest of the step, and the copies of the next step's first chunks."""
        self._queue_until(len(self._queue.chunks))

    def prefetch(self, chunks: deque[Chunk], *, limit_bytes: int | None) -> None:
        """Copy `chunks`, the next step's first, in, taking them from the left, as far as there are slots for them.

        Extra slots are allocated on the live current stream, of at most `limit_bytes` in all if given; they retire
        once their chunks have been copied out. Where memory is short fewer chunks come in, and nothing is raised.
        """
        try:
            self.finish()
            while chunks and (self._slots.first_idle or self._slots.add_extra(limit_bytes)):
                chunk = chunks[0]
                if not chunk.resident and self._slots.held_by(chunk) is None:
                    self._load(chunk, chunks)
                chunks.popleft()
        except (torch.OutOfMemoryError, MemoryError):
            # The chunks come in with the step instead.
            return

    def free_slots(self) -> None:
        """Free the slots until `plan`, unless a step has begun or chunks have come in: to the live current stream."""
        if not self._unqueued and not self.loaded:
            self._slots.free()
            self._gradient_slots.free()

    def drop_prefetched(self) -> None:
        """Block until the chunks that were prefetched have come in, and drop them: their storage may be written."""
        held = [(slots, slot) for slots in (self._gradient_slots, self._slots) for slot in slots.held]
        for _, slot in held:
            slot.arrived.synchronize()
        for slots, slot in held:
            slots.give_back(slot, after=slot.arrived, needed=0)
        self._device.forget_expected()
        self._slots.retire_extra()

    def close(self) -> None:
        """Drop the buffers, once all copies are done."""
        self._update.close()
        self._queue = ChunkQueue([], {}, None, 0)
        self._following.clear()
        self._unqueued.clear()
        self._unloaded.clear()
        self._slots, self._gradient_slots = Slots(self._device), Slots(self._device)

    def _slots_for(self, chunk: Chunk) -> Slots:
        """Return the slots that `chunk` comes in through."""
        return self._gradient_slots if chunk.resident else self._slots

    def _queue_until(self, count: int) -> None:
        """Queue the step's chunks until `count` of them are."""
        step, chunks = self._queue.step, self._queue.chunks
        if step is None:
            return
        missing = min(count, len(chunks)) - (len(chunks) - len(self._unqueued))
        if missing > 0:
            self._queue_next(step, missing)

    @as_steps_run
    def _queue_next(self, step: StreamedStep, count: int) -> None:
        left = len(self._unqueued) - count
        while len(self._unqueued) > left:
            home = self._unqueued[0].home
            # Before anything else, and on the live current stream, whose memory the weights take.
            visits = () if home is None else (home.visit(),)
            with as_one():
                self._update_next(step, visits)
                # As many as need no visit, as one: a region takes 5 us.
                while len(self._unqueued) > left and self._unqueued[0].home is None:
                    self._update_next(step, ())
                if not self._unqueued:
                    self._end_step()

    def _end_step(self) -> None:
        """Copy the next step's first chunks in, each once one of the permanent slots becomes free."""
        self._queue.step = None
        self._slots.retire_extra()
        chunks, loaded = self._queue.chunks, self.loaded
        # Chunks that came last time, or the same again.
        for chunk in self._following.get(chunks[0], chunks) if chunks else ():
            if self._slots.first_idle is None:
                return
            # Gradients on the host still are the last step's.
            if not chunk.resident and chunk not in loaded and chunk.gradients is None:
                self._load(chunk, ())

    def _update_next(self, step: StreamedStep, visits: Iterable[Event]) -> None:
        """Queue the update of the chunk at the head, behind its weights' `visits`, and the next copy into its slot."""
        chunk = self._unqueued[0]
        slot = self._slot_of(chunk) if chunk.comes_in else None
        arrived = REACHED if slot is None else slot.arrived
        buffer = chunk.storage if slot is None else chunk.states_in(slot.bytes)
        came_in = None if slot is None else chunk.gradients_in(slot.bytes)
        with self._device.on_update_stream():
            for event in (self._step_start, arrived, *visits):
                self._device.wait(event)
            self._update.run(chunk, buffer, step, self._queue.numbers, came_in)
            updated = self._device.record()
        free = updated
        if not chunk.resident:
            free = chunk.stored = self._device.copy_out(chunk.storage, buffer, after=(updated,))
        if chunk.home is not None:
            chunk.at_home = self._send_home(chunk, step, updated)
            chunk.home.leave(chunk.at_home)
        for piece in chunk.pieces:
            self.updated[piece.member] = updated
        self._unqueued.popleft()
        if slot is not None:
            slots = self._slots_for(chunk)
            slots.give_back(slot, after=free, needed=len(self._unloaded[slots]))
            self._load_idle()

    def _send_home(self, chunk: Chunk, step: StreamedStep, updated: Event) -> Event:
        """Copy the new weights of `chunk` to their places, and return the event of their arrival."""
        stored = [updated]
        for span, pieces in chunk.runs:
            home = span.member.home
            # A weight without a gradient goes home as it came.
            if home is not None and any(piece.member in step.gradients for piece in pieces):
                part = span.start, span.stop
                copied = self._device.copy_out(
                    home.host_part(*part), home.device_part(*part), after=(updated,)
                )
                # A stream's copies come one after the other.
                stored = [each for each in stored if isinstance(each, EventGroup)] + [copied]
        return together(*stored)

    def _slot_of(self, chunk: Chunk) -> Slot:
        """Return the slot of `chunk`; load it if it is not loaded."""
        slots = self._slots_for(chunk)
        slot = slots.held_by(chunk)
        if slot is None:
            # There was no slot, because the order has changed since the prefetch. The last one loaded is needed last.
            if slots.first_idle is None:
                last = slots.held[-1]
                slots.give_back(last, after=last.arrived, needed=1)
            self._note_unloaded()
            self._load_idle()
            slot = slots.held_by(chunk)
        assert slot is not None
        return slot

    def _note_unloaded(self) -> None:
        """Note the chunks to load; gradients alone are short and come before states."""
        self._unloaded = {self._gradient_slots: deque(), self._slots: deque()}
        loaded = set(self.loaded)
        for chunk in self._unqueued:
            if chunk.comes_in and chunk not in loaded:
                self._unloaded[self._slots_for(chunk)].append(chunk)

    def _load_idle(self) -> None:
        """Load as many chunks as there are idle slots."""
        for slots, unloaded in self._unloaded.items():
            while unloaded and slots.first_idle:
                self._load(unloaded[0], unloaded)
                unloaded.popleft()

    def _load(self, chunk: Chunk, order: Sequence[Chunk]) -> None:
        """Copy `chunk` into an idle slot, behind the slot's last use and the chunk's last copy out.

        `order`: the chunks that are copied in from this one on, as far as they are known.
        """
        if len(order) > 1 and not (chunk.resident or order[1].resident):
            self._device.expect_copy_in(order[1].storage)

        def copy(slot: Slot) -> Event:
            arrived: Event = REACHED
            if not chunk.resident:
                arrived = self._device.copy_in(
                    chunk.states_in(slot.bytes), chunk.storage, after=(slot.free, chunk.stored)
                )
            gradients, step = chunk.gradients_in(slot.bytes), self._queue.step
            if chunk.gradients is not None and gradients is not None and step is not None:
                arrivals = (step.arrived[p.member] for p in chunk.pieces if p.member in step.arrived)
                arrived = self._device.copy_in(gradients, chunk.gradients, after=(slot.free, *arrivals))
            return arrived

        self._slots_for(chunk).fill(chunk, copy)
