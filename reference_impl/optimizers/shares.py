# SPDX-License-Identifier: Apache-2.0
"""The states of an optimizer in three shares, and their updates: resident, streamed and updated on the CPU.

A member divides its elements among the shares. This module starts all three shares in a step, lets a
reader wait for a whole parameter, and publishes the parts of a split parameter together. `placement` decides the
division. Explained in docs/optimizer-offloading.md and docs/optimizer-state-offloading.md, "Shares".
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.closing import undo_all, undo_as_one
from reference_impl.memory.weight_home import refuse_update
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.cpu.share import CpuShare
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.gradients.leaving import factors_of
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.layout import Member, NewWeights
from reference_impl.optimizers.options import CpuUpdate
from reference_impl.optimizers.resident import ResidentShare, ResidentUpdate
from reference_impl.optimizers.step import StepPlan
from reference_impl.optimizers.writes.sums import WrittenWeights

if TYPE_CHECKING:
    from reference_impl.optimizers.streamed.chunks import Part
    from reference_impl.optimizers.streamed.share import StreamedShare


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that can begin: the CPU's part, the gradients, and the prepared updates of the shares.

    `arrivals` are the events of the gradients that the CPU's part takes at the begin. `streamed` are the members with a
    streamed part. The CPU updates the buckets `first`, by deadline, then `last`, with partly streamed members. `split`
    updates the resident parts of members shared with the CPU, `whole` all other resident parts. Other code has
    `written` weights of the CPU's part.
    """

    step: CpuStep
    arrivals: Mapping[Member, Event]
    streamed: Sequence[Member]
    first: Sequence[Bucket]
    last: Sequence[Bucket]
    split: ResidentUpdate
    whole: ResidentUpdate
    written: WrittenWeights[Member] | None


