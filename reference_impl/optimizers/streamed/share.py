"""The streamed share: elements whose states live on the host and visit the device for their update.

Geometry is `chunks`, memory `streamed_homes`, the pipeline `streamed_update` and single states `streamed_states`;
here they become one share of an optimizer, beside others that update other elements of the same members.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from reference_impl.device import REACHED, Device, Event
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.clip_decision import Verdict
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.rounds import snapshot
from reference_impl.optimizers.streamed.chunks import Chunk, Part, Weights
from reference_impl.optimizers.streamed.freed_room import FreedRoom
from reference_impl.optimizers.streamed.pipeline import StreamedRound, StreamedUpdate
from reference_impl.optimizers.streamed.slots import LEAST_SLOTS
from reference_impl.optimizers.streamed.states import MemberStates
from reference_impl.optimizers.streamed.storage import Homes, Travel, check_travel


class StreamedShare:
    """Streamed (and resident) parts of members, and what moves and updates them.

    Args:
        device: where the parameters are.
        algorithm: the formula, run by torch's fused kernel on the device.
        chunk_bytes: most bytes of states that travel at once.
        device_budget_bytes: device memory for slots of a chunk each and for what one chunk needs beside them; by
            default three slots. More are borrowed in backward, see `gradient`.
        prefetch_bytes: without a budget, how much may be borrowed beside the three slots.
        travel: which states travel, and in how many bytes; by default masters and moments in fp32.
        remedy: ends the message when the host has no room.
    """

    def __init__(
        self,
        device: Device,
        algorithm: Algorithm,
        *,
        chunk_bytes: int,
        device_budget_bytes: int | None = None,
        prefetch_bytes: int = 0,
        travel: Travel | None = None,
        remedy: str = "try a smaller fraction",
    ) -> None:
        """Take nothing yet."""
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._budget_bytes = device_budget_bytes
        self._prefetch_bytes = prefetch_bytes
        travel = travel or Travel()
        check_travel(travel, algorithm, device)
        self._homes = Homes(
            device, moments=algorithm.moments, chunk_bytes=chunk_bytes, travel=travel, remedy=remedy
        )
        self._weights = Weights()
        self._states = MemberStates(self._weights)
        self._stream = StreamedUpdate(device, algorithm)
        self._chunks: list[Chunk] = []
        self._gradients: dict[Member, torch.Tensor] = {}
        self._freed = FreedRoom(device)
        self._expected: deque[Chunk] | None = None
        self._budget_slots = LEAST_SLOTS
        self._verdict: Verdict | None = None
        self.moments = algorithm.moments
        self.steps: dict[Member, torch.Tensor] = {}
        # Copies in flight use buffers that die with this object.
        weakref.finalize(self, device.synchronize).atexit = False

    @torch.no_grad()
    def add(self, parts: Mapping[Member, Part]) -> None:
        """Take these parts of new members, moments zero and masters from the parameters; no update runs.

        Raises ValueError for a budget below three chunks and HostMemoryError: both before anything is taken.
        """
        self._budget_slots = self._slots([member.param for member in (*self.steps, *parts)])
        chunks = self._homes.make(parts)
        self._chunks.extend(chunks)
        self._stream.make_room(self._chunks, slots=self._budget_slots)
        for chunk in chunks:
            self._states.add(chunk)
        for member, part in parts.items():
            self.steps[member] = torch.zeros((), device=self._device.torch_device)
            if part.staged:
                self._weights.stage(member, part.streamed)
        self.refresh_masters(parts)

    def _slots(self, params: Sequence[torch.Tensor]) -> int:
        """Return how many slots the budget has room for, given all parameters."""
        if not params:
            return LEAST_SLOTS
        slot_bytes, scratch_bytes = self._sizes({param.dtype for param in params})
        if self._budget_bytes is None:
            return LEAST_SLOTS + self._prefetch_bytes // slot_bytes
        slots = (self._budget_bytes - scratch_bytes) // slot_bytes
        if slots < LEAST_SLOTS:
            needed = LEAST_SLOTS * slot_bytes + scratch_bytes
            raise ValueError(
                f"device_budget_bytes is {self._budget_bytes}; expected {needed} or more: {LEAST_SLOTS} chunks of "
                f"{slot_bytes} bytes, and {scratch_bytes} for gradients and unpacked states; try smaller chunk_bytes"
            )
        return slots

    def _sizes(self, dtypes: Iterable[torch.dtype]) -> tuple[int, int]:
        """Return the bytes of a slot and of what one chunk needs beside it."""
        listed = list(dtypes)
        return max(map(self._homes.slot_bytes, listed)), max(map(self._homes.scratch_bytes, listed))

    @property
    def ring_bytes(self) -> int:
        """Device bytes of the fewest slots that streaming takes, and of what one chunk needs beside them."""
        slot_bytes, scratch_bytes = self._sizes((torch.bfloat16, torch.float32))
        return LEAST_SLOTS * slot_bytes + scratch_bytes

    def __contains__(self, member: Member) -> bool:
        """Return whether a part of `member` is here."""
        return member in self.steps

    @torch.no_grad()
    def update(
        self,
        gradients: Mapping[Member, torch.Tensor],
        verdict: Verdict | None,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Start the update of members here, behind the live current stream; the host waits for nothing.

        Chunks go in the order of the next forward, the first at once and others as `wait_for` asks for them, followed
        by the first of the step after it. `gradients` of other members are passed over; each has the shape of its
        (local) parameter and is kept until `wait_for`. Each call moves every chunk that it touches, so one call a
        step is best. Without a verdict gradients are taken as they are.
        """
        self.wait_for(self._gradients)
        self._freed.step()
        self._expected = None
        ours = {member: gradient for member, gradient in gradients.items() if member in self.steps}
        if not ours:
            return
        self._verdict, self._gradients = verdict, dict(ours)
        steps = [self.steps[member] for member in ours]
        torch._foreach_add_(steps, 1)
        if verdict is not None:
            torch._foreach_sub_(steps, [verdict.found_inf] * len(steps))
        due = [chunk for chunk in self._ordered() if any(piece.member in ours for piece in chunk.pieces)]
        round_ = StreamedRound(ours, self.steps, verdict, snapshot(groups), self._weights)
        self._stream.begin(due, round_, at_once=sum(map(self._is_staged, due)))

    def _ordered(self) -> list[Chunk]:
        """Return all chunks in the order of the next forward; first those whose weights a CPU worker fetches."""
        return sorted(self._chunks, key=lambda chunk: (not self._is_staged(chunk), chunk.deadline))

    def _is_staged(self, chunk: Chunk) -> bool:
        return any(self._weights.staged(piece.member) is not None for piece in chunk.pieces)

    @property
    def borrows(self) -> bool:
        """Whether the budget has room for more than the slots that stay."""
        return self._budget_slots > LEAST_SLOTS

    @torch.no_grad()
    def gradient(self, member: Member) -> None:
        """Hear in backward that a gradient is final: bring states in to memory that backward has freed.

        For a hook on every parameter, where `borrows` and somebody calls `wait_for` during forward.
        """
        if self._freed.gradient(member) and not self._stream.slots.full:
            if self._expected is None:
                self._expected = deque(self._ordered())
            room_bytes = self._freed.room_bytes(self._stream.slots.borrowed_bytes)
            self._stream.borrow(self._expected, room_bytes=room_bytes)

    def wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream run behind the updates of `members`, and let their gradients go."""
        listed = [member for member in members if member in self._gradients]
        self._stream.queue(listed)
        for member in listed:
            self._device.wait(self._stream.updated.get(member, REACHED))
            del self._gradients[member]

    def staged(self, member: Member) -> tuple[int, torch.Tensor, Event] | None:
        """Return where the new weights of a staged member stand after `update`, or None for one written in place.

        The first element, the flat weights and the event after which they are new. The live current stream must be
        behind whoever reads them before the next `update` with this member.
        """
        staged = self._weights.staged(member)
        return None if staged is None else (*staged, self._stream.updated.get(member, REACHED))

    def settle(self, *, for_writing: bool) -> None:
        """Block until the homes are whole and, `for_writing`, nobody reads them either."""
        self.wait_for(self._gradients)
        self._stream.finish()
        self._expected = None
        for chunk in self._chunks:
            chunk.stored.synchronize()
        if for_writing:
            self._stream.forget()

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values, for reading) of each part of a moment or `master_param`.

        After `settle`.
        """
        return self._states.parts(member, name)

    def write(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace a moment or `master_param` of a member by what `value` (of its shape, or one number) has for it.

        After `settle(for_writing=True)`.
        """
        local = member.param_local
        value = value.detach().expand(local.shape)
        self._states.write(
            member, name, torch.empty_like(local, dtype=torch.float32, device=value.device).copy_(value)
        )

    @torch.no_grad()
    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of `members` from the parameters as they are, once no update runs."""
        self.settle(for_writing=True)
        for member in members:
            self._states.refresh_master(member)

    def close(self) -> None:
        """Wait for all copies and give the memory of both tiers back."""
        self._homes.close()
        # The device buffers, and the views that keep the host's pages.
        self._chunks.clear()
        self._gradients.clear()
        self._weights.clear()
        self._states = MemberStates(self._weights)
        self._stream.close()
