"""The three shares of an optimizer's state side by side: resident, streamed and updated on the CPU.

A member says which of its elements belong to which share. This module starts all three shares in a step, lets a
reader wait for a whole parameter, and publishes the parts of a split parameter together. The streamed share is
imported only if something streams, and the automatic split only if it is asked for. Explained in
docs/optimizer-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from offload_arithmetic.states import StateBytes, state_bytes
from offload_arithmetic.update_time import Split
from reference_impl.device import Device, Event
from reference_impl.distributed.fsdp2 import reductions
from reference_impl.distributed.host_room import HostNeed, require_room
from reference_impl.distributed.mesh import any_is_sharded
from reference_impl.distributed.ranks import RankGroup
from reference_impl.memory.closing import undo_all
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.optimizers.algorithms import Algorithm, MatrixAlgorithm
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.cpu.share import CpuShare
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.layout import Member, NewWeights, local_numel, members_of
from reference_impl.optimizers.options import Options, Streaming
from reference_impl.optimizers.resident import ResidentShare, ResidentUpdate
from reference_impl.optimizers.writes.sums import WrittenWeights

if TYPE_CHECKING:
    from reference_impl.optimizers.auto_split import MatrixBytes
    from reference_impl.optimizers.streamed.chunks import Part
    from reference_impl.optimizers.streamed.share import StreamedShare


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that can begin: the CPU's part, the gradients, and the prepared updates of the shares.

    `arrivals` are those of the gradients that the CPU's part takes at the begin, `gradients` those of members with a
    part on the device. The CPU updates the buckets `first`, by deadline, then `last`, which hold members that stream in
    part. `split` updates the resident part of members that the CPU updates in part, `whole` that of all others. Others
    have `written` weights of the CPU's part.
    """

    step: CpuStep
    arrivals: Mapping[Member, Event]
    gradients: Mapping[Member, torch.Tensor]
    first: Sequence[Bucket]
    last: Sequence[Bucket]
    split: ResidentUpdate
    whole: ResidentUpdate
    written: WrittenWeights[Member] | None


