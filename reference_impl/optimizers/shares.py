"""The three shares of an optimizer's state side by side: resident, streamed and updated on the CPU.

A member says which of its elements belong to which share. This module starts all three shares in a step, lets a
reader wait for a whole parameter, and publishes the parts of a split parameter together. The streamed share is
imported only if something streams, and the automatic split only if it is asked for. Explained in
docs/optimizer-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from offload_arithmetic.states import StateBytes, state_bytes
from offload_arithmetic.update_time import Split
from reference_impl.device import REACHED, Device, Event
from reference_impl.distributed.fsdp2 import reductions
from reference_impl.distributed.host_room import HostNeed, require_room
from reference_impl.distributed.mesh import any_is_sharded
from reference_impl.distributed.ranks import RankGroup
from reference_impl.memory.closing import undo_all
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.cpu.share import CpuShare
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.layout import Member, NewWeights, local_numel, members_of
from reference_impl.optimizers.options import Options, Streaming
from reference_impl.optimizers.resident import ResidentShare
from reference_impl.optimizers.step import Operation

if TYPE_CHECKING:
    from reference_impl.optimizers.streamed.chunks import Part
    from reference_impl.optimizers.streamed.share import StreamedShare


class Shares:
    """All state of one optimizer, and what updates it. It implements `parameter_state.StateParts`.

    `split` is the one chosen for `params`. Raises ValueError and HostMemoryError for options and budgets that cannot be
    met, before anything is taken.

    Args:
        device: where the parameters are.
        algorithm: the formula.
        params: the parameters that the split is chosen for; `add` takes the members.
        split: the shares (resident, streamed, CPU), or `auto`.
        options: see `Options`.
        whole_members: never split a member between buckets of the CPU share.
    """

    def __init__(
        self,
        device: Device,
        algorithm: Algorithm,
        params: Sequence[torch.Tensor],
        *,
        split: tuple[float, float, float] | Literal["auto"],
        options: Options,
        whole_members: bool,
    ) -> None:
        self._device = device
        self._ranks = options.budgets.ranks
        self._members: list[Member] = []
        self._resident = ResidentShare(algorithm)
        self._streamed: StreamedShare | None = None
        self._ahead = 0
        streamed_bytes = 0.0
        if split == "auto" or split[1] > 0 or options.streaming != Streaming():
            self._streamed = _streamed_share(device, algorithm, options.streaming)
            sizes = [(local_numel(param), param.element_size()) for param in params]
            each = _state_bytes(sizes, device, algorithm, options.streaming)
            streamed_bytes = each.streamed
            # So many elements may come in during backward, or stay: those that the next forward needs first.
            self._ahead = int(options.streaming.prefetch_bytes / max(each.streamed, 1))
            if split == "auto":
                from reference_impl.optimizers.auto_split import fastest_split_here

                split = fastest_split_here(
                    sum(numel for numel, _ in sizes),
                    each,
                    device,
                    options.budgets,
                    ring_bytes=self._streamed.ring_bytes(params),
                    # How much does come in, the length of a backward says, which nobody knows yet. Of sharded
                    # parameters as much stays on the device.
                    hidden_bytes=options.streaming.prefetch_bytes // (1 if any_is_sharded(params) else 2),
                    ranks=RankGroup.of(params, self._ranks),
                )
        self.split = Split(*split)
        self._cpu = CpuShare(
            device,
            algorithm,
            options.cpu,
            whole_members=whole_members,
            streamed_bytes=streamed_bytes * self.split.streamed / (self.split.cpu or 1.0),
        )
        # Copies in flight use buffers that die with this object.
        self._dropped = weakref.finalize(self, device.synchronize)
        self._dropped.atexit = False

    def lay_out(
        self,
        params: Iterable[tuple[torch.Tensor, int]],
        *,
        first_order: int,
        offload: Callable[[torch.Tensor], bool] | None,
    ) -> list[Member]:
        """Say which elements of `params` belong to which share, see `members_of`; `add` makes their state."""
        return members_of(
            params,
            first_order=first_order,
            fraction=self.split.streamed + self.split.cpu,
            streamed=self.split.streamed_of_offloaded,
            ahead=max(self._ahead - sum(member.streamed for member in self._members), 0),
            offload=offload,
            reductions=reductions(),
        )

    def add(self, members: Sequence[Member]) -> None:
        """Make the state of new members, masters from their parameters; all or nothing.

        Raises HostMemoryError, on all ranks that train sharded members alike, ValueError and torch.OutOfMemoryError.
        """
        self._require_room(members)
        try:
            for member in members:
                if member.resident or not (member.streamed or member.on_cpu):
                    self._resident.add(member)
            self._cpu.add(members)
            # Last, because it takes back itself what it has not finished.
            if self._streamed is not None:
                self._streamed.add(_parts(members))
        except BaseException:
            with deferred_interrupts():
                self._resident.forget(members)
                self._cpu.forget(members)
            raise
        self._members.extend(members)

    def _require_room(self, members: Sequence[Member]) -> None:
        """Raise HostMemoryError unless the host has the memory for `members`, of ranks that train together for all."""
        staging, states = self._cpu.host_bytes(members)
        items = {"staging of the CPU share": staging, "its masters and moments": states}
        if self._streamed is not None:
            items["streamed states"] = self._streamed.host_bytes(_parts(members))
        resident = sum(member.resident for member in members)
        leaving = sum(member.streamed + member.on_cpu for member in members)
        share = leaving / max(resident + leaving, 1)
        require_room(
            HostNeed(items=items),
            RankGroup.of([member.param for member in members], self._ranks) if members else None,
            remedy=lambda fits: f"try offload_fraction={0.9 * fits * share:.2f} or less",
        )

    @property
    def prefetches(self) -> bool:
        """Whether states may come in during backward, which `gradient_is_final` needs to hear of."""
        return self._streamed is not None and self._streamed.prefetches_in_backward

    def gradient_is_final(self, member: Member) -> None:
        """Hear in backward of a gradient that is final; only where this `prefetches`."""
        assert self._streamed is not None
        self._streamed.on_gradient(member)

    def offload(self, member: Member, *, measure: bool, reduced: torch.Tensor | None = None) -> torch.Tensor:
        """Start the copy of a gradient to the CPU share, see `gradients.HostGradients`; return it, laid out."""
        return self._cpu.offload(member, measure=measure, reduced=reduced)

    def bring_back(self, member: Member, target: torch.Tensor) -> None:
        """Start the copy of a gradient that was sent off and has not been used into `target`, one-dimensional."""
        self._cpu.bring_back(member, target)

    def discard(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that were sent off but will not be used."""
        self._cpu.discard(members)

    def fence(self) -> None:
        """Make the live current stream wait until all gradients in flight have been read."""
        self._cpu.fence()

    @property
    def norms(self) -> Mapping[Member, torch.Tensor]:
        """The fp32 norms (0-dim, on the device) of the gradients sent off, as they were then."""
        return self._cpu.norms

    def prepare(
        self,
        step: CpuStep,
        arrivals: Mapping[Member, Event],
        gradients: Mapping[Member, torch.Tensor],
        factors: Sequence[torch.Tensor | float],
    ) -> list[Operation]:
        """Prepare a step and return its operations: the device's shares, and by deadline the CPU's.

        Changes nothing when it raises.

        Args:
            step: the CPU share's part, which may have queued some of its buckets already.
            arrivals: the members whose gradients it takes now, with the events of their copies.
            gradients: those of the members that have a part on the device, laid out like their parameters.
            factors: what `step` multiplies gradients by.
        """
        decision, groups = step.plan.decision, step.plan.groups
        buckets = [
            bucket
            for bucket in self._cpu.buckets_of([*step.arrivals, *arrivals])
            if bucket not in step.queued
        ]
        buckets.sort(key=lambda bucket: bucket.deadline)
        last = [bucket for bucket in buckets if _streams_in_part(bucket)]
        first = [bucket for bucket in buckets if not _streams_in_part(bucket)]
        split = {member: gradient for member, gradient in gradients.items() if member.pieces}
        whole = {member: gradient for member, gradient in gradients.items() if not member.pieces}
        streamed = [member for member in gradients if member.streamed]
        if self._streamed is not None:
            self._streamed.prepare(gradients, decision, groups)
        if decision is not None and buckets:
            self._cpu.send(decision, factors)
        update = _BucketQueue(self._device, self._cpu, step, self._new_weights)
        operations: list[Operation] = [partial(self._take, step, arrivals, streamed)]
        if self._streamed is not None:
            # Copies of the first chunks out, and of the next ones in, run beside the resident update.
            operations += [self._streamed.begin, self._streamed.start]
        operations += self._resident.operations(split, groups, decision)
        if buckets:
            operations.append(update.mark)
        if first:
            operations.append(partial(update.submit, first))
        operations += self._resident.operations(whole, groups, decision)
        if self._streamed is not None:
            operations.append(self._streamed.advance)
        if last:
            operations.append(partial(update.submit, last))
        return operations

    def _take(self, step: CpuStep, arrivals: Mapping[Member, Event], streamed: Iterable[Member]) -> None:
        """Let a step own its gradients; whoever reads a weight waits from now on."""
        self._cpu.take(step, arrivals)
        for member in streamed:
            member.pending = True

    def completed_by(self, member: Member) -> list[Bucket]:
        """Return the buckets of `member` whose gradients have all been sent off, and which no device shares."""
        return [
            bucket
            for bucket in self._cpu.buckets_of([member])
            if bucket.is_complete and not any(piece.member.on_device for piece in bucket.pieces)
        ]

    def submit(self, bucket: Bucket, step: CpuStep) -> None:
        """Queue the CPU update of a complete bucket during backward."""
        arrived = self._cpu.arrived()
        members = dict.fromkeys(piece.member for piece in bucket.pieces)
        self._cpu.take(step, {m: m.arrival for m in members if m.arrival is not None})
        self._cpu.submit([bucket], step, self._new_weights, arrived=arrived, last_use=None)

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
        self._cpu.wait_for([member for member in pending if member.pieces])
        for member in pending:
            member.pending = False

    def check(self) -> None:
        """Raise what a worker has failed with, see `DeadlineWorkers.check`."""
        self._cpu.check()

    @property
    def has_failed_jobs(self) -> bool:
        """Whether a part of an update has failed on a worker and is to be done again."""
        return self._cpu.has_failed_jobs

    @property
    def is_unqueued(self) -> bool:
        """Whether a step has begun that is not queued to its end: whoever waits for weights goes on with it."""
        return self._streamed is not None and self._streamed.is_begun

    def drain(self) -> None:
        """Wait until all CPU updates are done and their copies have read what they need."""
        self._cpu.drain()

    @torch.no_grad()
    def refresh_masters(self, members: Sequence[Member]) -> None:
        """Make the masters of `members` from the parameters as they are."""
        self._cpu.refresh_masters(members)
        if self._streamed is not None:
            self._streamed.refresh_masters([member for member in members if member in self._streamed])
        self._resident.refresh_masters(members)

    def steps(self, member: Member) -> list[torch.Tensor]:
        """Return a member's step counters (fp32, 0-dim), the CPU's first."""
        steps = [member.step] if member.pieces else []
        steps.extend(self._resident.steps(member))
        if self._streamed is not None and member in self._streamed:
            steps.append(self._streamed.steps[member])
        return steps

    def views(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of each part of a state that stays or is updated on the CPU."""
        yield from self._resident.parts(member, name)
        yield from self._cpu.parts(member, name)

    def copies(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part of a state that streams."""
        if self._streamed is not None and member.streamed:
            self._streamed.finish(for_writing=False)
            yield from self._streamed.parts(member, name)

    def write_streamed(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace the parts of a state that stream by those of `value` (fp32, of the member's shape)."""
        assert self._streamed is not None
        self._streamed.finish(for_writing=True)
        self._streamed.write(member, name, value)

    def follow_weight(self, member: Member) -> None:
        """Let what streams of an fp32 parameter, its own master, be as the parameter is."""
        if self._streamed is not None and member in self._streamed:
            self._streamed.refresh_masters([member])

    def close(self) -> None:
        """Stop the workers and give the memory of both tiers back."""
        streamed = [] if self._streamed is None else [self._streamed.close]
        try:
            undo_all([*streamed, self._cpu.close])
        finally:
            # Closing waits itself, and has said so if the device is lost.
            self._dropped.detach()


class _BucketQueue:
    """Submits the buckets of one step behind what the device has been given when `mark` was called."""

    def __init__(
        self,
        device: Device,
        cpu: CpuShare,
        step: CpuStep,
        new_weights: Callable[[Member], Iterable[NewWeights]],
    ) -> None:
        self._device, self._cpu, self._step, self._new_weights = device, cpu, step, new_weights
        self._last_use: Event = REACHED
        self._arrived: Event = REACHED

    def mark(self) -> None:
        """Remember what the live current stream has now: the last use of old weights, the split members' update."""
        self._last_use, self._arrived = self._device.record(), self._cpu.arrived()

    def submit(self, buckets: Sequence[Bucket]) -> None:
        """Queue the updates of `buckets`, all or none."""
        self._cpu.submit(
            buckets, self._step, self._new_weights, arrived=self._arrived, last_use=self._last_use
        )


def _streamed_share(device: Device, algorithm: Algorithm, streaming: Streaming) -> StreamedShare:
    from reference_impl.optimizers.streamed.share import StreamedShare
    from reference_impl.optimizers.streamed.storage import StateFormat

    return StreamedShare(
        device,
        algorithm,
        chunk_bytes=streaming.chunk_bytes,
        prefetch_bytes=streaming.prefetch_bytes,
        state_format=StateFormat.of(streaming.states, algorithm, device),
    )


def _parts(members: Iterable[Member]) -> dict[Member, Part]:
    """Return what streams of each of `members`."""
    from reference_impl.optimizers.streamed.chunks import Part

    # A parameter that the CPU updates in part is published as one, so its streamed part waits for that.
    return {
        member: Part(range(member.resident, member.on_device), is_split=member.on_cpu > 0)
        for member in members
        if member.streamed
    }


def _state_bytes(
    sizes: Iterable[tuple[int, int]], device: Device, algorithm: Algorithm, streaming: Streaming
) -> StateBytes:
    from reference_impl.optimizers.streamed.storage import StateFormat

    state_format = StateFormat.of(streaming.states, algorithm, device)
    return state_bytes(sizes, moments=len(algorithm.moments), streams_as=state_format.form)


def _streams_in_part(bucket: Bucket) -> bool:
    return any(piece.member.streamed for piece in bucket.pieces)
