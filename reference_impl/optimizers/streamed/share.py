# SPDX-License-Identifier: Apache-2.0
"""The streamed share: the elements of an optimizer's members whose states are on the host between steps.

It puts chunks, storage and the pipeline together as one share of an optimizer, beside others that update other
elements of the same members. A step is prepared (`prepare`, which allocates, may raise and changes nothing), begun
(`begin`) and carried out: first by `start` and `advance`, the rest by `wait_for` (for some members) or `finish`. These
raise where a weight cannot visit the device, and a later call goes on with its chunk.

Explained in docs/optimizer-state-offloading.md, "Shares".
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from offload_arithmetic.sizes import LEAST_SLOTS
from reference_impl.device import REACHED, Device, Event
from reference_impl.device.base import device_is_full
from reference_impl.distributed.mesh import any_is_sharded
from reference_impl.memory.closing import undo_all, undo_as_one
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.gradients.clip_decision import ClipDecision
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.step import as_one, snapshot
from reference_impl.optimizers.streamed.chunks import (
    COMPACT_ALIGNMENT,
    Chunk,
    Part,
    StreamedWeights,
    mixed,
    spread,
)
from reference_impl.optimizers.streamed.freed_memory import FreedMemory
from reference_impl.optimizers.streamed.pipeline import ChunkQueue, StreamedPipeline
from reference_impl.optimizers.streamed.states import StreamedStates
from reference_impl.optimizers.streamed.step import StreamedStep
from reference_impl.optimizers.streamed.storage import Kind, StateFormat, StateStorage


@dataclass(frozen=True, slots=True)
class _Held:
    """All chunks of a share, the step counters of its members, its slots and its bytes that stay: changed at once."""

    chunks: tuple[Chunk, ...] = ()
    steps: Mapping[Member, torch.Tensor] = field(default_factory=dict)
    most_slots: int = LEAST_SLOTS
    staying_bytes: float = 0.0


class StreamedShare:
    """Streamed (and resident) parts of members: their states, their copies and their updates.

    Args:
        device: where the parameters are.
        algorithm: the formula of torch's fused kernel on the device; members with a formula of `matrices` use that.
        chunk_bytes: most bytes of a chunk, or of all but a matrix that is longer.
        device_budget_bytes: device memory for slots and for the scratch of one chunk; by default three slots. Memory
            beyond three is for extra slots, see `on_gradient`. Of sharded parameters as many states stay on the
            device instead: backward frees little there, since the gradients of the shards grow meanwhile, and states
            that stay need not be copied.
        prefetch_bytes: without a budget, how much that may take.
        state_format: the states in chunks, with their dtypes; by default masters and moments in fp32.
        remedy: ends the message when the host has too little memory.
        host_gradients: gradients are left on the host, where `gradient_places` says, and come in with the states.
        weights_visit: weights may have homes. Then only `queue` queues chunks that nobody waits for.
        follows_writes: masters take over weights that others write.

    Raises ValueError for a format or `chunk_bytes` that is not possible.
    """

    def __init__(
        self,
        device: Device,
        algorithm: Algorithm,
        *,
        chunk_bytes: int,
        device_budget_bytes: int | None = None,
        prefetch_bytes: int = 0,
        state_format: StateFormat | None = None,
        remedy: str = "try a smaller fraction",
        host_gradients: bool = False,
        weights_visit: bool = False,
        follows_writes: bool = True,
    ) -> None:
        self._device = device
        self._budget_bytes = device_budget_bytes
        self._prefetch_bytes = prefetch_bytes
        state_format = state_format or StateFormat()
        state_format.check(algorithm, chunk_bytes=chunk_bytes)
        self._storage = StateStorage(
            device,
            moments=algorithm.moments,
            chunk_bytes=chunk_bytes,
            state_format=state_format,
            remedy=remedy,
            host_gradients=host_gradients,
        )
        self._weights = StreamedWeights()
        self._states = StreamedStates(self._weights)
        self._pipeline = StreamedPipeline(
            device, algorithm, ahead=0 if weights_visit else None, follows_writes=follows_writes
        )
        self._held = _Held()
        self._gradients: dict[Member, torch.Tensor] = {}
        self._prepared: ChunkQueue | None = None
        self._freed = FreedMemory(device)
        # The chunks that backward may still prefetch; None until its first gradient.
        self._prefetchable: deque[Chunk] | None = None
        # Kept alive while the update reads its numbers.
        self._decision: ClipDecision | None = None
        self.moments = algorithm.moments
        # Copies in flight use buffers that die with this object.
        self._dropped = weakref.finalize(self, device.synchronize)
        self._dropped.atexit = False

    def host_bytes(self, parts: Mapping[Member, Part]) -> int:
        """Return the host bytes that `add` takes for these parts. Raises ValueError for a budget below three chunks."""
        return self._storage.host_bytes(self._with_staying(parts))

    @torch.no_grad()
    def add(self, parts: Mapping[Member, Part]) -> None:
        """Make the states of new members, moments zero and masters from the parameters. No update may be running.

        Raises ValueError for a budget below three chunks, HostMemoryError and torch.OutOfMemoryError; then nothing has
        been added, and host memory that was reserved serves the next call.
        """
        most_slots, _ = self._in_budget(parts)
        parts = self._with_staying(parts)
        self.finish(for_writing=True)
        held = self._held
        new = self._storage.make(parts)
        chunks = (*held.chunks, *new)
        try:
            self._allocate(chunks, slots=most_slots)
            steps = {member: torch.zeros((), device=self._device.torch_device) for member in parts}
            for chunk in new:
                self._states.add(chunk)
            for member, part in parts.items():
                if part.is_split:
                    self._weights.keep_apart(member, part.streamed)
            for member in parts:
                self._states.refresh_master(member)
            if any_is_sharded(member.param for member in parts):
                self._device.gathering.add(self)
            staying_bytes = held.staying_bytes + self._bytes_staying(parts)
            self._held = _Held(chunks, {**held.steps, **steps}, most_slots, staying_bytes)
        except BaseException:
            undo_as_one([partial(self._take_back, parts, held)])
            raise

    def _take_back(self, parts: Iterable[Member], held: _Held) -> None:
        """Have what was `held` before `parts` came."""
        self._held = held
        for member in parts:
            self._weights.forget(member)
            self._states.forget(member)
        self._storage.discard()

    def _allocate(self, chunks: Sequence[Chunk], *, slots: int) -> None:
        """Allocate the buffers of `chunks`. Raises torch.OutOfMemoryError, with the largest chunk's bytes."""
        try:
            self._pipeline.allocate(chunks, slots=slots)
        except Exception as error:
            if not chunks or not device_is_full(error):
                raise
            largest = max(chunks, key=lambda chunk: chunk.slot_bytes)
            shapes = ", ".join(str(tuple(piece.member.param.shape)) for piece in largest.pieces[:3])
            raise torch.OutOfMemoryError(
                f"the device has no memory for the chunks of states that it updates: {LEAST_SLOTS} slots of "
                f"{largest.slot_bytes / 2**30:.2f} GiB, as large as the states of {shapes}, and scratch; expected it "
                "free before the optimizer is made; try smaller chunk_bytes, or AdamW for a matrix as large as a "
                f"chunk: it cuts the matrix ({error})"
            ) from error

    def gradient_places(self, members: Iterable[Member]) -> dict[Piece, torch.Tensor]:
        """Return where on the host the gradients of `members` are left, for each piece of theirs."""
        wanted = set(members)
        return {
            piece: chunk.gradients[piece.offset : piece.offset + piece.numel]
            for chunk in self._held.chunks
            for piece in chunk.pieces
            if chunk.gradients is not None and piece.member in wanted
        }

    def _in_budget(self, parts: Mapping[Member, Part]) -> tuple[int, int]:
        """Return how many slots the budget allows, and how many bytes of states it holds, `parts` included."""
        members = (*self.steps, *parts)
        if not members:
            return LEAST_SLOTS, 0
        slot_bytes, scratch_bytes = self._sizes(members)
        spare_bytes = self._prefetch_bytes
        if self._budget_bytes is not None:
            needed = LEAST_SLOTS * slot_bytes + scratch_bytes
            spare_bytes = self._budget_bytes - needed
            if spare_bytes < 0:
                raise ValueError(
                    f"device_budget_bytes is {self._budget_bytes}; expected {needed} or more: {LEAST_SLOTS} chunks of "
                    f"{slot_bytes} bytes, and {scratch_bytes} for gradients and unpacked states; try smaller "
                    "chunk_bytes"
                )
        if any_is_sharded(member.param for member in members):
            return LEAST_SLOTS, spare_bytes
        return LEAST_SLOTS + spare_bytes // slot_bytes, 0

    def _with_staying(self, parts: Mapping[Member, Part]) -> dict[Member, Part]:
        """Return `parts` with the first elements of the forward held on the device, as far as the budget allows."""
        _, most_bytes = self._in_budget(parts)
        left_bytes = most_bytes - self._held.staying_bytes
        found = dict(parts)
        if left_bytes <= 0:
            return found
        for member in sorted(parts, key=lambda member: member.order):
            part, each_bytes = parts[member], self._storage.state_bytes(member)
            # The CPU publishes the new weights of a split member together, and nothing cuts a matrix.
            if part.is_split or member.matrices is not None:
                continue
            count = min(int(left_bytes / each_bytes), len(part.streamed))
            if count < len(part.streamed):
                count -= count % COMPACT_ALIGNMENT
            found[member] = part._replace(staying=part.streamed[:count], streamed=part.streamed[count:])
            left_bytes -= count * each_bytes
            if found[member].streamed:
                break
        return found

    def _bytes_staying(self, parts: Mapping[Member, Part]) -> float:
        return sum(len(part.staying) * self._storage.state_bytes(member) for member, part in parts.items())

    def _sizes(self, members: Collection[Member]) -> tuple[int, int]:
        """Return the bytes of a slot, and of the scratch of one chunk."""
        kinds = {Kind.of(member) for member in members}
        return (
            max(map(self._storage.slot_bytes, kinds)),
            max(map(self._storage.scratch_bytes, kinds)) + self._storage.work_bytes(members),
        )

    def ring_bytes(self, members: Collection[Member]) -> int:
        """Return the device bytes of the permanent slots and the scratch of one chunk: the least for `members`."""
        slot_bytes, scratch_bytes = self._sizes(members)
        return LEAST_SLOTS * slot_bytes + scratch_bytes

    @property
    def steps(self) -> Mapping[Member, torch.Tensor]:
        """The step counter of each member."""
        return self._held.steps

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks in the order of their updates: that of the next forward.

        Before these come chunks of split members: a CPU worker waits for them. If some stay on the device, so do the
        first that come in: their copies out and the next ones in begin at once. Elements behind the last matrix come
        among matrices before it (`spread`). Collective updates follow the deadlines alone, the same on all ranks.
        """
        by_deadline = sorted(
            self._held.chunks, key=lambda chunk: (not self._has_split_member(chunk), chunk.deadline)
        )
        if any(chunk.exchanges for chunk in by_deadline):
            return tuple(by_deadline)
        ordered = spread(mixed(by_deadline))
        first = [chunk for chunk in ordered if chunk.comes_in][:LEAST_SLOTS]
        return (*first, *(chunk for chunk in ordered if chunk not in first))

    @property
    def loaded(self) -> tuple[Chunk, ...]:
        """Chunks on the device or on their way in, not updated yet, in the order of their copies."""
        return self._pipeline.loaded

    @property
    def unqueued(self) -> int:
        """How many chunks of the step have not been queued yet: `wait_for` and `finish` queue them."""
        return self._pipeline.unqueued

    def is_unqueued(self, member: Member) -> bool:
        """Whether a part of the step's update of `member` has not been queued yet."""
        return self._pipeline.is_unqueued(member)

    @property
    def extra_bytes(self) -> int:
        """Device bytes of all extra slots."""
        return self._pipeline.extra_bytes

    @property
    def holds_gradients(self) -> bool:
        """Whether some gradients of the last step are still kept alive for its update."""
        return bool(self._gradients)

    @property
    def prefetches_in_backward(self) -> bool:
        """Whether the budget allows extra slots, so that `on_gradient` is of use."""
        return self._held.most_slots > LEAST_SLOTS

    def __contains__(self, member: Member) -> bool:
        """Return whether a part of `member` is here."""
        return member in self.steps

    def update(
        self,
        gradients: Mapping[Member, torch.Tensor],
        decision: ClipDecision | None,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Prepare a step, begin it, and queue its first chunks; the host waits for nothing."""
        self.prepare(gradients, decision, groups)
        with as_one():
            self.begin()
        self.advance()

    @torch.no_grad()
    def prepare(
        self,
        gradients: Mapping[Member, torch.Tensor],
        decision: ClipDecision | None,
        groups: Sequence[Mapping[str, Any]],
        *,
        arrived: Mapping[Member, Event] | None = None,
        factors: Mapping[Member, Sequence[torch.Tensor | float]] | None = None,
    ) -> None:
        """Prepare the update of members here, once the last step is finished; it may raise, and changes nothing.

        Chunks go in the order of `chunks`: the first at once, others as `wait_for` asks for them, then the copies of
        the next step's first chunks. `gradients` of other members are passed over; each has the shape of its (local)
        parameter and is kept until `wait_for`. Each step copies every chunk that it touches in and out, so one step of
        all members is best. Without a decision gradients are used as they are. `arrived` and `factors` belong to
        gradients on the host, see `StreamedStep`.
        """
        self._prepared = None
        self.wait_for(self._gradients)
        self._pipeline.finish()
        ours = {member: gradient for member, gradient in gradients.items() if member in self.steps}
        if not ours:
            return
        due = [chunk for chunk in self.chunks if any(piece.member in ours for piece in chunk.pieces)]
        step = StreamedStep(
            ours,
            self.steps,
            decision,
            snapshot(groups),
            self._weights,
            dict(arrived or {}),
            dict(factors or {}),
        )
        # A CPU worker waits for the chunks of split members.
        split = [place for place, chunk in enumerate(due, start=1) if self._has_split_member(chunk)]
        self._prepared = self._pipeline.plan(due, step, at_once=max(split, default=0))

    @torch.no_grad()
    def begin(self) -> None:
        """Begin the prepared step, behind the live current stream; it owns its gradients and decision from here on."""
        self._freed.on_step()
        self._prefetchable = None
        queue, self._prepared = self._prepared, None
        if queue is not None and queue.step is not None:
            # The same mapping, so that a gradient is free once this share lets go of it.
            self._decision, self._gradients = queue.step.decision, queue.step.gradients
            self._pipeline.begin(queue)

    @torch.no_grad()
    def start(self) -> None:
        """Queue the begun step's first chunks."""
        self._pipeline.start()

    @torch.no_grad()
    def advance(self) -> None:
        """Queue the chunks that the begun step wants at once."""
        self._pipeline.advance()

    def _has_split_member(self, chunk: Chunk) -> bool:
        return any(self._weights.kept_apart(piece.member) is not None for piece in chunk.pieces)

    @torch.no_grad()
    def on_gradient(self, member: Member) -> None:
        """Note a final gradient, and prefetch states into memory freed by backward.

        For a hook on every parameter, if `prefetches_in_backward` and `wait_for` is called during forward.
        """
        if self._freed.on_gradient(member) and not self._pipeline.at_slot_limit:
            if self._prefetchable is None:
                self._prefetchable = deque(self.chunks)
            limit_bytes = self._freed.limit_bytes(self._pipeline.extra_bytes)
            self._pipeline.prefetch(self._prefetchable, limit_bytes=limit_bytes)

    def free_slots(self) -> None:
        """Free the slots that chunks pass through until the next step, unless one is under way."""
        self._pipeline.free_slots()

    def queue(self, members: Iterable[Member]) -> None:
        """Queue the updates of `members`, of all chunks before them, and of weights behind them that have no home."""
        self._pipeline.queue_for([member for member in members if member in self._gradients], ahead=False)
        self._pipeline.queue_what_stays()

    def wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for the updates of `members`, and drop their gradients."""
        listed = [member for member in members if member in self._gradients]
        self._pipeline.queue_for(listed)
        for member in listed:
            self._device.wait(self._pipeline.updated.get(member, REACHED))
            del self._gradients[member]

    def split_weights(self, member: Member) -> tuple[int, torch.Tensor, Event] | None:
        """Return the new weights of a split member after `update`; None for one that is updated in place.

        They are: the first element, the flat weights, and the event after which these are new. Before the next `update`
        with this member, the live current stream must wait for all reads of them.
        """
        apart = self._weights.kept_apart(member)
        if apart is None:
            return None
        return *apart, self._pipeline.updated.get(member, REACHED)

    @torch.no_grad()
    def finish(self, *, for_writing: bool) -> None:
        """Finish the step, and block until the storage is whole and, `for_writing`, no copy reads it either."""
        self._pipeline.finish()
        self._pipeline.synchronize()
        for chunk in self._held.chunks:
            chunk.stored.synchronize()
            # The upper half of a master may be the weight at home.
            chunk.at_home.synchronize()
        self._gradients.clear()
        self._prefetchable = None
        if for_writing:
            self._pipeline.drop_prefetched()

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values, for reading) of each part of a moment or `master_param`.

        Call `finish` first.
        """
        return self._states.parts(member, name)

    def write(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace a moment or `master_param` of a member by the elements that `value` has for it.

        `value` has the shape of the (local) parameter, or is one number. Call `finish(for_writing=True)` first.
        """
        local = member.param_local
        value = value.detach().expand(local.shape)
        self._states.write(
            member, name, torch.empty_like(local, dtype=torch.float32, device=value.device).copy_(value)
        )

    def round_packed(self, member: Member, master: torch.Tensor, weight: torch.Tensor) -> None:
        """Round `master` to `weight` where it is compact."""
        self._states.round_packed(member, master, weight)

    @torch.no_grad()
    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Finish the step, then make the masters of `members` from the parameters as they are."""
        self.finish(for_writing=True)
        for member in members:
            self._states.refresh_master(member)

    @torch.no_grad()
    def written(self, members: Iterable[Member]) -> list[Member]:
        """Finish the step, and return the `members` with weights other than their masters rounded."""
        self.finish(for_writing=False)
        return [member for member in members if not member.is_apart and self._states.is_behind(member)]

    def close(self) -> None:
        """Wait for all copies and free the memory on device and host. Chunks that are not queued yet are dropped."""
        undo_all([self._pipeline.close, self._drop_views, self._storage.close])

    def _drop_views(self) -> None:
        """Let go of the views of the host's pages, and of the device buffers."""
        self._dropped.detach()
        self._device.gathering.discard(self)
        self._held = _Held()
        self._gradients.clear()
        self._prepared = None
        self._weights.clear()
        self._states = StreamedStates(self._weights)
