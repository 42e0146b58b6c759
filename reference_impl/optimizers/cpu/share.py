# SPDX-License-Identifier: Apache-2.0
"""The CPU share: copies gradients in, updates one bucket at a time in deadline order, copies weights out.

`GradientMover` brings a gradient to its bucket, `DeadlineWorkers` runs the bucket's update in the order in which the
next forward needs weights, `Publisher` copies the new weight to the device, and its reader waits in `wait_for`. The
optimizer above decides when each may start. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.absent import is_absent, is_away
from reference_impl.memory.arena import HostArena
from reference_impl.memory.closing import undo_all
from reference_impl.memory.ledger import unseen
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.cpu.buckets import Bucket, BucketMemory, plan_buckets
from reference_impl.optimizers.cpu.publish import Publisher
from reference_impl.optimizers.cpu.step import BucketUpdate, CpuStep
from reference_impl.optimizers.cpu.update import BLOCK_ELEMENTS, CpuKernel, Task, cut_tasks, present_part
from reference_impl.optimizers.cpu.workers import DeadlineWorkers, Job, threads_beside
from reference_impl.optimizers.gradients.clip_decision import ClipDecision
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.layout import MASTER, Member, NewWeights, Piece
from reference_impl.optimizers.options import CpuUpdate
from reference_impl.optimizers.writes.awaited import new_weights_are_made
from reference_impl.optimizers.writes.sums import WeightSums, WrittenWeights


class CpuShare:
    """All pieces of one optimizer that the CPU updates, with their buffers, copies and worker threads.

    The worker threads start with the first piece.

    Args:
        device: where the parameters are.
        algorithm: the formula, run by torch's fused kernel on the CPU.
        options: threads (None for `threads_beside`), size of a bucket, whether staging is pinned.
        whole_members: never split a member between buckets.
        gradients: brings gradients to the host, also another share's if they leave with these.
        follows_writes: masters follow weights written past every counter, see `compare`.
    """

    def __init__(
        self,
        device: Device,
        algorithm: Algorithm,
        options: CpuUpdate,
        *,
        whole_members: bool,
        gradients: GradientMover,
        follows_writes: bool = True,
    ) -> None:
        self._device = device
        self._kernel = CpuKernel(algorithm)
        self._bucket_elements = options.bucket_elements
        self._whole_members = whole_members
        self._memory = BucketMemory(device, moments=len(algorithm.moments), pinned=options.pinned)
        self._moments = algorithm.moments
        self._numbers = HostArena(device, slab_bytes=2**21)
        self._gradients = gradients
        adds_up = follows_writes and device.has_kernels
        self._sums: WeightSums[Member] | None = WeightSums(device, self._numbers) if adds_up else None
        self._publisher = Publisher(device, note=partial(_note, self._sums))
        self._threads = options.threads
        self._scratch: list[torch.Tensor] = []
        self._local = threading.local()
        self._started: DeadlineWorkers | None = None
        self._tasks: dict[Bucket, tuple[Task, ...]] = {}
        self._buckets: dict[Piece, Bucket] = {}

    def __contains__(self, member: Member) -> bool:
        """Return whether a piece of `member` is here."""
        return bool(member.pieces) and member.pieces[0] in self._buckets

    @property
    def _workers(self) -> DeadlineWorkers:
        assert self._started is not None
        return self._started

    def _start(self, streamed_bytes: float) -> None:
        """Start the threads, unless they run: as many as are done while so many bytes stream in for each element."""
        if self._started is None:
            threads = self._threads or threads_beside(streamed_bytes)
            # An fp32 block for each worker, taken with its first task: it stays in the cache of its core.
            with unseen():
                self._scratch = [torch.empty(BLOCK_ELEMENTS) for _ in range(threads)]
            self._started = DeadlineWorkers(threads=threads)

    def host_bytes(self, members: Iterable[Member]) -> tuple[int, int]:
        """Return the bytes of the host that `add` takes for `members`: staging buffers, and masters with moments."""
        elements = [(member.on_cpu, member.dtype.itemsize) for member in members]
        staging = sum(numel * size for numel, size in elements)
        return staging, sum(4 * (1 + len(self._moments)) * numel for numel, _ in elements)

    def add(self, members: Sequence[Member], *, streamed_bytes: float) -> None:
        """Make buckets for new members, masters from their weights; states of `streamed_bytes` stream in meanwhile.

        Raises HostMemoryError, and RuntimeError where threads cannot start; then nothing is here that `forget` does not
        drop.
        """
        plans = plan_buckets(
            members, bucket_elements=self._bucket_elements, whole_members=self._whole_members
        )
        if plans:
            self._start(streamed_bytes / sum(member.on_cpu for member in members))
        buckets = self._memory.add(plans)
        for bucket in buckets:
            self._tasks[bucket] = cut_tasks(bucket)
            self._buckets.update(dict.fromkeys(bucket.pieces, bucket))
        for bucket in buckets:
            self._gradients.add({p: bucket.staging[p.offset : p.offset + p.numel] for p in bucket.pieces})
        self._publisher.add(buckets)
        if buckets:
            # A worker that waits for a gradient, or a forward for a weight, is idle meanwhile.
            self._device.latency_sensitive.add(self)
        self.refresh_masters(members)
        if self._sums is not None:
            self._sums.add(_own_weights(members))

    def forget(self, members: Iterable[Member]) -> None:
        """Drop the buckets of `members`, not yet used by a step; each bucket is theirs alone."""
        members = list(members)
        if self._sums is not None:
            self._sums.forget(members)
        for member in members:
            for piece in member.pieces:
                bucket = self._buckets.pop(piece, None)
                self._gradients.forget(piece)
                self._publisher.forget(piece)
                # Once for all its pieces.
                if bucket is not None and self._tasks.pop(bucket, None) is not None:
                    self._memory.give_back(bucket)
            member.pieces.clear()

    @torch.no_grad()
    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of `members` from the parameters as they are, through staging if they are on the device."""
        arrivals: list[tuple[torch.Tensor, torch.Tensor, Event]] = []
        computed = self._device.record()
        members = list(members)
        for member in members:
            weight = member.flat(member.weight)
            for piece in member.pieces:
                bucket, place = self._buckets[piece], slice(piece.offset, piece.offset + piece.numel)
                master, part = bucket.master[place], weight[piece.start : piece.stop]
                if member.home is not None or member.arrival is not None:
                    # At home it is on the host, and a gradient that waits has staging.
                    master.copy_(part)
                    continue
                staging = bucket.staging[place]
                event = self._device.copy_out(staging, part, after=[computed])
                arrivals.append((master, staging, event))
        for master, staging, event in arrivals:
            event.synchronize()
            master.copy_(staging)
        for member in members:
            self.note_weight(member)

    def note_weight(self, member: Member) -> None:
        """Note, on the live current stream, that the weight is its master rounded: a later write is seen."""
        _note(self._sums, member)

    def compare(self, members: Iterable[Member]) -> WrittenWeights[Member] | None:
        """Find, on the live current stream, the weights of `members` written since they were noted.

        Others are passed over. It must not run beside their updates, and allocates.
        """
        ours = _own_weights(member for member in members if member in self)
        return None if self._sums is None else self._sums.compare(ours)

    def take(self, step: CpuStep, arrivals: Mapping[Member, Event]) -> None:
        """Let `step` own the gradients whose copies end at `arrivals`: readers of their weights wait from now on."""
        step.arrivals.update(arrivals)
        for member in arrivals:
            self._publisher.expect(member)
        self._gradients.let_go(arrivals)

    def arrived(self) -> Event:
        """Return the event for threads after which all gradients sent off so far are on the host.

        One for all buckets that are ready together: a stream holds few of its kind, see `CudaDevice.record`.
        """
        return self._gradients.arrived()

    def send(self, decision: ClipDecision, factors: Sequence[torch.Tensor | float]) -> None:
        """Start the copies of a decision and of the gradients' `factors` to the host, for the workers."""
        decision.send(self._device, self._numbers, factors)

    def buckets_of(self, members: Iterable[Member]) -> list[Bucket]:
        """Return the buckets that hold pieces of `members`."""
        return list(dict.fromkeys(self._buckets[piece] for member in members for piece in member.pieces))

    def submit(
        self,
        buckets: Sequence[Bucket],
        step: CpuStep,
        new_weights: Callable[[Member], Iterable[NewWeights]],
        *,
        arrived: Event,
        last_use: Event | None,
        written: WrittenWeights[Member] | None,
    ) -> None:
        """Queue the updates of `buckets` behind `arrived`, all or none.

        Weights are overwritten behind `last_use`, or each one's gradient. Only members with a gradient in this step
        take part: staging may hold another member's next gradient. `new_weights` yields the parts of a member updated
        on the device and published with the CPU's. Masters take over weights that were `written` by others. The
        workers wake up once: a bucket at a time, they took Python's lock from a caller who had not queued the next.
        """
        jobs = []
        for bucket in buckets:
            present = Counter(piece.member for piece in bucket.pieces if piece.member in step.arrivals)
            tasks = self._tasks[bucket]
            update = BucketUpdate(step, present, len(tasks), new_weights, last_use, written)
            jobs += [Job(bucket.deadline, arrived, partial(self.run_task, task, update)) for task in tasks]
        self._workers.submit(jobs)
        step.queued.update(buckets)

    @new_weights_are_made()
    def run_task(self, task: Task, update: BucketUpdate) -> None:
        """Update a task's members on the calling thread, then send the new weights that are complete with it."""
        self._gradients.drain()
        step = update.step
        grad_scale, skip = step.scale_and_skip()
        part = None if skip else present_part(task, update.present)
        if part is not None:
            self._take_over(part, update.written())
            step.count(part.members)
            # A thread has a mode of its own, copied from the thread that started it.
            torch.set_flush_denormal(step.plan.flushes_denormals)
            for each, factors in _by_factors(part, step):
                group = step.plan.groups[each.group]
                self._kernel.update(each, group, self._own_scratch(), grad_scale, factors)
        for member in update.finish():
            if not skip:
                after = update.last_use or step.arrivals[member]
                self._publisher.publish(member, update.new_weights(member), after=after)
            self._publisher.release(member)

    def _take_over(self, task: Task, written: Container[Member]) -> None:
        """Set the task's masters to weights `written` by other code, wherever they do not round to them."""
        for piece, begin, end in (span for block in task.blocks for span in block):
            if piece.member in written:
                start = piece.start + begin - piece.offset
                weight = piece.member.flat(piece.member.weight)[start : start + end - begin]
                with unseen():
                    on_host = torch.empty(weight.shape, dtype=weight.dtype)
                    self._device.copy_out(on_host, weight, after=[], for_threads=True).synchronize()
                    master = task.bucket.master[begin:end]
                    is_rounded = master.to(weight.dtype) == on_host
                    master.copy_(torch.where(is_rounded, master, on_host.to(master.dtype)))

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of each part of a moment or `master_param` that is here."""
        for piece in member.pieces:
            bucket = self._buckets[piece]
            whole = bucket.master if name == MASTER else bucket.moments[self._moments.index(name)]
            yield piece.start, whole[piece.offset : piece.offset + piece.numel]

    def _own_scratch(self) -> torch.Tensor:
        """Return the calling worker's own fp32 block."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = self._scratch.pop()
        scratch: torch.Tensor = self._local.scratch
        return scratch

    def wait_for(self, members: Sequence[Member]) -> None:
        """Make the live current stream wait for the members' new weights; the host only until they are sent."""
        for member in members:
            if member.pending:
                self._workers.wait_until(self._publisher.flag(member))
                self._publisher.wait(member)
                member.has_arrived()

    def check(self) -> None:
        """Raise the error of a failed worker, see `DeadlineWorkers.check`, or that the share is closed."""
        if self._started is not None:
            self._started.check()

    def drain(self) -> None:
        """Wait until all updates are done and their copies have read their sources."""
        if self._started is not None:
            self._started.wait_idle()
        self._gradients.drain()

    def close(self) -> None:
        """Stop the workers and give the host memory back."""
        workers = [] if self._started is None else [self._started.close]
        undo_all([self._numbers.close, self._memory.close, self._forget_pieces, *workers])

    def _forget_pieces(self) -> None:
        self._device.latency_sensitive.discard(self)
        # Pieces and members know each other, and a parameter should not have to wait for the garbage collector.
        for piece in self._buckets:
            piece.member.pieces.clear()


def _note(sums: WeightSums[Member] | None, member: Member) -> None:
    if sums is not None:
        sums.note(_own_weights([member]))


def _own_weights(members: Iterable[Member]) -> dict[Member, torch.Tensor]:
    """Return the elements of each weight updated on the CPU, without weights that are away from the device."""
    return {
        member: member.flat(member.weight)[member.on_device :]
        for member in members
        if member.pieces
        and member.home is None
        and not (is_absent(member.param_local) or is_away(member.param_local))
    }


def _by_factors(task: Task, step: CpuStep) -> Iterator[tuple[Task, tuple[float, ...]]]:
    """Yield parts of a task, and the factors of the gradients of each."""
    members: defaultdict[tuple[float, ...], set[Member]] = defaultdict(set)
    for member in task.members:
        members[step.factors(member)].add(member)
    for factors, having in members.items():
        part = present_part(task, having)
        assert part is not None
        yield part, factors
