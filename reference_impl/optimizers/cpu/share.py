"""The CPU share: gradients in, one update a bucket by deadline, weights out.

This is the circle of the package: `GradientMover` brings a gradient to its bucket, `DeadlineWorkers` runs the
bucket's update in the order in which the next forward needs weights, `Publisher` sends the weight home, and
`wait_for` is where its reader waits. When each may start is `hybrid`'s decision.
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
from reference_impl.optimizers.clip_decision import Verdict
from reference_impl.optimizers.cpu.buckets import Bucket, HostState
from reference_impl.optimizers.cpu.gradients import GradientMover
from reference_impl.optimizers.cpu.publish import Arrivals, Fresh, Publisher
from reference_impl.optimizers.cpu.update import BLOCK_ELEMENTS, CpuKernel, Task, cut_tasks, present_part
from reference_impl.optimizers.cpu.workers import DeadlineWorkers, Job
from reference_impl.optimizers.layout import Member, Piece, plan_buckets
from reference_impl.optimizers.rounds import Round


class _BucketUpdate:
    """One bucket in one round: what its tasks share, and how many are still to do."""

    __slots__ = ("_lock", "_tasks", "bucket", "fresh", "last_use", "present", "round")

    def __init__(
        self,
        bucket: Bucket,
        round_: Round,
        fresh: Callable[[Member], Iterable[Fresh]],
        last_use: Event | None,
        present: Counter[Member],
        tasks: int,
    ) -> None:
        self.bucket = bucket
        self.round = round_
        self.fresh = fresh
        self.last_use = last_use
        self.present = present
        self._tasks = tasks
        self._lock = threading.Lock()

    def finish_task(self) -> bool:
        """Count a task; return whether it was the last."""
        with self._lock:
            self._tasks -= 1
            return self._tasks == 0


class HostShare:
    """All offloaded pieces of one optimizer, and what moves and updates them."""

    def __init__(
        self,
        device: Device,
        algorithm: Algorithm,
        *,
        bucket_elements: int,
        whole_members: bool,
        pinned: bool,
        threads: int,
    ) -> None:
        """Start the worker threads; hold no bucket yet."""
        self._device = device
        self._kernel = CpuKernel(algorithm)
        self._bucket_elements = bucket_elements
        self._whole_members = whole_members
        self._host = HostState(device, moments=len(algorithm.moments), pinned=pinned)
        self._numbers = HostArena(device, slab_bytes=2**21)
        self._gradients = GradientMover(device)
        self._publisher = Publisher(device)
        self._arrivals = Arrivals()
        self._workers = DeadlineWorkers(threads=threads)
        self._local = threading.local()
        self._tasks: dict[Bucket, tuple[Task, ...]] = {}
        self.homes: dict[Piece, Bucket] = {}

    def add(self, members: Sequence[Member], *, total_numel: int) -> None:
        """Make buckets for new members, masters from their parameters. Raises HostMemoryError first of all."""
        plans = plan_buckets(
            members, bucket_elements=self._bucket_elements, whole_members=self._whole_members
        )
        buckets = self._host.add(plans, total_numel=total_numel)
        for bucket in buckets:
            self._tasks[bucket] = cut_tasks(bucket)
            self.homes.update(dict.fromkeys(bucket.pieces, bucket))
        self._gradients.add(buckets)
        self._publisher.add(buckets)
        if buckets:
            # A worker that waits for a gradient, or a forward for a weight, is idle meanwhile.
            self._device.latency_sensitive.add(self)
        self.refresh_masters(members)

    @torch.no_grad()
    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of `members` from the parameters as they are, through the wire."""
        arrivals: list[tuple[torch.Tensor, torch.Tensor, Event]] = []
        computed = self._device.record()
        for member in members:
            weight = member.flat(member.param_local.detach())
            for piece in member.pieces:
                bucket, place = self.homes[piece], slice(piece.offset, piece.offset + piece.numel)
                wire = bucket.wire[place]
                event = self._device.copy_out(wire, weight[piece.start : piece.stop], after=[computed])
                arrivals.append((bucket.master[place], wire, event))
        for master, wire, event in arrivals:
            event.synchronize()
            master.copy_(wire)

    def leave(self, member: Member, *, measure: bool) -> Iterator[Bucket]:
        """Send a gradient off; yields the buckets that it completes."""
        self._gradients.leave(member, measure=measure)
        for piece in member.pieces:
            bucket = self.homes[piece]
            bucket.missing -= 1
            if bucket.missing == 0:
                yield bucket

    def leave_rest(self, members: Iterable[Member], *, measure: bool) -> list[Member]:
        """Send off the gradients of `members` that no hook has sent; returns whose.

        Raises RuntimeError when somebody has written a gradient after it had left.
        """
        rest = []
        for member in members:
            if not member.pieces or member.gradient is None:
                continue
            if member.arrival is None:
                rest.append(member)
                for _ in self.leave(member, measure=measure):
                    pass
            elif member.on_device == 0:
                raise written_late(member)
        return rest

    def take_norms(self) -> list[torch.Tensor]:
        """Return the norms of the gradients that left since the last call."""
        return self._gradients.take_norms()

    def fence(self) -> None:
        """Make the live current stream wait until all gradients that left have been read."""
        self._gradients.fence()

    def arrived(self) -> Event:
        """Return the event for threads after which all gradients that left so far are on the host.

        One for all buckets that are ready together: a stream holds few of its kind, see `CudaDevice.record`.
        """
        return self._gradients.arrived()

    def send(self, verdict: Verdict) -> None:
        """Bring a verdict to the workers."""
        verdict.send(self._device, self._numbers)

    def discard(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that left but will not be used."""
        self._gradients.take_norms()
        for member in members:
            if member.arrival is not None:
                self._device.wait(member.arrival)
                member.arrival = None
        for bucket in self.buckets_of(members):
            bucket.missing = len(bucket.pieces)

    def buckets_of(self, members: Iterable[Member]) -> list[Bucket]:
        """Return the buckets that hold pieces of `members`."""
        return list(dict.fromkeys(self.homes[piece] for member in members for piece in member.pieces))

    def submit(
        self,
        bucket: Bucket,
        round_: Round,
        fresh: Callable[[Member], Iterable[Fresh]],
        *,
        left: Set[Member],
        arrived: Event,
        last_use: Event | None,
    ) -> None:
        """Queue a bucket's update behind `arrived`; weights are overwritten behind `last_use`, or each one's gradient.

        Only members that `left` take part: of another the gradient of the step before may still be waiting for its
        update, or that of the next step come before this one has run. `fresh` yields what else of a member comes
        home with it.
        """
        present = Counter(piece.member for piece in bucket.pieces if piece.member in left)
        bucket.missing = len(bucket.pieces)
        for member in present:
            if not member.pending:
                self._arrivals.expect(member)
        update = _BucketUpdate(bucket, round_, fresh, last_use, present, len(self._tasks[bucket]))
        self._workers.submit(
            [Job(bucket.deadline, arrived, partial(self._run, task, update)) for task in self._tasks[bucket]]
        )

    def _run(self, task: Task, update: _BucketUpdate) -> None:
        """Update one task; whoever finishes a bucket sends its weights home."""
        self._gradients.drain()
        grad_scale, skip = update.round.decide()
        part = None if skip else present_part(task, update.present)
        if part is not None:
            for member in part.members:
                update.round.begin(member)
            self._kernel.update(part, update.round.groups[part.group], self._scratch(), grad_scale)
        if update.finish_task():
            self._finish(update, skip=skip)

    def _finish(self, update: _BucketUpdate, *, skip: bool) -> None:
        for member, pieces in update.present.items():
            if update.round.finish(member, pieces):
                arrival, member.arrival = member.arrival, None
                if not skip:
                    after = update.last_use or arrival or REACHED
                    self._publisher.publish(member, update.fresh(member), after=after)
                self._arrivals.arrived(member)

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
                self._workers.wait_until(self._arrivals.flag(member))
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
        for piece in self.homes:
            piece.member.pieces.clear()
        self._host.close()
        self._numbers.close()
