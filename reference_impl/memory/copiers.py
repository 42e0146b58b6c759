"""Copies within host memory by several threads, what somebody waits for first.

One core reads and writes host memory at a fraction of the link's rate, so pageable memory needs several to keep up
(one NVIDIA H200's host, 16 cores: one thread fills pinned buffers at 4.8 GB/s, eight at 26). As many copy at a time as
cores are idle: the threads of a CPU update keep theirs, also where they begin in the middle.

A copy is one `memmove` without Python's lock. torch's own would be divided among the threads of its pool, of which each
thread here would have another.

Explained in docs/fitting.md, "Pinned memory".
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress

import torch

from reference_impl.memory.cores import idle_cores, own_cores
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.memory.worker import Worker, is_done

# One thread copies so much in 2 ms, a hundred times what its bookkeeping takes.
_PART_BYTES = 8 * 2**20
# More do not fill buffers faster than the link empties them.
_MOST_THREADS = 12
# A copy that takes longer is lost.
_DEADLINE_S = 600.0


class Copy:
    """`source`'s bytes on their way to `target`, two contiguous tensors of one size on the host."""

    __slots__ = ("future", "source", "target")

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target: torch.Tensor | None = target
        self.source: torch.Tensor | None = source
        self.future: Future[None] = Future()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is still to be written."""
        return is_done(self.future)

    def run(self) -> None:
        """Copy, unless it was cancelled meanwhile. Who waits gets what this raises."""
        try:
            if self.future.set_running_or_notify_cancel():
                assert self.target is not None
                assert self.source is not None
                ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.target.nbytes)
                self.target = self.source = None
                self.future.set_result(None)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Let `error` be what a wait raises, unless it is over."""
        self.target = self.source = None
        if not self.future.done():
            self.future.set_exception(error)


class Copiers:
    """Threads called `name`, from the first copy until they are closed, or dropped."""

    def __init__(self, name: str) -> None:
        # Asked once: the system is asked for it, which takes longer than all other bookkeeping of a copy.
        self._cores = own_cores()
        self._worker = Worker(name, threads=min(self._cores, _MOST_THREADS))
        self._lock = threading.Lock()
        # In the order in which they are needed: what somebody waits for, and the rest.
        self._needed: deque[Copy] = deque()
        self._others: deque[Copy] = deque()
        # The threads that copy now.
        self._serving: set[int] = set()

    def start(self, target: torch.Tensor, source: torch.Tensor, *, is_needed: bool) -> Copy:
        """Queue a copy; one that `is_needed` goes before those that are not.

        Raises RuntimeError when closed, or where no thread can be started; then nothing is copied.
        """
        copy = Copy(target, source)
        try:
            with deferred_interrupts():
                with self._lock:
                    # First: what is queued is sure of a thread, which waits for the lock.
                    serving = self._worker.submit(self._serve)
                    (self._needed if is_needed else self._others).append(copy)
                serving.add_done_callback(self._lose_if_failed)
        except BaseException:
            self.settle([copy])
            raise
        return copy

    def wait(self, copy: Copy) -> None:
        """Wait for a copy, which is needed from now on; raise what it has raised.

        Raises RuntimeError when a thread is dead, as all are in a forked child.
        """
        with deferred_interrupts(), self._lock:
            if copy in self._others:
                self._others.remove(copy)
                self._needed.append(copy)
        self._worker.wait(copy.future, deadline_s=_DEADLINE_S)

    def settle(self, copies: Iterable[Copy]) -> None:
        """Have none of `copies` write any more: those that have not begun never will."""
        for copy in copies:
            with suppress(Exception):
                if not copy.future.cancel():
                    self.wait(copy)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each source (flat uint8) to its target in parts; return once all are there. Raises as `wait`."""
        started: list[Copy] = []
        try:
            for target, source in pairs:
                for to, part in zip(target.split(_PART_BYTES), source.split(_PART_BYTES), strict=True):
                    started.append(self.start(to, part, is_needed=True))
            for each in started:
                self.wait(each)
        except BaseException:
            self.settle(started)
            raise

    def close(self) -> None:
        """Forget what is queued and wait for what is being copied. Calling it again does nothing."""
        self._worker.close()
        self._lose(RuntimeError("the threads that copy within host memory are closed; expected open ones"))

    def _serve(self) -> None:
        """Copy what is needed first until nothing is left, or others need this core."""
        me = threading.get_ident()
        copy: Copy | None = None
        while True:
            try:
                copy = None
                most = idle_cores(self._cores)
                with self._lock:
                    queue = self._needed or self._others
                    if not queue or len(self._serving - {me}) >= most:
                        # At once: who comes next must not count on this thread.
                        self._serving.discard(me)
                        return
                    # Known before it is taken: one that nobody knows would be waited for in vain.
                    copy = queue[0]
                    queue.popleft()
                    self._serving.add(me)
                copy.run()
            except BaseException as error:
                if copy is None:
                    self._serving.discard(me)
                    raise
                copy.fail(error)

    def _lose_if_failed(self, serving: Future[None]) -> None:
        """Fail what is queued where a thread has failed outside of a copy: nobody may be left to serve it."""
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        with self._lock:
            lost = [*self._needed, *self._others]
            self._needed.clear()
            self._others.clear()
        for copy in lost:
            copy.fail(error)
