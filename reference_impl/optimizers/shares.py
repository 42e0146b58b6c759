"""The three shares of an optimizer's state side by side: resident, streamed and updated on the CPU.

A member says which of its elements belong to which. This is where one step sets all three to work, where a reader
waits for a whole parameter, and where the parts of a split parameter are brought together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal

import torch

from reference_impl.device import REACHED, Device
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.auto_split import Profile, chosen_split
from reference_impl.optimizers.checks import check_used_in_time
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.cpu.gradients import gradient_of
from reference_impl.optimizers.cpu.publish import Fresh
from reference_impl.optimizers.cpu.share import HostShare
from reference_impl.optimizers.cpu.workers import cpu_budget
from reference_impl.optimizers.layout import Member, local_numel, members_of
from reference_impl.optimizers.resident import ResidentShare
from reference_impl.optimizers.rounds import Round
from reference_impl.optimizers.split import state_bytes
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.storage import StateFormat


class Shares:
    """All state of one optimizer, and what updates it."""

    def __init__(
        self,
        device: Device,
        algorithm: Algorithm,
        params: Sequence[torch.Tensor],
        *,
        split: tuple[float, float, float] | Literal["auto"],
        device_budget_bytes: int | None,
        host_budget_bytes: int | None,
        profile: Profile | None,
        chunk_bytes: int,
        prefetch_bytes: int,
        state_format: StateFormat,
        bucket_elements: int,
        whole_members: bool,
        pinned: bool,
        threads: int | None,
    ) -> None:
        """Choose the split for `params` and start the CPU share's threads, by default as many as this rank may use.

        Holds no member yet. Raises ValueError and HostMemoryError as `chosen_split` and `StateFormat.check` do.
        """
        self._device = device
        self.resident = ResidentShare(algorithm)
        self.streamed = StreamedShare(
            device,
            algorithm,
            chunk_bytes=chunk_bytes,
            prefetch_bytes=prefetch_bytes,
            state_format=state_format,
        )
        sizes = [(local_numel(param), param.element_size()) for param in params]
        each = state_bytes(
            sizes,
            moments=len(algorithm.moments),
            moment_bytes=state_format.moments_dtype.itemsize,
            hi_lo_masters=state_format.hi_lo_masters,
        )
        # So many elements may come in during backward: those that the next forward needs first.
        self._ahead = int(prefetch_bytes / max(each.streamed, 1))
        self.split = chosen_split(
            split,
            sum(numel for numel, _ in sizes),
            each,
            device,
            profile=profile,
            ring_bytes=self.streamed.ring_bytes,
            device_budget_bytes=device_budget_bytes,
            host_budget_bytes=host_budget_bytes,
            # How much does come in, the length of a backward says, which nobody knows yet.
            hidden_bytes=prefetch_bytes // 2,
        )
        self.host = HostShare(
            device,
            algorithm,
            bucket_elements=bucket_elements,
            whole_members=whole_members,
            pinned=pinned,
            threads=threads or cpu_budget(),
        )
        self._members: list[Member] = []

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
            streamed=self.split.streamed_of_leaving,
            ahead=max(self._ahead - sum(member.streamed for member in self._members), 0),
            offload=offload,
        )

    def add(self, members: Sequence[Member], *, total_numel: int) -> None:
        """Make the state of new members, masters from their parameters. Raises HostMemoryError and ValueError."""
        # A parameter that the CPU updates in part comes home in one piece, so its streamed part waits for that.
        self.streamed.add(
            {
                member: Part(range(member.resident, member.on_device), is_split=member.offloaded > 0)
                for member in members
                if member.streamed
            }
        )
        self.host.add(members, total_numel=total_numel)
        for member in members:
            if member.resident or not (member.streamed or member.offloaded):
                self.resident.add(member)
        self._members.extend(members)

    def norms(self) -> list[torch.Tensor]:
        """Return the fp32 norms of all gradients: of those that left since the last call, and of those still here."""
        return self.host.take_norms() + [
            torch.linalg.vector_norm(gradient_of(member), dtype=torch.float32)
            for member in self._members
            if not member.pieces and member.gradient is not None
        ]

    def streamed_gradients(self) -> dict[Member, torch.Tensor]:
        """Return the gradients of members that stream; RuntimeError when one was computed with an old weight."""
        found = {
            member: gradient_of(member)
            for member in self._members
            if member.streamed and member.gradient is not None
        }
        check_used_in_time(found)
        return found

    def update(
        self,
        round_: Round,
        left: Set[Member],
        streamed: Mapping[Member, torch.Tensor],
        *,
        take_gradients: bool,
    ) -> None:
        """Queue one step: the CPU share of members that `left` by deadline, what streams, and what stays.

        `streamed` are what `streamed_gradients` returned. With `take_gradients` they are taken off the parameters:
        whoever writes into them later does not know that the update still reads them.
        """
        verdict, groups = round_.verdict, round_.groups
        scale = None if verdict is None else verdict.grad_scale
        found = None if verdict is None else verdict.found_inf
        buckets = [bucket for bucket in self.host.buckets_of(left) if bucket not in round_.submitted]
        buckets.sort(key=lambda bucket: bucket.deadline)
        if verdict is not None and buckets:
            self.host.send(verdict)
        self.resident.update(groups, split=True, grad_scale=scale, found_inf=found)
        last_use = self._device.record()
        arrived = self.host.arrived() if buckets else REACHED
        for bucket in buckets:
            if not _is_staged(bucket):
                self.host.submit(bucket, round_, self._fresh, left=left, arrived=arrived, last_use=last_use)
        self.resident.update(groups, split=False, grad_scale=scale, found_inf=found)
        self.streamed.update(streamed, verdict, groups)
        for bucket in buckets:
            if _is_staged(bucket):
                self.host.submit(bucket, round_, self._fresh, left=left, arrived=arrived, last_use=last_use)
        for member in streamed:
            member.pending = True
            if take_gradients:
                member.param.grad = None

    def submit(self, bucket: Bucket, round_: Round) -> None:
        """Queue the CPU update of a complete bucket during backward; the device may update no part of its members."""
        left = {piece.member for piece in bucket.pieces}
        self.host.submit(bucket, round_, self._fresh, left=left, arrived=self.host.arrived(), last_use=None)

    def _fresh(self, member: Member) -> Iterator[Fresh]:
        """Yield the new weights of a member that the device has and its parameter has not."""
        state = self.resident.states.get(member)
        if state is not None and state.master is not state.weight:
            yield Fresh(state.weight, state.master, REACHED)
        staged = self.streamed.split_weights(member)
        if staged is not None:
            start, weights, event = staged
            whole = member.flat(member.param_local.detach())
            yield Fresh(whole[start : start + weights.numel()], weights, event)

    def wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for the members' new weights; the host only until they are sent."""
        pending = [member for member in members if member.pending]
        # The device gets its work before the host blocks for the CPU's.
        self.streamed.wait_for(pending)
        self.host.wait_for([member for member in pending if member.pieces])
        for member in pending:
            member.pending = False

    def drain(self) -> None:
        """Wait until all CPU updates are done and their copies have read what they need."""
        self.host.drain()

    @torch.no_grad()
    def refresh_masters(self, members: Sequence[Member]) -> None:
        """Make the masters of `members` from the parameters as they are."""
        self.host.refresh_masters(members)
        self.streamed.refresh_masters([member for member in members if member in self.streamed])
        self.resident.refresh_masters(members)

    def close(self) -> None:
        """Stop the workers and give the memory of both tiers back."""
        self.host.close()
        self.streamed.close()


def _is_staged(bucket: Bucket) -> bool:
    return any(piece.member.streamed for piece in bucket.pieces)
