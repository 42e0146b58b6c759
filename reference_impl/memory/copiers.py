# SPDX-License-Identifier: Apache-2.0
"""Copies within host memory by several threads; an awaited copy comes first.

One core reads and writes host memory at a fraction of the link's rate, so pageable memory needs several to keep up. As
many copy at a time as cores are idle: the threads of a CPU update keep theirs, also where they begin in the middle.

All of them share each copy, a part at a time. Where a thread has a copy of its own (one H200's host, 16 cores), buffers
are filled at 25 to 29 GB/s: no more threads work than there are buffers, and the first of several is full when all are.
Threads that share fill one after the other, and the buffer is still in the cache when the link reads it.

A part is one `memmove` without Python's lock. torch's own would be divided among the threads of its pool, of which each
thread here would have another. All else of a part needs Python's lock, which training wants too. So a thread takes and
ends a part without another lock, by operations that Python's makes one: a count that goes on, a set that grows. A
thread that has copied waits for the next part for a moment, and a copy has one queue to wait for in place of a future.

Explained in docs/fitting.md, "Pinned memory".
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import weakref
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
# Of a copy: then the cores that are idle are counted again.
_PARTS_BETWEEN_LOOKS = 8
# A copy that takes longer is lost.
_DEADLINE_S = 600.0


class Copy:
    """`source`'s bytes on their way to `target`, two contiguous tensors of one size on the host, a part at a time.

    Any thread may call any method at any time.
    """

    __slots__ = (
        "_end",
        "_is_claimed",
        "_numbers",
        "_places",
        "_tensors",
        "_threads",
        "error",
        "is_over",
        "parts",
        "size_bytes",
    )

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (target, source)
        self._places = target.data_ptr(), source.data_ptr()
        self.size_bytes = target.nbytes
        self.parts = max(-(-self.size_bytes // _PART_BYTES), 1)
        # The next part's number, whether the last one is taken, and the threads that copy now.
        self._numbers = itertools.count()
        self._is_claimed = False
        self._threads: set[int] = set()
        # Whether nothing of it is still to be written, and why it is not there.
        self.is_over = False
        self.error: BaseException | None = None
        self._end: SimpleQueue[None] = SimpleQueue()

    def take(self, me: int) -> int | None:
        """Return the number of the next part, which the thread `me` copies, or None where none is left.

        It calls `leave` afterwards, either way. Nobody takes a part once `error` is set and no thread is known.
        """
        # First, so that who sets the error behind this sees the thread, and who has set it before is seen.
        self._threads.add(me)
        if self.error is not None or (number := next(self._numbers)) >= self.parts:
            return None
        if number == self.parts - 1:
            self._is_claimed = True
        return number

    def run(self, number: int) -> None:
        """Copy a part."""
        start = number * _PART_BYTES
        target, source = self._places
        ctypes.memmove(target + start, source + start, min(_PART_BYTES, self.size_bytes - start))

    def leave(self, me: int) -> None:
        """Note that the thread `me` has copied its part, or has failed to."""
        self._threads.discard(me)
        if (self._is_claimed or self.error is not None) and not self._threads and not self.is_over:
            self._tensors = None
            self.is_over = True
            self._end.put(None)

    def fail(self, error: BaseException) -> None:
        """Let a wait raise `error`, unless the copy is over; parts that are being copied come to their end."""
        if not self.is_over:
            self.error = self.error or error
            self.leave(0)

    def ends(self, within_s: float) -> bool:
        """Wait for a moment; return whether it is over."""
        if not self.is_over:
            with suppress(Empty):
                self._end.get(timeout=within_s)
                # For others who wait.
                self._end.put(None)
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
        # Calls of `_serve` that are not over, which know this object: copiers that are dropped wait for no collector.
        self._tasks: weakref.WeakSet[Future[None]] = weakref.WeakSet()
        # The threads that copy or are called to, and those that wait, each for a call of its own: one that is awake
        # would take the call of another that is still being woken, which then slept on (measured: 8 of 14 copied).
        self._serving: set[int] = set()
        self._waiting: dict[int, SimpleQueue[None]] = {}
        # How many may copy.
        self._most_serving = self._most_threads

    def start(self, target: torch.Tensor, source: torch.Tensor, *, is_needed: bool) -> Copy:
        """Queue a copy; a copy that `is_needed` goes before others.

        Raises RuntimeError when closed, or where no thread can be started; then nothing is copied.
        """
        copy = Copy(target, source)
        try:
            with self._lock:
                # First: a queued copy is sure of a thread.
                self._call_threads(copy.parts)
                (self._needed if is_needed else self._others).append(copy)
        except BaseException:
            self.stop_writing([copy])
            raise
        return copy

    def wait(self, copy: Copy) -> None:
        """Wait for a copy, which is needed from now on; raise its error.

        Raises RuntimeError when a thread is dead, as all are in a forked child.
        """
        if not copy.is_over:
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
        self._most_serving = min(idle_cores(self._cores), self._most_threads)
        missing = min(parts, self._most_serving - len(self._serving))
        while missing > 0 and self._waiting:
            # The last one to wait: its core may still be awake.
            thread, call = self._waiting.popitem()
            self._serving.add(thread)
            call.put(None)
            missing -= 1
        tasks = [task for task in self._tasks if not task.done()] if missing > 0 else []
        new = min(missing, self._most_threads - len(tasks))
        if not self._serving:
            # A task that is not over may be about to end.
            new = max(new, 1)
        for _ in range(new):
            try:
                task = self._worker.submit(self._serve)
            except RuntimeError:
                # Those that were called do it all.
                if not (tasks or self._serving):
                    raise
                return
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(self._lose_if_failed)

    def _serve(self) -> None:
        """Copy in the order of need until nothing comes any more, or others need this core."""
        me, call = threading.get_ident(), SimpleQueue[None]()
        while True:
            # Known before a part is taken: a copy that nobody knows would be waited for in vain.
            copy: Copy | None = None
            try:
                copy = self._first()
                if copy is None:
                    if self._may_wait(me, call) and not self._is_called(me, call):
                        return
                    continue
                if not self._may_serve(me):
                    copy = None
                    return
                number = copy.take(me)
                if number is not None:
                    if number % _PARTS_BETWEEN_LOOKS == 0:
                        self._most_serving = idle_cores(self._cores)
                    copy.run(number)
                if number is None or number == copy.parts - 1:
                    with self._lock:
                        self._dequeue(copy)
                copy.leave(me)
            except BaseException as error:
                if copy is None:
                    self._serving.discard(me)
                    self._waiting.pop(me, None)
                    raise
                with self._lock:
                    self._withdraw(copy, error)
                copy.leave(me)

    def _first(self) -> Copy | None:
        """Return the copy that is needed first, or None; it may have no part left."""
        for queue in (self._needed, self._others):
            # Others may take the last one out meanwhile.
            with suppress(IndexError):
                return queue[0]
        return None

    def _may_serve(self, me: int) -> bool:
        """Return whether the thread `me` has a core; then it counts among those that copy."""
        if me in self._serving and len(self._serving) <= self._most_serving:
            return True
        with self._lock:
            self._most_serving = idle_cores(self._cores)
            self._waiting.pop(me, None)
            if len(self._serving - {me}) < self._most_serving:
                self._serving.add(me)
                return True
            # Known at once: who comes next must not count on this thread.
            self._serving.discard(me)
            return False

    def _may_wait(self, me: int, call: SimpleQueue[None]) -> bool:
        """Return whether nothing is queued; then the thread `me` counts among those that wait for a `call`."""
        with self._lock:
            if self._needed or self._others:
                return False
            self._serving.discard(me)
            self._waiting[me] = call
            return True

    def _dequeue(self, copy: Copy) -> None:
        for queue in (self._needed, self._others):
            if copy in queue:
                queue.remove(copy)

    def _withdraw(self, copy: Copy, error: BaseException) -> None:
        """Have nothing more of `copy` taken, because of `error`."""
        self._dequeue(copy)
        copy.fail(error)

    def _is_called(self, me: int, call: SimpleQueue[None]) -> bool:
        """Wait for a moment; return whether the thread `me`, which waits, is called."""
        with suppress(Empty):
            call.get(timeout=SLICE_S)
            return True
        with self._lock:
            # Somebody may have called at this moment; that call will wake it once more, for nothing.
            return self._waiting.pop(me, None) is None

    def _lose_if_failed(self, serving: Future[None]) -> None:
        """Fail queued copies where a thread has failed outside of a copy: nobody may be left to serve them."""
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        with self._lock:
            for copy in (*self._needed, *self._others):
                self._withdraw(copy, error)
