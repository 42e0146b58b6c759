"""One thread that carries out tasks in order; if it dies, every wait for it ends with an error.

A file of its own, because the disk tier and the streamed weights use it alike.

Explained in docs/reliability.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from reference_impl.memory.interrupts import deferred_interrupts

# How long a wait cannot be interrupted.
_SLICE_S = 0.05
_T = TypeVar("_T")


def result_of(future: Future[_T]) -> _T:
    """Return what a task has returned, or raise what it has raised; may be interrupted while it waits."""
    while not is_done(future, within_s=_SLICE_S):
        pass
    with deferred_interrupts():
        return future.result(0)


def is_done(future: Future[_T], *, within_s: float = 0.0) -> bool:
    """Wait for a moment; return whether the task is over.

    An interrupt would leave the future's condition locked, and who sets or reads the result would wait for ever.
    """
    with deferred_interrupts():
        return bool(wait((future,), within_s).done)


class Worker:
    """A thread called `name`, from its first task until it is closed, or dropped."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []
        # The thread must not know this object, or it would keep it alive.
        self._pool = ThreadPoolExecutor(
            1,
            name,
            initializer=lambda threads: threads.append(threading.current_thread()),
            initargs=(self._threads,),
        )

    @property
    def is_alive(self) -> bool:
        """Whether tasks that were given to it will be carried out."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, task: Callable[[], _T]) -> Future[_T]:
        """Queue `task`; its result or exception is what `wait` on the returned future gives."""
        with deferred_interrupts():
            return self._pool.submit(task)

    def wait(self, future: Future[_T], *, deadline_s: float) -> _T:
        """Return what a task has returned, or raise what it has raised.

        Raises RuntimeError when the thread is dead, as all are in a forked child, or after `deadline_s`.
        """
        deadline = time.monotonic() + deadline_s
        while not is_done(future, within_s=_SLICE_S):
            if not self.is_alive:
                raise RuntimeError(
                    f"thread {self._name!r} has died with a task unfinished; expected it to live as long as its "
                    "offloader; try a new offloader, made in this process"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"thread {self._name!r} has not finished a task within {deadline_s:.0f} s; expected seconds; try "
                    "another disk"
                )
        return result_of(future)

    def close(self) -> None:
        """Forget queued tasks and wait for the one that runs. Calling it again does nothing."""
        if self.is_alive:
            with deferred_interrupts():
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool.shutdown()
