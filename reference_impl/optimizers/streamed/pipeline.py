"""Chunks pass through the GPU: copied in, updated by a kernel, copied out, all three at once.

Copies in run on the H2D stream, updates on a stream of their own, copies out on the D2H stream. The events of a chunk
order its three stages, and the event of a slot orders its next chunk behind its last. As soon as the copy out of a
chunk is queued, its slot takes the next chunk that is still to be copied in, long before that one's turn, so that both
directions of the link begin at once. The host waits for nothing, and queues at most `_QUEUED_AHEAD` chunks beyond what
somebody waits for: a full launch queue would make it wait until most of the update is done, before the forward that
should hide the update has been launched. Slots that become free at the end take the first chunks of the next step,
which therefore arrive behind forward and backward.

The pipeline knows chunks and gradients. Which of them take part, and who waits for the weights, is up to `share`.
Slots are taken in `_load` alone. One is given back after its copy out (`_queue`), or when its chunk is dropped before
its update (`_pop_loaded`, `drop_prefetched`). A step begins in `begin`; `_end_step` runs once all of it is queued.

Explained in docs/optimizer-state-offloading.md, "What happens in a step".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.ring import Slot
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.chunks import Chunk
from reference_impl.optimizers.streamed.slots import LEAST_SLOTS, Slots
from reference_impl.optimizers.streamed.update import ChunkUpdate, StreamedStep

# A chunk takes up to ten launches, and a stream holds about a thousand before the host has to wait.
_QUEUED_AHEAD = 64


class StreamedPipeline:
    """Updates chunks through slots, one step at a time.

    `updated` holds, for each member, the event after which its weight is new. It is valid once the member's last chunk
    has been queued.
    """

    def __init__(self, device: Device, algorithm: Algorithm) -> None:
        self._device = device
        self._update = ChunkUpdate(device, algorithm)
        self._slots = Slots(device)
        # Chunks on the device or on their way in, not updated yet, in the order of their copies.
        self._loaded: dict[Chunk, tuple[Slot, Event]] = {}
        # The step that is being queued, None between steps; all its chunks, those that are not queued yet, and of
        # these the ones that are not loaded.
        self._step: StreamedStep | None = None
        self._begun: Event = REACHED
        self._order: list[Chunk] = []
        self._unqueued: deque[Chunk] = deque()
        self._unloaded: deque[Chunk] = deque()
        # How many chunks have to be queued until a member's weight is new.
        self._chunks_until: dict[Member, int] = {}
        self.updated: dict[Member, Event] = {}

    @property
    def loaded(self) -> tuple[Chunk, ...]:
        """Chunks on the device or on their way in, not updated yet, in the order of their copies."""
        return tuple(self._loaded)

    @property
    def unqueued(self) -> int:
        """How many chunks of the step have not been queued yet."""
        return len(self._unqueued)

    @property
    def extra_bytes(self) -> int:
        """Device bytes of all extra slots."""
        return self._slots.extra_bytes

    @property
    def at_slot_limit(self) -> bool:
        """Whether no extra slot may be added, however much memory is free."""
        return self._slots.at_limit

    def allocate(self, chunks: Sequence[Chunk], *, slots: int) -> None:
        """Allocate what `chunks`, all there are, need on the live current stream.

        A step that has begun is finished first. At most `slots` slots will exist, three of them permanent.
        """
        self.finish()
        self.drop_prefetched()
        self._update.allocate(chunks)
        sizes = [chunk.storage.nbytes for chunk in chunks if not chunk.resident]
        self._slots.allocate(
            max(sizes, default=0), permanent=min(LEAST_SLOTS, len(sizes)), most=min(slots, len(sizes))
        )

    def begin(self, chunks: Sequence[Chunk], step: StreamedStep, *, at_once: int) -> None:
        """Begin to update `chunks` in this order, behind the live current stream; queue `at_once` or more of them.

        Pieces of members without a gradient stay as they are. The caller keeps what is in `step` alive until the
        events in `updated`.
        """
        self.finish()
        self._update.begin(step, chunks)
        self._step, self._begun = step, self._device.record()
        self._order, self._unqueued = list(chunks), deque(chunks)
        self._chunks_until = {
            piece.member: count for count, chunk in enumerate(chunks, start=1) for piece in chunk.pieces
        }
        self._load_unloaded()
        self._queue_next(max(at_once, _QUEUED_AHEAD))

    def queue_for(self, members: Iterable[Member]) -> None:
        """Queue the update of `members`, and of `_QUEUED_AHEAD` chunks that follow."""
        wanted = max((self._chunks_until.get(member, 0) for member in members), default=0)
        if wanted:
            self._queue_next(wanted + _QUEUED_AHEAD - (len(self._order) - len(self._unqueued)))
        self._slots.free_retired()

    def finish(self) -> None:
        """Queue all that is left of the step, and the copies of the next step's first chunks."""
        self._queue_next(len(self._unqueued))

    def prefetch(self, chunks: deque[Chunk], *, limit_bytes: int | None) -> None:
        """Copy `chunks`, the next step's first, in, taking them from the left, as far as there are slots for them.

        Extra slots are allocated on the live current stream, of at most `limit_bytes` in all if given; they retire
        once their chunks have been copied out.
        """
        self.finish()
        while chunks and (self._slots.idle or self._slots.add_extra(limit_bytes)):
            chunk = chunks.popleft()
            if not chunk.resident and chunk not in self._loaded:
                self._load(chunk)

    def drop_prefetched(self) -> None:
        """Block until the chunks that were prefetched have come in, and drop them: their storage may be written."""
        for slot, arrived in self._loaded.values():
            arrived.synchronize()
            self._slots.give_back(slot, after=arrived, needed=0)
        self._loaded.clear()
        self._slots.retire_extra()
        self._slots.free_retired()

    def close(self) -> None:
        """Drop the buffers, once all copies are done."""
        self._update.close()
        self._step = None
        self._loaded.clear()
        self._order.clear()
        self._unqueued.clear()
        self._unloaded.clear()
        self._slots = Slots(self._device)

    def _queue_next(self, count: int) -> None:
        if count <= 0 or not self._unqueued:
            return
        with torch.inference_mode(False), torch.no_grad():
            for _ in range(min(count, len(self._unqueued))):
                self._queue(self._unqueued.popleft())
            if not self._unqueued:
                self._end_step()

    def _end_step(self) -> None:
        """Copy the next step's first chunks in, each once one of the permanent slots becomes free."""
        self._step = None
        self._slots.retire_extra()
        for chunk in self._order:
            if not self._slots.idle:
                return
            if not chunk.resident and chunk not in self._loaded:
                self._load(chunk)

    def _queue(self, chunk: Chunk) -> None:
        """Queue the update of one chunk, and what its slot takes next."""
        if chunk.resident:
            updated = self._run_update(chunk, chunk.storage, after=(self._begun,))
        else:
            slot, arrived = self._pop_loaded(chunk)
            buffer = _buffer(chunk, slot)
            updated = self._run_update(chunk, buffer, after=(self._begun, arrived))
            chunk.stored = self._device.copy_out(chunk.storage, buffer, after=(updated,))
            self._slots.give_back(slot, after=chunk.stored, needed=len(self._unloaded))
            self._load_idle()
        for piece in chunk.pieces:
            self.updated[piece.member] = updated

    def _run_update(self, chunk: Chunk, buffer: torch.Tensor, *, after: tuple[Event, ...]) -> Event:
        """Run the kernels of `chunk` on the update stream; return the event of their end."""
        assert self._step is not None
        with self._device.on_update_stream():
            for event in after:
                self._device.wait(event)
            self._update.run(chunk, buffer, self._step)
            return self._device.record()

    def _pop_loaded(self, chunk: Chunk) -> tuple[Slot, Event]:
        """Return the slot of `chunk` and the event after which it has come in; load it if it is not loaded."""
        if chunk not in self._loaded:
            # The order has changed since the prefetch. What was loaded last is needed last.
            _, (slot, arrived) = self._loaded.popitem()
            self._slots.give_back(slot, after=arrived, needed=1)
            self._load(chunk)
            self._load_unloaded()
        return self._loaded.pop(chunk)

    def _load_unloaded(self) -> None:
        """Note which chunks of the step are not loaded, and load as many as there are idle slots."""
        self._unloaded = deque(
            chunk for chunk in self._unqueued if not chunk.resident and chunk not in self._loaded
        )
        self._load_idle()

    def _load_idle(self) -> None:
        while self._unloaded and self._slots.idle:
            self._load(self._unloaded.popleft())

    def _load(self, chunk: Chunk) -> None:
        """Take a slot and copy `chunk` in, behind the slot's last use and the chunk's last copy out."""
        slot = self._slots.take()
        arrived = self._device.copy_in(_buffer(chunk, slot), chunk.storage, after=(slot.free, chunk.stored))
        self._loaded[chunk] = slot, arrived


def _buffer(chunk: Chunk, slot: Slot) -> torch.Tensor:
    return slot.bytes[: chunk.storage.nbytes]