class Shares:
    """All state of one optimizer, and its updates. It implements `parameter_state.StateParts`.

    `split` is the one chosen for `params`. Raises ValueError and HostMemoryError for options and budgets that cannot be
    met, before anything is taken.

    Args:
        device: where the parameters are.
        algorithm: the formula.
        params: the parameters that the split is chosen for; `add` takes the members.
        split: the shares (resident, streamed, CPU), or `auto`.
        options: see `Options`.
        whole_members: never split a member between buckets of the CPU share.
        matrices: the formulas of those of `params` that are updated in matrices: these stay or stream, and the split
            between streaming and the CPU is that of all others.
        follows_writes: see `CpuShare`.
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
        matrices: Mapping[torch.Tensor, MatrixAlgorithm],
        follows_writes: bool,
    ) -> None:
        self._device = device
        self._ranks = options.budgets.ranks
        self._members: list[Member] = []
        self._resident = ResidentShare(device, algorithm, follows_writes=follows_writes)
        self._streamed: StreamedShare | None = None
        self._ahead = 0
        streamed_bytes = 0.0
        if split == "auto" or split[1] > 0 or options.streaming != Streaming() or matrices:
            self._streamed = _streamed_share(device, algorithm, options.streaming, follows_writes)
            everything, params = params, [param for param in params if param not in matrices]
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
                    ring_bytes=self._streamed.ring_bytes(
                        members_of(
                            [(param, number) for number, param in enumerate(everything)],
                            first_order=0,
                            fraction=1.0,
                            offload=None,
                            matrices=[matrices.get(param) for param in everything],
                        )
                    ),
                    matrices=_matrix_bytes(matrices, device, algorithm, options.streaming),
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
            follows_writes=follows_writes,
        )
        # Copies in flight use buffers that die with this object.
        self._dropped = weakref.finalize(self, device.synchronize)
        self._dropped.atexit = False

    def lay_out(
        self,
        params: Iterable[tuple[torch.Tensor, int]],
        first_order: int,
        offload: Callable[[torch.Tensor], bool] | None,
        matrices: Sequence[MatrixAlgorithm | None],
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
            matrices=matrices,
        )

    def add(self, members: Sequence[Member]) -> None:
        """Make the state of new members, masters from their parameters; all or nothing.

        Raises HostMemoryError, on all ranks that train sharded members alike, ValueError and torch.OutOfMemoryError.
        """
        self._require_room(members)
        try:
            for member in members:
                if member.matrices is None and (member.resident or not (member.streamed or member.on_cpu)):
                    self._resident.add(member)
            self._cpu.add(members)
            # Last, because it takes its own unfinished members back.
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
    ) -> PreparedStep:
        """Prepare a step: allocate and send all that it needs. Changes nothing.

        Args:
            step: the CPU share's part, which may have queued some of its buckets already.
            arrivals: the members whose gradients it takes now, with the events of their copies.
            gradients: those of the members that have a part on the device, laid out like their parameters.
            factors: by which `step` multiplies gradients.
        """
        decision, groups = step.plan.decision, step.plan.groups
        members = [*step.arrivals, *arrivals]
        buckets = [bucket for bucket in self._cpu.buckets_of(members) if bucket not in step.queued]
        buckets.sort(key=lambda bucket: bucket.deadline)
        split = {member: gradient for member, gradient in gradients.items() if member.pieces}
        whole = {member: gradient for member, gradient in gradients.items() if not member.pieces}
        if self._streamed is not None:
            self._streamed.prepare(gradients, decision, groups)
        of_split, of_whole = self._resident.prepare([split, whole], groups, decision)
        if decision is not None and buckets:
            self._cpu.send(decision, factors)
        last = [bucket for bucket in buckets if _streams_in_part(bucket)]
        first = [bucket for bucket in buckets if not _streams_in_part(bucket)]
        written = self._cpu.compare(arrivals)
        return PreparedStep(step, arrivals, gradients, first, last, of_split, of_whole, written)

    def begin(self, prepared: PreparedStep) -> None:
        """Begin a prepared step: let it own its gradients, and queue its updates, the CPU's by deadline.

        Only where the device or a worker is lost does it raise.
        """
        step = prepared.step
        self._cpu.take(step, prepared.arrivals)
        for member in prepared.gradients:
            # Whoever reads a weight waits from now on.
            member.pending |= self._streamed is not None and member in self._streamed
        if self._streamed is not None:
            # Copies of the first chunks out, and of the next ones in, run beside the resident update.
            self._streamed.begin()
            self._streamed.start()
        prepared.split.run()
        if prepared.first or prepared.last:
            # Behind the last use of old weights, and the split members' update.
            last_use, arrived = self._device.record(), self._cpu.arrived()
            submit = partial(
                self._cpu.submit,
                step=step,
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

    def completed_by(self, member: Member) -> list[Bucket]:
        """Return the buckets of `member` whose gradients have all been sent off, and which no device shares."""
        return [
            bucket
            for bucket in self._cpu.buckets_of([member])
            if bucket.is_complete and not any(piece.member.on_device for piece in bucket.pieces)
        ]

    def compare(self, bucket: Bucket) -> WrittenWeights[Member] | None:
        """Find the weights of a complete bucket that others have written, for `submit`; allocates."""
        return self._cpu.compare(dict.fromkeys(piece.member for piece in bucket.pieces))

    def submit(self, bucket: Bucket, step: CpuStep, written: WrittenWeights[Member] | None) -> None:
        """Queue the CPU update of a complete bucket during backward."""
        arrived = self._cpu.arrived()
        members = dict.fromkeys(piece.member for piece in bucket.pieces)
        self._cpu.take(step, {m: m.arrival for m in members if m.arrival is not None})
        self._cpu.submit([bucket], step, self._new_weights, arrived=arrived, last_use=None, written=written)

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
        """Raise the error of a worker that has failed, see `DeadlineWorkers.check`."""
        self._cpu.check()

    @property
    def is_unqueued(self) -> bool:
        """Whether a step has begun that is not queued to its end: whoever waits for weights goes on with it."""
        return self._streamed is not None and self._streamed.is_begun

    def drain(self) -> None:
        """Wait until all CPU updates are done and their copies have read their sources."""
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
        if self._streamed is not None and member in self._streamed:
            self._streamed.finish(for_writing=False)
            yield from self._streamed.parts(member, name)

    def write_streamed(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace the parts of a state that stream by those of `value` (fp32, of the member's shape)."""
        assert self._streamed is not None
        self._streamed.finish(for_writing=True)
        self._streamed.write(member, name, value)

    def follow_weight(self, member: Member) -> None:
        """Set the streamed part of an fp32 parameter's master, which is the parameter, to the parameter."""
        if self._streamed is not None and member in self._streamed:
            self._streamed.refresh_masters([member])

    def note_weight(self, member: Member) -> None:
        """Note that the master is what the weight says now."""
        self._cpu.note_weight(member)

    def written(self, members: Sequence[Member]) -> Iterable[Member]:
        """Return those of `members` that others have written past every counter, see `StateParts`."""
        self._resident.take_over(members)
        compared = self._cpu.compare(members)
        found = set() if compared is None else set(compared.read())
        if self._streamed is not None:
            found.update(self._streamed.written([m for m in members if m in self._streamed]))
        return [member for member in members if member in found]

    def close(self) -> None:
        """Stop the workers and give the memory of both tiers back."""
        streamed = [] if self._streamed is None else [self._streamed.close]
        try:
            undo_all([*streamed, self._cpu.close])
        finally:
            # Closing waits itself, and has said so if the device is lost.
            self._dropped.detach()


