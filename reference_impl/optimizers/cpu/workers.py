# SPDX-License-Identifier: Apache-2.0
"""Runs jobs on a few threads in the order of their deadlines.

A job is due when the next forward needs its result. Of the jobs with arrived gradients, the one with the earliest
deadline runs first: that hides the most work behind forward and backward. The threads are the optimizer's own and each
computes on one core. So `OMP_NUM_THREADS=1`, which torchrun sets, does not slow them, and the caller's thread setting
is not changed.

All that a job needs was allocated before it was submitted. So a failed job has lost its weights: all work stops, and
every call of the caller raises the job's error. Explained in docs/optimizer-offloading.md, "Timeline of a step".
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from reference_impl.device import Event
from reference_impl.memory.cores import leave_cores_to, own_cores
from reference_impl.memory.interrupts import SLICE_S, UninterruptedCondition, wait_uninterrupted
from reference_impl.memory.worker import start
from reference_impl.optimizers.step import WorkLostError, is_lasting

# Bytes of states that stream in while one thread updates one element: 0.4e9 elements a second and 50 GB/s (one NVIDIA
# H200, 16 cores, PCIe 5), and a quarter more, so that the threads are done first.
_BYTES_BESIDE_AN_UPDATE = 160


@dataclass(frozen=True, slots=True)
class Job:
    """`run` may start once `arrival` is reached; `deadline` is smallest for the weights that are needed first."""

    deadline: int
    arrival: Event
    run: Callable[[], None]


def cpu_budget() -> int:
    """Return how many update threads this process may run: this rank's share of the node's cores, less two.

    The cores that are left drive the GPU.
    """
    return max(own_cores() - 2, 1)


def threads_beside(streamed_bytes: float) -> int:
    """Return how many threads should update while `streamed_bytes` of states stream in for each element of theirs.

    Enough threads to be done when the streamed states have come, and at least a third of this rank's cores. More would
    take memory bandwidth from the copies, and time from the thread that launches kernels: with 14 a step took 3 to 12 %
    longer than with 5, and at times twice as long (one NVIDIA H200, 16 cores; docs/optimizer-offloading.md, "Update
    threads").
    """
    if not streamed_bytes:
        return cpu_budget()
    return min(max(own_cores() // 3, math.ceil(_BYTES_BESIDE_AN_UPDATE / streamed_bytes)), cpu_budget())


class _Queue:
    """The queue that the threads share. They hold it, and not its owner, who may be collected while they sleep."""

    def __init__(self) -> None:
        self.changed = UninterruptedCondition()
        self.waiting: list[Job] = []
        self.running = 0
        self.closed = False

    def put(self, jobs: Sequence[Job]) -> None:
        with self.changed:
            self.waiting = sorted([*self.waiting, *jobs], key=lambda job: job.deadline)
            self.changed.notify(len(jobs))

    def take(self) -> Job | None:
        """Wait for a job and claim the most urgent one that has arrived; None when the threads should end."""
        with self.changed:
            while not (self.waiting or self.closed):
                self.changed.wait()
            if not self.waiting:
                return None
            self.running += 1
            try:
                return self.waiting.pop(self._first_arrived())
            except BaseException:
                # The device is gone: the job's thread finds out.
                return self.waiting.pop(0)

    def _first_arrived(self) -> int:
        """Return the place of the most urgent job that has arrived, 0 when none has.

        Each event is asked once. All jobs of a clipped step share one event, and threads that query it in turn keep
        the caller from Python's lock: 5 ms a step (one NVIDIA H200, 16 cores, 1.4e9 parameters).
        """
        late: set[int] = set()
        for index, job in enumerate(self.waiting):
            if id(job.arrival) not in late:
                if job.arrival.query():
                    return index
                late.add(id(job.arrival))
        return 0

    def finish(self) -> None:
        with self.changed:
            self.running -= 1
            self.changed.notify_all()

    def close(self, *, drops_jobs: bool = False) -> None:
        with self.changed:
            self.closed = True
            if drops_jobs:
                self.waiting.clear()
            self.changed.notify_all()

    @property
    def cores_in_use(self) -> int:
        """How many threads run a job, or wait for its gradient: copies within host memory leave them their cores."""
        return self.running

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)


class DeadlineWorkers:
    """`threads` threads and one queue."""

    def __init__(self, *, threads: int) -> None:
        self._queue = _Queue()
        # The error of a job, or of a thread that has died. The threads do not hold it: its frames hold this object.
        self.error: BaseException | None = None
        callers_threads = torch.get_num_threads()
        ready: SimpleQueue[None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_work, args=(weakref.ref(self), self._queue, ready), daemon=True, name="offload-update"
            )
            for _ in range(threads)
        ]
        try:
            for thread in self._threads:
                start(thread)
            for _ in self._threads:
                self._wait_started(ready)
            weakref.finalize(self, self._queue.close).atexit = False
            _open.add(self)
            leave_cores_to(self._queue)
        except BaseException:
            # Threads that have been started end again.
            self._queue.close()
            raise
        # A thread's own setting also becomes the default of threads born later: put that back.
        torch.set_num_threads(callers_threads)

    def _wait_started(self, ready: SimpleQueue[None]) -> None:
        while True:
            try:
                return ready.get(timeout=SLICE_S)
            except Empty:
                if not all(thread.is_alive() for thread in self._threads):
                    raise RuntimeError(
                        "an update thread of the optimizer's has not started; expected memory for it; try fewer threads"
                    ) from self.error

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none; raises as `check`."""
        self.check()
        self._queue.put(jobs)

    def check(self) -> None:
        """Raise the error of a failed job: a WorkLostError, or that of a lost device.

        Raises RuntimeError when closed, or when the threads are gone.
        """
        if self.error is not None:
            if not is_lasting(self.error):
                self.error = _lost_work(self.error)
            raise self.error
        if self._queue.closed:
            raise RuntimeError("the optimizer is closed; expected an open one; try constructing a new one")

    def wait_idle(self) -> None:
        """Block until every job is done; raises as `check`."""
        is_over = False
        while not is_over:
            with self._queue.changed:
                is_over = self._queue.closed or self._queue.is_idle
                if not is_over:
                    self._queue.changed.wait(SLICE_S)
            self._check_threads()

    def wait_until(self, done: threading.Event) -> None:
        """Block until `done` is set by a job; raises as `check`.

        Raises RuntimeError when no job is left that could set it.
        """
        while not done.is_set() and not wait_uninterrupted(done.wait):
            self._check_threads()
            if self._queue.is_idle and not done.is_set():
                raise RuntimeError(
                    "a new weight was waited for whose update has not been queued; expected step() after the "
                    "backward that has started it (backward_overlap='update'); try `with optimizer.accumulate():` "
                    "around all backwards but the last, or step() before the next forward"
                )

    def _check_threads(self) -> None:
        self.check()
        if not all(thread.is_alive() for thread in self._threads):
            self.error = self.error or _lost_work(None)
            raise self.error

    def close(self) -> None:
        """Stop the threads once all jobs are done, unless one has failed. Calling it again does nothing."""
        self._queue.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def run_job(self, job: Job) -> None:
        """Run `job` on the calling worker thread, once its gradients have arrived.

        Whatever a worker does for a step happens here: the place for tests to delay a job or to let it fail.
        """
        job.arrival.synchronize()
        job.run()


# A daemon thread that comes back from torch into a dying interpreter aborts the process.
_open: weakref.WeakSet[DeadlineWorkers] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    for workers in list(_open):
        workers.close()


def _lost_work(error: BaseException | None) -> WorkLostError:
    """Return the error of all calls from now on, where a job has failed with `error` or, for None, threads are gone."""
    reason = "as at the end of the interpreter, or in a forked process" if error is None else f"of {error!r}"
    lost = WorkLostError(
        f"a thread of the optimizer's has ended, {reason}; expected all to run until close(): some masters may be "
        "neither old nor new; try synchronize() before the program ends, or loading the last checkpoint into a new "
        "optimizer"
    )
    lost.__cause__ = error
    return lost


def _work(owner: weakref.ref[DeadlineWorkers], queue: _Queue, ready: SimpleQueue[None]) -> None:
    """A worker's life; it holds its owner only while it works, so that a forgotten owner can be collected."""
    try:
        # A thread takes over the process's setting when it first asks, so it asks before it sets its own.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.put(None)
        while (job := queue.take()) is not None:
            workers = owner()
            if workers is not None:
                with torch.no_grad():
                    workers.run_job(job)
            # Before the wait for the next: neither must keep the owner alive.
            del workers, job
            queue.finish()
    except BaseException as error:
        if (workers := owner()) is not None:
            workers.error = workers.error or error
        # Nobody knows how far the job has come. The other threads end, too.
        queue.close(drops_jobs=True)
