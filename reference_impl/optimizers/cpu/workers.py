"""Runs jobs on a few threads in the order of their deadlines.

A job is due when the next forward needs its result: the earliest deadline among the jobs whose gradients have
arrived goes first, which hides the most work behind forward and backward. The threads are the optimizer's own
and each computes on one core, so `OMP_NUM_THREADS=1`, which torchrun sets, starves nobody, and the caller's own
thread setting is left alone. The first exception stops all work and is raised again at the next call.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import atexit
import bisect
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from reference_impl.device import Event


@dataclass(frozen=True, slots=True)
class Job:
    """`run` may start once `arrival` is reached; `deadline` is smallest for what is needed first."""

    deadline: int
    arrival: Event
    run: Callable[[], None]


def cpu_budget() -> int:
    """Return how many update threads this process may run: its cores, shared by the ranks of the node, less two.

    The cores that are left drive the GPU. `LOCAL_WORLD_SIZE` is set by torchrun.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(len(os.sched_getaffinity(0)) // max(ranks, 1) - 2, 1)


class DeadlineWorkers:
    """`threads` threads and one queue."""

    def __init__(self, *, threads: int) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        callers_threads = torch.get_num_threads()
        ready = threading.Barrier(threads + 1)
        self._threads = [
            threading.Thread(
                target=_work, args=(weakref.ref(self), ready), daemon=True, name="offload-update"
            )
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        ready.wait()
        _open.add(self)
        # A thread's own setting also becomes the default of threads born later: put that back.
        torch.set_num_threads(callers_threads)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; raises what a worker has died of."""
        self.check()
        with self._changed:
            for job in jobs:
                bisect.insort(self._waiting, job, key=lambda job: job.deadline)
            self._changed.notify(len(jobs))

    def check(self) -> None:
        """Raise RuntimeError from the first exception of a worker, if there was one."""
        if self._error is not None:
            raise RuntimeError(
                f"an optimizer worker died: {self._error!r}; expected every update to finish; parameters are old "
                "or new, none is torn; try loading the last checkpoint into a new optimizer"
            ) from self._error
        if self._closed:
            raise RuntimeError("the optimizer is closed; expected an open one; try constructing a new one")

    def wait_idle(self) -> None:
        """Block until every job is done; raises what a worker has died of."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._waiting or self._running))
        self.check()

    def wait_until(self, done: threading.Event) -> None:
        """Block until `done` is set by a job; raises what a worker has died of."""
        while not done.wait(timeout=0.2):
            self.check()

    def close(self) -> None:
        """Let running jobs finish and stop the threads. Calling it again does nothing."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def run_job(self, job: Job) -> None:
        """Run `job` on the calling worker thread, once its gradients have arrived.

        Whatever a worker does for a step happens here: the place for tests to delay a job or to let it fail.
        """
        job.arrival.synchronize()
        job.run()

    def _take(self) -> Job | None:
        """Wait for a job and claim the most urgent one; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed or self._error, timeout=1.0)
            if self._closed or self._error or not self._waiting:
                return None
            arrived = (index for index, job in enumerate(self._waiting) if job.arrival.query())
            job = self._waiting.pop(next(arrived, 0))
            self._running += 1
            return job

    def _finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._running -= 1
            self._error = self._error or error
            if error is not None:
                self._waiting.clear()
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether the threads should end."""
        return self._closed or self._error is not None


# A daemon thread that comes back from torch into a dying interpreter aborts the process.
_open: weakref.WeakSet[DeadlineWorkers] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    for workers in list(_open):
        workers.close()


def _work(owner: weakref.ref[DeadlineWorkers], ready: threading.Barrier) -> None:
    """A worker's life; it holds its owner only while it works, so that a forgotten owner can be collected."""
    # A thread takes over the process's setting when it first asks, so it asks before it sets its own.
    torch.get_num_threads()
    torch.set_num_threads(1)
    ready.wait()
    while True:
        workers = owner()
        if workers is None or workers.stopped:
            return
        job = workers._take()
        if job is None:
            del workers
            continue
        error: BaseException | None = None
        try:
            with torch.no_grad():
                workers.run_job(job)
        except BaseException as caught:
            error = caught
        workers._finish(error)
        del workers, job