def _streamed_share(
    device: Device, algorithm: Algorithm, streaming: Streaming, follows_writes: bool
) -> StreamedShare:
    from reference_impl.optimizers.streamed.share import StreamedShare
    from reference_impl.optimizers.streamed.storage import StateFormat

    return StreamedShare(
        device,
        algorithm,
        chunk_bytes=streaming.chunk_bytes,
        prefetch_bytes=streaming.prefetch_bytes,
        state_format=StateFormat.of(streaming.states, algorithm, device),
        follows_writes=follows_writes,
    )


def _parts(members: Iterable[Member]) -> dict[Member, Part]:
    """Return the streamed elements of each of `members`, and of matrices the resident ones, too."""
    from reference_impl.optimizers.streamed.chunks import Part

    # A parameter that the CPU updates in part is published as one, so its streamed part waits for that.
    return {
        member: Part(
            range(member.resident, member.on_device),
            range(member.resident if member.matrices else 0),
            is_split=member.on_cpu > 0,
        )
        for member in members
        if member.streamed or member.matrices
    }


def _state_bytes(
    sizes: Iterable[tuple[int, int]], device: Device, algorithm: Algorithm, streaming: Streaming
) -> StateBytes:
    from reference_impl.optimizers.streamed.storage import StateFormat

    state_format = StateFormat.of(streaming.states, algorithm, device)
    return state_bytes(sizes, moments=len(algorithm.moments), streams_as=state_format.form)


def _matrix_bytes(
    matrices: Mapping[torch.Tensor, MatrixAlgorithm],
    device: Device,
    algorithm: Algorithm,
    streaming: Streaming,
) -> MatrixBytes | None:
    """Return the bytes of what is updated in matrices, None where nothing is."""
    from reference_impl.optimizers.auto_split import MatrixBytes
    from reference_impl.optimizers.streamed.storage import StateFormat

    if not matrices:
        return None
    form = StateFormat.of(streaming.states, algorithm, device).of_matrices().form
    resident = streamed = 0.0
    for param, formula in matrices.items():
        is_own_master, moments = param.element_size() == 4, len(formula.moments)
        numel = local_numel(param)
        resident += numel * (4 * moments + (0 if is_own_master else 4))
        streamed += numel * form.signed_bytes(moments, is_own_master=is_own_master)
    return MatrixBytes(round(resident), round(streamed))


def _streams_in_part(bucket: Bucket) -> bool:
    return any(piece.member.streamed for piece in bucket.pieces)
