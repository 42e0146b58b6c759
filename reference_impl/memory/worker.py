# SPDX-License-Identifier: Apache-2.0
"""Threads that carry out tasks in order; if one dies, every wait for its tasks ends with an error.

A task is queued once a thread is there for it: where `submit` raises, it never runs. The threads are not from
`concurrent.futures`: it ends its own with the main thread, although another thread may still train.

Explained in docs/reliability.md.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from reference_impl.memory.interrupts import SLICE_S, UninterruptedLock, wait_uninterrupted

_T = TypeVar("_T")
# None ends a thread.
_Tasks = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def is_done(future: Future[_T], *, within_s: float = 0.0) -> bool:
    """Wait for a moment; return whether the task is over.

    An interrupt would leave the future's condition locked, and who sets or reads the result would wait for ever.
    """
    return bool(wait_uninterrupted(partial(wait, (future,)), within_s).done)


class Worker:
    """Threads called `name`, one unless more are allowed, from the first tasks until it is closed, or dropped."""

    def __init__(self, name: str, *, threads: int = 1, prepare: Callable[[], None] | None = None) -> None:
        """Start nothing yet; each thread will call `prepare` first."""
        self._name = name
        self._most_threads = threads
        self._prepare = prepare
        self._lock = UninterruptedLock()
        self._is_closed = False
        self._threads: list[_Thread] = []
        # The threads know this object, and not the worker: they would keep the worker alive.
        self._tasks: _Tasks = SimpleQueue()
        weakref.finalize(self, self._tasks.put, None).atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether tasks that were given to it will be carried out."""
        return all(thread.is_alive() or thread.has_ended for thread in self._threads)

    def check_open(self) -> None:
        """Raise RuntimeError when closed."""
        if self._is_closed:
            raise RuntimeError(
                f"a task was given to thread {self._name!r}, which is closed; expected an open offloader; try "
                "constructing a new one"
            )

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread is dead, as all are in a forked child."""
        if not self.is_alive:
            raise self._death()

    def submit(self, task: Callable[[], _T]) -> Future[_T]:
        """Queue `task`; `wait` on the returned future gives its result, or raises its exception.

        Raises RuntimeError when closed, or where no thread can be started; then the task never runs.
        """
        with self._lock:
            self.check_open()
            if len(self._threads) < self._most_threads:
                self._start_thread()
            future: Future[_T] = Future()
            self._tasks.put((future, task))
            return future

    def wait(self, future: Future[_T], *, deadline_s: float = math.inf) -> _T:
        """Return the result of a task, or raise its exception; may be interrupted while it waits.

        Raises RuntimeError when a thread is dead, as all are in a forked child, or after `deadline_s`.
        """
        deadline = time.monotonic() + deadline_s
        while not is_done(future, within_s=SLICE_S):
            if not self.is_alive and not is_done(future):
                raise self._death()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"thread {self._name!r} has not finished a task within {deadline_s:.0f} s; expected seconds; try "
                    "another disk"
                )
        return wait_uninterrupted(future.result)

    def cancel(self, future: Future[_T]) -> bool:
        """Forget a task; return whether that was possible: it has not begun."""
        with self._lock:
            return future.cancel()

    def end(self) -> None:
        """Let the threads end behind the queued tasks, without a wait."""
        with self._lock:
            self._is_closed = True
            self._tasks.put(None)

    def close(self) -> None:
        """Forget queued tasks and wait for running ones. Calling it again does nothing."""
        with self._lock:
            self._is_closed = True
            # A forked child has none of the threads, and perhaps a future that one of them has locked.
            if any(thread.is_alive() for thread in self._threads):
                _cancel_all(self._tasks)
                self._tasks.put(None)
        for thread in self._threads:
            _join(thread, self._tasks)

    def _death(self) -> RuntimeError:
        error = RuntimeError(
            f"thread {self._name!r} has died with a task unfinished; expected it to live as long as its offloader; try "
            "a new offloader, made in this process"
        )
        error.__cause__ = next((thread.error for thread in self._threads if thread.error), None)
        return error

    def _start_thread(self) -> None:
        thread = _Thread(self._name, self._tasks, self._prepare)
        # Made before: a thread that nobody knows would take tasks out of turn.
        threads = [*self._threads, thread]
        _running[thread] = self._tasks
        try:
            start(thread)
        except BaseException:
            if not self._threads:
                raise
        else:
            self._threads = threads


class _Thread(threading.Thread):
    """Carries out tasks until it finds None, or dies of an error outside the tasks."""

    def __init__(self, name: str, tasks: _Tasks, prepare: Callable[[], None] | None) -> None:
        super().__init__(name=name, daemon=True)
        self._tasks = tasks
        self._prepare = prepare
        self.has_ended = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """Take tasks in turn; nothing holds one while the thread waits for the next."""
        try:
            if self._prepare is not None:
                self._prepare()
            for queued in iter(self._tasks.get, None):
                try:
                    _carry_out(*queued)
                except MemoryError as error:
                    # There was none to begin the task.
                    if not queued[0].done():
                        queued[0].set_exception(error)
                del queued
            # For the other threads.
            self._tasks.put(None)
            self.has_ended = True
        except BaseException as error:
            self.error = error.with_traceback(None)


# A daemon thread that comes back from torch into a dying interpreter aborts the process.
_running: weakref.WeakKeyDictionary[threading.Thread, _Tasks] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _end_all() -> None:
    running = list(_running.items())
    for _, tasks in running:
        tasks.put(None)
    for thread, tasks in running:
        _join(thread, tasks)


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises RuntimeError where this process may have no more, or has no room for its stack."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(
            f"thread {thread.name!r} has not started: {error}; expected room for one more thread and its stack; try "
            "higher limits (`ulimit -u`, `ulimit -v`, the container's number of processes), or fewer threads"
        ) from error


def _join(thread: threading.Thread, tasks: _Tasks) -> None:
    """Wait for the end of `thread`. None in `tasks` ends it; a dead thread need not have passed the None on."""
    while thread.is_alive() and thread is not threading.current_thread():
        tasks.put(None)
        wait_uninterrupted(thread.join)


def _cancel_all(tasks: _Tasks) -> None:
    with suppress(Empty):
        # Nothing in the queue equals the sentinel: iteration ends at the empty queue.
        for queued in iter(tasks.get_nowait, object()):
            if queued is not None:
                queued[0].cancel()


def _carry_out(future: Future[_T], task: Callable[[], _T]) -> None:
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(task())
    except BaseException as error:
        # Also where the result was there and could not be handed over.
        if not future.done():
            future.set_exception(error)
        # The traceback knows this frame.
        del future, task
