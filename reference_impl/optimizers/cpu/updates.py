"""The parameters of streamed trained layers that the CPU updates, beside those whose states stream.

Their gradients leave with the others of their block, their masters and moments are in ordinary memory, and a new weight
goes to its home. A block that has been copied to the device before gets it from there, before its forward.

Explained in docs/larger-than-gpu.md, "Where states are updated".
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.weight_home import refuse_update
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.clip_decision import ClipDecision
from reference_impl.optimizers.cpu.gradient_mover import GradientMover
from reference_impl.optimizers.cpu.share import CpuShare
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.gradients import factors_of
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.options import CpuUpdate
from reference_impl.optimizers.step import StepPlan, snapshot
from reference_impl.optimizers.writes.sums import WrittenWeights


class CpuUpdates:
    """A `CpuShare` of whole parameters, whose steps are prepared and begun; none, and no threads, for none.

    Args:
        device: where the weights visit.
        algorithm: the formula.
        options: threads and buckets.
        gradients: what brings the gradients of all parameters to the host.
    """

    def __init__(
        self, device: Device, algorithm: Algorithm, options: CpuUpdate, gradients: GradientMover
    ) -> None:
        self._device = device
        self._algorithm, self._options, self._gradients = algorithm, options, gradients
        self._open_share: CpuShare | None = None
        self._members: set[Member] = set()
        self._prepared: tuple[CpuStep, Mapping[Member, Event], WrittenWeights[Member] | None] | None = None

    def __contains__(self, member: Member) -> bool:
        """Return whether the CPU updates `member`."""
        return member in self._members

    @property
    def _share(self) -> CpuShare:
        assert self._open_share is not None
        return self._open_share

    def add(self, members: Sequence[Member], *, streamed_bytes: float) -> None:
        """Make the state of new members, masters from their weights. Raises HostMemoryError.

        With the first, threads start: as many as are done while so many bytes of states stream in.
        """
        if not members:
            return
        if self._open_share is None:
            self._open_share = CpuShare(
                self._device,
                self._algorithm,
                self._options,
                whole_members=False,
                streamed_bytes=streamed_bytes / sum(member.param.numel() for member in members),
                gradients=self._gradients,
            )
            # Copies in flight use buffers that die with this object.
            self._dropped = weakref.finalize(self, self._device.synchronize)
            self._dropped.atexit = False
        self._share.add(members)
        self._members.update(members)

    def prepare(
        self,
        arrivals: Mapping[Member, Event],
        decision: ClipDecision,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Prepare a step of the members here whose gradients come at `arrivals`; changes nothing.

        Raises RuntimeError where weights are lent. The decision is what keeps workers from homes that kernels before
        the step still read on the device: they read it once all of these have ended.
        """
        self._prepared = None
        ours = {member: arrival for member, arrival in arrivals.items() if member in self._members}
        for member in ours:
            if member.home is not None and member.home.is_lent:
                raise refuse_update(member.home.block_index)
        if ours:
            factors, indices = factors_of(ours)
            self._share.send(decision, factors)
            step = CpuStep(StepPlan(snapshot(groups), decision), indices)
            self._prepared = step, ours, self._share.compare(ours)

    def begin(self) -> None:
        """Begin the prepared step, which owns its gradients from here on, and hand it to the workers."""
        if self._prepared is None:
            return
        (step, arrivals, written), self._prepared = self._prepared, None
        self._share.take(step, arrivals)
        self._share.submit(
            sorted(self._share.buckets_of(arrivals), key=lambda bucket: bucket.deadline),
            step,
            lambda _: (),
            arrived=self._share.arrived(),
            last_use=self._device.record(),
            written=written,
        )

    def wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for new weights; the host waits until they are computed."""
        ours = [member for member in members if member in self._members]
        if ours:
            self._share.wait_for(ours)

    def finish(self) -> None:
        """Make the live current stream wait for all new weights, and block until the workers are done."""
        self.wait_for(self._members)
        if self._open_share is not None:
            self._open_share.drain()

    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of those of `members` that are here from their weights as they are."""
        ours = [member for member in members if member in self._members]
        if ours:
            self._share.refresh_masters(ours)

    def note_weight(self, member: Member) -> None:
        """Note that the master is what the weight says now."""
        if member in self._members:
            self._share.note_weight(member)

    def written(self, members: Iterable[Member]) -> Iterable[Member]:
        """Return those of `members` that are here and that others have written; waits for the device."""
        ours = [member for member in members if member in self._members]
        compared = self._share.compare(ours) if ours else None
        return () if compared is None else compared.read()

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of each part of a moment or `master_param`."""
        return self._share.parts(member, name)

    def close(self) -> None:
        """Stop the workers and give the host memory back."""
        if self._open_share is not None:
            try:
                self._open_share.close()
            finally:
                self._dropped.detach()
