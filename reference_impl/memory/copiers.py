# SPDX-License-Identifier: Apache-2.0
"""Copies within host memory by several threads; an awaited copy comes first.

One core reads and writes host memory at a fraction of the link's rate, so pageable memory needs several to keep up. As
many copy at a time as cores are idle: the threads of a CPU update keep theirs, also where they begin in the middle.

All of them share each copy, a part at a time. Where a thread has a copy of its own (one H200's host, 16 cores), buffers
are filled at 25 to 29 GB/s: no more threads work than there are buffers, and the first of several is full when all are.
Threads that share fill one after the other, and the buffer is still in the cache when the link reads it.

A part is one `memmove` without Python's lock. torch's own would be divided among the threads of its pool, of which each
thread here would have another. The rest of a part needs that lock, and training wants it too. So a thread waits a
moment for the next part after a copy, and a copy's end is awaited on one lock in place of a future.

Explained in docs/fitting.md, "Pinned memory".
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from reference_impl.memory.cores import idle_cores, own_cores
from reference_impl.memory.interrupts import SLICE_S, UninterruptedLock, wait_uninterrupted
from reference_impl.memory.worker import Worker

# 12 threads copy 67 GB/s in parts of 4 MiB, and 41 in parts of 16 (one H200's host); less is more bookkeeping.
_PART_BYTES = 4 * 2**20
# More do not fill buffers faster than the link empties them.
_MOST_THREADS = 14
# A copy that takes longer is lost.
_DEADLINE_S = 600.0


class Copy:
    """`source`'s bytes on their way to `target`, two contiguous tensors of one size on the host, a part at a time.

    All but `run` and `ends` is called by one thread at a time.
    """

    __slots__ = ("_claimed_bytes", "_end", "_source", "_target", "_threads", "error", "is_over", "size_bytes")

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target: torch.Tensor | None = target
        self._source: torch.Tensor | None = source
        self.size_bytes = target.nbytes
        # The bytes of it taken by threads, and the threads now copying.
        self._claimed_bytes = 0
        self._threads: set[int] = set()
        # Whether nothing of it is still to be written, and why it is not there.
        self.is_over = False
        self.error: BaseException | None = None
        self._end = threading.Lock()
        self._end.acquire()

    @property
    def is_claimed(self) -> bool:
        """Whether nothing of it is left to be taken."""
        return self._claimed_bytes >= self.size_bytes or self.error is not None

    def take(self, me: int) -> tuple[int, int]:
        """Return the first byte and the end of the next part, which the thread `me` copies."""
        self._threads.add(me)
        start = self._claimed_bytes
        self._claimed_bytes = min(start + _PART_BYTES, self.size_bytes)
        return start, self._claimed_bytes

    def run(self, start: int, end: int) -> None:
        """Copy a part."""
        target, source = self._target, self._source
        assert target is not None
        assert source is not None
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, end - start)

    def leave(self, me: int) -> None:
        """Note that the thread `me` has copied its part, or has failed to."""
        self._threads.discard(me)
        if self.is_claimed and not self._threads and not self.is_over:
            self._target = self._source = None
            self.is_over = True
            self._end.release()

    def fail(self, error: BaseException) -> None:
        """Let a wait raise `error`, unless the copy is over; parts that are being copied come to their end."""
        if not self.is_over:
            self.error = self.error or error
            self.leave(0)

    def ends(self, within_s: float) -> bool:
        """Wait for a moment; return whether it is over."""
        if not self.is_over and self._end.acquire(timeout=within_s):
            # For others who wait.
            self._end.release()
        return self.is_over


class Copiers:
    """Threads called `name`, from the first copy until they are closed, or dropped."""

    def __init__(self, name: str) -> None:
        # Asked once: asking the system takes longer than all other bookkeeping of a copy.
        self._cores = own_cores()
        self._most_threads = min(self._cores, _MOST_THREADS)
        self._worker = Worker(name, threads=self._most_threads)
        self._lock = UninterruptedLock()
        # In the order of their need: awaited copies, and others.
        self._needed: deque[Copy] = deque()
        self._others: deque[Copy] = deque()
        # The threads now copying, and the threads waiting for a call.
        self._serving: set[int] = set()
        self._waiting: set[int] = set()
        self._calls: SimpleQueue[None] = SimpleQueue()

    def start(self, target: torch.Tensor, source: torch.Tensor, *, is_needed: bool) -> Copy:
        """Queue a copy; a copy that `is_needed` goes before others.

        Raises RuntimeError when closed, or where no thread can be started; then nothing is copied.
        """
        copy = Copy(target, source)
        try:
            with self._lock:
                # First: a queued copy is sure of a thread.
                self._call_threads(-(-copy.size_bytes // _PART_BYTES))
                (self._needed if is_needed else self._others).append(copy)
        except BaseException:
            self.stop_writing([copy])
            raise
        return copy

    def wait(self, copy: Copy) -> None:
        """Wait for a copy, which is needed from now on; raise its error.

        Raises RuntimeError when a thread is dead, as all are in a forked child.
        """
        with self._lock:
            if copy in self._others:
                self._others.remove(copy)
                self._needed.append(copy)
        deadline = time.monotonic() + _DEADLINE_S
        while not wait_uninterrupted(copy.ends):
            self._worker.check_alive()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"a copy within host memory has not ended within {_DEADLINE_S:.0f} s; expected milliseconds; try "
                    "training without the other programs that keep this host busy"
                )
        if copy.error is not None:
            raise copy.error

    def stop_writing(self, copies: Iterable[Copy]) -> None:
        """Stop `copies`: one that has not begun never begins."""
        for copy in copies:
            with self._lock:
                self._withdraw(copy, CancelledError())
            with suppress(Exception):
                self.wait(copy)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each source (flat uint8) to its target; return once all are there. Raises as `wait`."""
        started: list[Copy] = []
        try:
            for target, source in pairs:
                started.append(self.start(target, source, is_needed=True))
            for each in started:
                self.wait(each)
        except BaseException:
            self.stop_writing(started)
            raise

    def close(self) -> None:
        """Forget queued copies and wait for begun ones. Calling it again does nothing."""
        self._worker.close()
        self._lose(RuntimeError("the threads that copy within host memory are closed; expected open ones"))

    def _call_threads(self, parts: int) -> None:
        """Have as many threads as there are `parts` look at the queue; those that copy look when they have."""
        self._worker.check_open()
        for number in range(min(parts, self._most_threads - len(self._serving))):
            if self._waiting:
                self._waiting.pop()
                self._calls.put(None)
                continue
            try:
                self._worker.submit(self._serve).add_done_callback(self._lose_if_failed)
            except RuntimeError:
                # The called threads do it all.
                if not (number or self._serving):
                    raise
                return

    def _serve(self) -> None:
        """Copy in the order of need until nothing comes any more, or others need this core."""
        me = threading.get_ident()
        while True:
            copy: Copy | None = None
            try:
                most = idle_cores(self._cores)
                with self._lock:
                    queue = self._needed or self._others
                    if queue and len(self._serving - {me}) >= most:
                        # At once: who comes next must not count on this thread.
                        self._serving.discard(me)
                        return
                    if queue:
                        # Known before it is taken: one that nobody knows would be waited for in vain.
                        copy = queue[0]
                        start, end = copy.take(me)
                        if copy.is_claimed:
                            queue.popleft()
                        self._serving.add(me)
                    else:
                        self._serving.discard(me)
                        self._waiting.add(me)
                if copy is not None:
                    copy.run(start, end)
                    with self._lock:
                        copy.leave(me)
                elif not self._is_called(me):
                    return
            except BaseException as error:
                if copy is None:
                    self._serving.discard(me)
                    self._waiting.discard(me)
                    raise
                with self._lock:
                    self._withdraw(copy, error)
                    copy.leave(me)

    def _withdraw(self, copy: Copy, error: BaseException) -> None:
        """Have nothing more of `copy` taken, because of `error`."""
        for queue in (self._needed, self._others):
            if copy in queue:
                queue.remove(copy)
        copy.fail(error)

    def _is_called(self, me: int) -> bool:
        """Wait for a moment; return whether the thread `me`, which waits, is called."""
        try:
            self._calls.get(timeout=SLICE_S)
        except Empty:
            with self._lock:
                # Somebody may have called at this moment.
                is_called = me not in self._waiting
                self._waiting.discard(me)
            return is_called
        return True

    def _lose_if_failed(self, serving: Future[None]) -> None:
        """Fail queued copies where a thread has failed outside of a copy: nobody may be left to serve them."""
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        with self._lock:
            for copy in (*self._needed, *self._others):
                self._withdraw(copy, error)