class Shares:
    """All states of one optimizer, and their updates. It implements `parameter_state.StateParts`.

    Args:
        device: the parameters' device, or the device that their weights visit.
        algorithm: the formula of elements.
        streamed: holds the streamed states, and resident ones beside them; None without any.
        cpu: how the CPU updates its share. It has no threads before the first member of it.
        whole_members: never split a member between buckets of the CPU share.
        gradients: brings the gradients of all members to the host, if gradients of a streamed share leave, too.
        follows_writes: see `CpuShare`.
        publishes_at_once: a wait for a weight publishes all its parts, whichever share has written them.
    """

    def __init__(
        self,
        device: Device,
        algorithm: Algorithm,
        *,
        streamed: StreamedShare | None,
        cpu: CpuUpdate | None = None,
        whole_members: bool = False,
        gradients: GradientMover | None = None,
        follows_writes: bool = True,
        publishes_at_once: bool = False,
    ) -> None:
        self._device = device
        self._publishes_at_once = publishes_at_once
        self._members: list[Member] = []
        self._resident = ResidentShare(device, algorithm, follows_writes=follows_writes)
        self._streamed = streamed
        self.cpu = CpuShare(
            device,
            algorithm,
            cpu or CpuUpdate(),
            whole_members=whole_members,
            gradients=gradients or GradientMover(device),
            follows_writes=follows_writes,
        )
        self._prepared: PreparedStep | None = None
        # Copies in flight use buffers that die with this object.
        self._dropped = weakref.finalize(self, device.synchronize)
        self._dropped.atexit = False

    @property
    def streamed(self) -> StreamedShare:
        """The share that streams, if there is one."""
        assert self._streamed is not None
        return self._streamed

    @property
    def prefetches(self) -> bool:
        """Whether states may come in during backward; then `streamed.on_gradient` needs to hear of it."""
        return self._streamed is not None and self._streamed.prefetches_in_backward

    def add(self, members: Sequence[Member], parts: Mapping[Member, Part]) -> None:
        """Make the states of new members, masters from their weights; all or nothing.

        `parts` are the elements that the streamed share has. The CPU has the rest of a split member, and the whole of
        one without a part there. Raises HostMemoryError, on all ranks that train sharded members alike, ValueError
        and torch.OutOfMemoryError.
        """
        on_cpu = [m for m in members if m.on_cpu and (m not in parts or parts[m].is_split)]
        try:
            for member in members:
                if _stays(member, parts.get(member)):
                    self._resident.add(member)
            self.cpu.add(
                on_cpu, streamed_bytes=self._streamed.host_bytes(parts) if self._streamed and on_cpu else 0
            )
            # Last, because it takes its own unfinished members back.
            if self._streamed is not None:
                self._streamed.add(parts)
        except BaseException:
            undo_as_one([partial(share.forget, members) for share in (self._resident, self.cpu)])
            raise
        self._members.extend(members)

    def prepare(
        self,
        plan: StepPlan,
        gradients: Mapping[Member, torch.Tensor],
        *,
        arrived: Mapping[Member, Event],
        factors: Mapping[Member, Sequence[torch.Tensor | float]],
        backward_part: CpuStep | None = None,
    ) -> None:
        """Prepare a step: allocate and send everything for it. Changes nothing.

        Args:
            plan: its hyper-parameters and clip decision.
            gradients: those of its members, laid out like their parameters; of one that has `arrived` on the host, its
                part on the device, or its stand-in.
            arrived: the events of the copies of gradients to the host.
            factors: factors of gradients on the host.
            backward_part: the CPU's part, where backward has begun it: it takes further gradients.

        Raises RuntimeError if the CPU would update a lent weight.
        """
        self._prepared = None
        arrivals = {member: arrival for member, arrival in arrived.items() if member in self.cpu}
        for member in arrivals:
            if member.home is not None and member.home.is_lent:
                raise refuse_update(member.home.block_index)
        numbers, indices = factors_of(arrivals)
        step = backward_part or CpuStep(plan, indices)
        buckets = [
            each for each in self.cpu.buckets_of([*step.arrivals, *arrivals]) if each not in step.queued
        ]
        buckets.sort(key=lambda bucket: bucket.deadline)
        streamed: list[Member] = []
        if self._streamed is not None:
            self._streamed.prepare(gradients, plan.decision, plan.groups, arrived=arrived, factors=factors)
            streamed = [member for member in gradients if member in self._streamed]
        split = {member: gradient for member, gradient in gradients.items() if member.pieces}
        whole = {member: gradient for member, gradient in gradients.items() if not member.pieces}
        of_split, of_whole = self._resident.prepare([split, whole], plan.groups, plan.decision)
        if plan.decision is not None and buckets:
            # The workers read it once all kernels before it have ended, some of which read homes on the device.
            self.cpu.send(plan.decision, numbers)
        last = [bucket for bucket in buckets if self._streams_in_part(bucket)]
        first = [bucket for bucket in buckets if bucket not in last]
        # Of a member that backward has begun to update another bucket may be left.
        written = self.cpu.compare(dict.fromkeys(piece.member for each in buckets for piece in each.pieces))
        self._prepared = PreparedStep(step, arrivals, streamed, first, last, of_split, of_whole, written)

    def begin(self) -> None:
        """Begin the prepared step: let it own its gradients, and queue its updates, the CPU's by deadline.

        Only where the device or a worker is lost does it raise. Chunks of visiting weights are queued by a wait for
        them.
        """
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        self.cpu.take(prepared.step, prepared.arrivals)
        for member in prepared.streamed:
            # Readers of a weight wait from now on.
            member.pending = True
        if self._streamed is not None:
            # Copies of the first chunks out, and of the next ones in, run beside the resident update.
            self._streamed.begin()
            self._streamed.start()
        prepared.split.run()
        if prepared.first or prepared.last:
            # Behind the last use of old weights, and the split members' update.
            last_use, arrived = self._device.record(), self.cpu.arrived()
            submit = partial(
                self.cpu.submit,
                step=prepared.step,
                new_weights=self._new_weights,
                arrived=arrived,
                last_use=last_use,
                written=prepared.written,
            )
        if prepared.first:
            submit(prepared.first)
        prepared.whole.run()
        if self._streamed is not None:
            self._streamed.advance()
        if prepared.last:
            submit(prepared.last)

    def _streams_in_part(self, bucket: Bucket) -> bool:
        streamed = self._streamed
        return streamed is not None and any(piece.member in streamed for piece in bucket.pieces)

    def completed_by(self, member: Member, *, sent: Collection[Member]) -> list[Bucket]:
        """Return the buckets of `member` with all gradients sent off and no part on the device.

        Gradients of `sent` have been, and are used already.
        """
        return [
            bucket
            for bucket in self.cpu.buckets_of([member])
            if all(p.member.arrival is not None or p.member in sent for p in bucket.pieces)
            and not any(piece.member.on_device for piece in bucket.pieces)
        ]

    def compare(self, bucket: Bucket) -> WrittenWeights[Member] | None:
        """Find the weights of a complete bucket that others have written, for `submit`; allocates."""
        return self.cpu.compare(dict.fromkeys(piece.member for piece in bucket.pieces))

    def submit(self, bucket: Bucket, step: CpuStep, written: WrittenWeights[Member] | None) -> None:
        """Queue the CPU update of a complete bucket during backward."""
        arrived = self.cpu.arrived()
        members = dict.fromkeys(piece.member for piece in bucket.pieces)
        self.cpu.take(step, {m: m.arrival for m in members if m.arrival is not None})
        self.cpu.submit([bucket], step, self._new_weights, arrived=arrived, last_use=None, written=written)

    def _new_weights(self, member: Member) -> Iterator[NewWeights]:
        """Yield the new weights of a member that the device has and its parameter has not."""
        yield from self._resident.new_weights(member)
        streamed = None if self._streamed is None else self._streamed.split_weights(member)
        if streamed is not None:
            start, weights, event = streamed
            whole = member.flat(member.weight)
            yield NewWeights(whole[start : start + weights.numel()], weights, event)

    def wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for the members' new weights; the host only until they are sent."""
        pending = [member for member in members if member.pending]
        # The device gets its work before the host blocks for the CPU's.
        if self._streamed is not None:
            self._streamed.wait_for(pending)
        self.cpu.wait_for([member for member in pending if member in self.cpu])
        for member in pending:
            member.has_arrived()

    def check(self) -> None:
        """Raise the error of a worker that has failed, see `DeadlineWorkers.check`."""
        self.cpu.check()

    @property
    def has_unqueued(self) -> bool:
        """Whether a begun step is not queued to its end: a wait for weights goes on with it."""
        return self._streamed is not None and self._streamed.unqueued > 0

    def is_on_its_way(self, member: Member) -> bool:
        """Return whether the begun step has still to write the weight of `member`, for which nobody has waited."""
        if self._publishes_at_once or member in self.cpu:
            return True
        return self._streamed is not None and self._streamed.is_unqueued(member)

    def drain(self) -> None:
        """Wait until all CPU updates are done and their copies have read their sources."""
        self.cpu.drain()

    def finish(self, *, for_writing: bool) -> None:
        """Finish the step, and block until all states are whole and, `for_writing`, no copy reads them either."""
        self.cpu.wait_for([member for member in self._members if member in self.cpu])
        self.cpu.drain()
        if self._streamed is not None:
            self._streamed.finish(for_writing=for_writing)

    @torch.no_grad()
    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of `members` from their weights as they are."""
        listed = list(members)
        self.cpu.refresh_masters(member for member in listed if member in self.cpu)
        if self._streamed is not None:
            self._streamed.refresh_masters([member for member in listed if member in self._streamed])
        self._resident.refresh_masters(listed)

    def steps(self, member: Member) -> list[torch.Tensor]:
        """Return a member's step counters (fp32, 0-dim), the CPU's first."""
        steps = [member.step] if member in self.cpu else []
        steps.extend(self._resident.steps(member))
        if self._streamed is not None and member in self._streamed:
            steps.append(self._streamed.steps[member])
        return steps

    def views(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of each part of a state that stays or is updated on the CPU.

        Other states are packed, or read while they stream.
        """
        yield from self._resident.parts(member, name)
        if member in self.cpu:
            yield from self.cpu.parts(member, name)

    def copies(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part of a state that the streamed share has."""
        if self._streamed is not None and member in self._streamed:
            self._streamed.finish(for_writing=False)
            yield from self._streamed.parts(member, name)

    def write_streamed(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace the parts of a state that the streamed share has by `value` (fp32, of the member's shape)."""
        self.streamed.finish(for_writing=True)
        self.streamed.write(member, name, value)

    def follow_weight(self, member: Member) -> None:
        """Set the streamed part of a split fp32 parameter's master to the parameter; others are the parameter."""
        if self._streamed is not None and self._streamed.split_weights(member) is not None:
            self._streamed.refresh_masters([member])

    def rounded(self, member: Member, master: torch.Tensor) -> torch.Tensor:
        """Return `master` as the weight is rounded from it."""
        weight = master.to(member.dtype)
        if self._streamed is not None:
            self._streamed.round_packed(member, master, weight)
        return weight

    def note_weight(self, member: Member) -> None:
        """Note that the master equals the weight now."""
        self.cpu.note_weight(member)

    def written_uncounted(self, members: Sequence[Member]) -> frozenset[Member]:
        """Return the `members` with other weights than the noted ones, see `StateParts`."""
        compared = self.cpu.compare(members)
        return frozenset() if compared is None else compared.read()

    def written(self, members: Sequence[Member]) -> Iterable[Member]:
        """Return the `members` with weights written past every counter, see `StateParts`."""
        self._resident.take_over(members)
        found = set(self.written_uncounted(members))
        if self._streamed is not None:
            found.update(self._streamed.written([m for m in members if m in self._streamed]))
        return [member for member in members if member in found]

    def close(self) -> None:
        """Stop the workers and give the memory of both tiers back."""
        streamed = [] if self._streamed is None else [self._streamed.close]
        try:
            undo_all([*streamed, self.cpu.close])
        finally:
            # Closing waits itself, and has said so if the device is lost.
            self._dropped.detach()


def _stays(member: Member, part: Part | None) -> bool:
    """Return whether elements of `member` are resident and the streamed share does not hold them."""
    if part is None:
        # Somebody counts the steps of an empty one.
        return member.resident > 0 or not member.on_cpu
    return member.resident > 0 and not (part.resident or part.staying)
