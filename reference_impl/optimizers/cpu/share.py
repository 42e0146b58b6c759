"""The CPU share: gradients in, one update a bucket by deadline, weights out.

`GradientMover` brings a gradient to its bucket, `DeadlineWorkers` runs the bucket's update in the order in which the
next forward needs weights, `Publisher` sends the new weight to the device, and `wait_for` is where its reader waits.
When each may start is decided above. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial

import torch

from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.arena import HostArena
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.checks import written_late
from reference_impl.optimizers.clip_decision import ClipDecision
from reference_impl.optimizers.cpu.buckets import Bucket, BucketMemory, plan_buckets
from reference_impl.optimizers.cpu.gradients import GradientMover
from reference_impl.optimizers.cpu.publish import Publisher
from reference_impl.optimizers.cpu.step import BucketUpdate, CpuStep
from reference_impl.optimizers.cpu.update import BLOCK_ELEMENTS, CpuKernel, Task, cut_tasks, present_part
from reference_impl.optimizers.cpu.workers import DeadlineWorkers, Job, cpu_budget
from reference_impl.optimizers.layout import MASTER, Member, NewWeights, Piece
from reference_impl.optimizers.options import CpuUpdate


class CpuShare:
    """All offloaded pieces of one optimizer, and what moves and updates them.

    The worker threads start at once.

    Args:
        device: where the parameters are.
        algorithm: the formula, run by torch's fused kernel on the CPU.
        options: threads (None for `cpu_budget()`), size of a bucket, whether staging is pinned.
        whole_members: never split a member between buckets.
    """

    def __init__(
        self, device: Device, algorithm: Algorithm, options: CpuUpdate, *, whole_members: bool
    ) -> None:
        self._device = device
        self._kernel = CpuKernel(algorithm)
        self._bucket_elements = options.bucket_elements
        self._whole_members = whole_members
        self._memory = BucketMemory(device, moments=len(algorithm.moments), pinned=options.pinned)
        self._moments = algorithm.moments
        self._numbers = HostArena(device, slab_bytes=2**21)
        self._gradients = GradientMover(device)
        self._publisher = Publisher(device)
        self._workers = DeadlineWorkers(threads=options.threads or cpu_budget())
        self._local = threading.local()
        self._tasks: dict[Bucket, tuple[Task, ...]] = {}
        self._buckets: dict[Piece, Bucket] = {}

    def add(self, members: Sequence[Member], *, total_numel: int) -> None:
        """Make buckets for new members, masters from their parameters. Raises HostMemoryError first of all."""
        plans = plan_buckets(
            members, bucket_elements=self._bucket_elements, whole_members=self._whole_members
        )
        buckets = self._memory.add(plans, total_numel=total_numel)
        for bucket in buckets:
            self._tasks[bucket] = cut_tasks(bucket)
            self._buckets.update(dict.fromkeys(bucket.pieces, bucket))
        self._gradients.add(buckets)
        self._publisher.add(buckets)
        if buckets:
            # A worker that waits for a gradient, or a forward for a weight, is idle meanwhile.
            self._device.latency_sensitive.add(self)
        self.refresh_masters(members)

    @torch.no_grad()
    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of `members` from the parameters as they are, through staging."""
        arrivals: list[tuple[torch.Tensor, torch.Tensor, Event]] = []
        computed = self._device.record()
        for member in members:
            weight = member.flat(member.param_local.detach())
            for piece in member.pieces:
                bucket, place = self._buckets[piece], slice(piece.offset, piece.offset + piece.numel)
                staging = bucket.staging[place]
                event = self._device.copy_out(staging, weight[piece.start : piece.stop], after=[computed])
                arrivals.append((bucket.master[place], staging, event))
        for master, staging, event in arrivals:
            event.synchronize()
            master.copy_(staging)

    def offload(self, member: Member, *, measure: bool) -> Iterator[Bucket]:
        """Start the copy of a gradient, with `measure` its norm too; yields the buckets that it completes."""
        self._gradients.offload(member, measure=measure)
        for piece in member.pieces:
            bucket = self._buckets[piece]
            bucket.missing -= 1
            if bucket.missing == 0:
                yield bucket

    def offload_rest(self, members: Iterable[Member], *, measure: bool) -> list[Member]:
        """Start the copies of those gradients of `members` that no hook has sent off; returns whose.

        Raises RuntimeError when somebody has written a gradient after it had been sent off.
        """
        rest = []
        for member in members:
            if not member.pieces or member.gradient is None:
                continue
            if member.arrival is None:
                rest.append(member)
                for _ in self.offload(member, measure=measure):
                    pass
            elif member.on_device == 0:
                raise written_late(member)
        return rest

    def take_norms(self) -> list[torch.Tensor]:
        """Return the norms of the gradients sent off since the last call."""
        return self._gradients.take_norms()

    def fence(self) -> None:
        """Make the live current stream wait until all gradients in flight have been read."""
        self._gradients.fence()

    def arrived(self) -> Event:
        """Return the event for threads after which all gradients sent off so far are on the host.

        One for all buckets that are ready together: a stream holds few of its kind, see `CudaDevice.record`.
        """
        return self._gradients.arrived()

    def send(self, decision: ClipDecision) -> None:
        """Start a decision's copy to the host, where the workers read it."""
        decision.send(self._device, self._numbers)

    def discard(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that were sent off but will not be used."""
        self._gradients.take_norms()
        for member in members:
            if member.arrival is not None:
                self._device.wait(member.arrival)
                member.arrival = None
        for bucket in self.buckets_of(members):
            bucket.missing = len(bucket.pieces)

    def buckets_of(self, members: Iterable[Member]) -> list[Bucket]:
        """Return the buckets that hold pieces of `members`."""
        return list(dict.fromkeys(self._buckets[piece] for member in members for piece in member.pieces))

    def submit(
        self,
        bucket: Bucket,
        step: CpuStep,
        new_weights: Callable[[Member], Iterable[NewWeights]],
        *,
        offloaded: Set[Member],
        arrived: Event,
        last_use: Event | None,
    ) -> None:
        """Queue a bucket's update behind `arrived`; weights are overwritten behind `last_use`, or each one's gradient.

        Only members whose gradient has been `offloaded` take part: of another the gradient of the step before may
        still be waiting for its update, or that of the next step come before this one has run. `new_weights` yields
        the parts of a member that the device has updated and that go out with the CPU's.
        """
        step.queued.add(bucket)
        present = Counter(piece.member for piece in bucket.pieces if piece.member in offloaded)
        bucket.missing = len(bucket.pieces)
        for member in present:
            if not member.pending:
                self._publisher.expect(member)
        update = BucketUpdate(step, present, len(self._tasks[bucket]), new_weights, last_use)
        self._workers.submit(
            [Job(bucket.deadline, arrived, partial(self._run, task, update)) for task in self._tasks[bucket]]
        )

    def _run(self, task: Task, update: BucketUpdate) -> None:
        """Update one task; whoever finishes a bucket publishes its weights."""
        self._gradients.drain()
        step = update.step
        grad_scale, skip = step.scale_and_skip()
        part = None if skip else present_part(task, update.present)
        if part is not None:
            for member in part.members:
                step.begin(member)
            self._kernel.update(part, step.plan.groups[part.group], self._scratch(), grad_scale)
        if update.finish_task():
            self._finish(update, skip=skip)

    def _finish(self, update: BucketUpdate, *, skip: bool) -> None:
        for member, pieces in update.present.items():
            if update.step.finish(member, pieces):
                arrival, member.arrival = member.arrival, None
                if not skip:
                    after = update.last_use or arrival or REACHED
                    self._publisher.publish(member, update.new_weights(member), after=after)
                self._publisher.release(member)

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of each part of a moment or `master_param` that is here."""
        for piece in member.pieces:
            bucket = self._buckets[piece]
            whole = bucket.master if name == MASTER else bucket.moments[self._moments.index(name)]
            yield piece.start, whole[piece.offset : piece.offset + piece.numel]

    def _scratch(self) -> torch.Tensor:
        """Return the calling worker's own fp32 block, which stays in its cache."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = torch.empty(BLOCK_ELEMENTS)
        scratch: torch.Tensor = self._local.scratch
        return scratch

    def wait_for(self, members: Sequence[Member]) -> None:
        """Make the live current stream wait for the members' new weights; the host only until they are sent."""
        for member in members:
            if member.pending:
                self._workers.wait_until(self._publisher.flag(member))
                self._device.wait(member.published)
                member.pending = False

    def check(self) -> None:
        """Raise what a worker has died of, or that the share is closed."""
        self._workers.check()

    def drain(self) -> None:
        """Wait until all updates are done and their copies have read what they need."""
        self._workers.wait_idle()
        self._gradients.drain()

    def close(self) -> None:
        """Stop the workers and give the host memory back."""
        self._workers.close()
        self._device.latency_sensitive.discard(self)
        # Pieces and members know each other, and a parameter should not have to wait for the garbage collector.
        for piece in self._buckets:
            piece.member.pieces.clear()
        self._memory.close()
        self._numbers.close()
