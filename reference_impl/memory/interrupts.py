# SPDX-License-Identifier: Apache-2.0
"""Keeps signals, and the recursion limit, from interrupting changes that must happen as a whole.

Python runs signal handlers between two bytecodes of the main thread, and a handler may raise: Ctrl-C becomes
KeyboardInterrupt anywhere. Inside `deferred_interrupts()` signals are noted, and their handlers run when the region
ends. A region should be short and wait for nothing, because it cannot be interrupted. Python interrupts no other
thread, so there a region does nothing.

A wait that a signal cuts short may leave the lock of a thread, a future or a condition taken. So a wait is a row of
slices (`wait_uninterrupted`), between which handlers run.

A region that began near the recursion limit would raise RecursionError half-way, and could not end. So the limit is
higher inside: a region does not begin, or it has room.

Explained in docs/reliability.md.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol, Self, TypeVar

# `signal` makes enums of their arguments and results, in ten times the time.
_get_handler, _set_handler = _signal.getsignal, _signal.signal
# All that a program can catch.
_SIGNALS = tuple(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
# Python frames that a region may need: it starts threads, and torch imports modules when it first needs them.
_FRAMES_INSIDE = 200

# How long a wait that no signal interrupts may last.
SLICE_S = 0.05
_T = TypeVar("_T")

# Only the main thread touches these.
_main_thread = threading.main_thread().ident
_depth = 0
# Whether every handler is replaced: not while the outermost region begins or ends, where finalizers may run.
_is_deferring = False
# The handlers of all signals when a region last looked, and Python's own among them.
_seen: list[Any] = []
_handlers: dict[int, Any] = {}
_noted: list[tuple[int, Any]] = []
# The recursion limit outside and inside a region.
_limit_outside = _limit_inside = 0


def _follow_fork() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


os.register_at_fork(after_in_child=_follow_fork)


class deferred_interrupts:  # noqa: N801 (used like a function, as contextlib's)
    """Run the handlers of signals at the end of the region; regions may stand inside each other.

    Raises RecursionError before the region begins, where there is no room for it.
    """

    __slots__ = ("_applies",)

    def __enter__(self) -> Self:
        global _depth
        self._applies = threading.get_ident() == _main_thread
        if self._applies:
            depth = _depth
            try:
                _depth = depth + 1
                if not _is_deferring:
                    _begin()
            except BaseException:
                # A signal came that was not deferred yet, or there is no room: the region has not begun.
                _depth = depth
                if depth == 0 and _limit_inside:
                    _end()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _depth
        if not self._applies:
            return
        if _depth > 1:
            _depth -= 1
        else:
            _end()


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, /) -> bool: ...

    def release(self) -> None: ...


class UninterruptedLock:
    """A lock around which signals are deferred: the region begins before the lock is taken, and ends after it is free.

    So no handler raises while its holder changes the guarded object, or leaves the lock taken.

    Args:
        lock: the lock that is taken; by default one that a thread cannot take twice.
    """

    __slots__ = ("_lock", "_region")

    # Of the holder, the last one: all regions of a thread end alike, and a lock may be taken twice by one.
    _region: deferred_interrupts

    def __init__(self, lock: _Lock | None = None) -> None:
        self._lock = lock or threading.Lock()

    def __enter__(self) -> None:
        region = deferred_interrupts()
        region.__enter__()
        try:
            self._lock.acquire()
        except BaseException:
            region.__exit__(None, None, None)
            raise
        self._region = region

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = self._region
        self._lock.release()
        region.__exit__(kind, error, trace)

    def run_if_free(self, change: Callable[[], object]) -> None:
        """Take the lock for `change` without waiting; where another holder has it, do nothing."""
        with deferred_interrupts():
            if self._lock.acquire(False):
                try:
                    change()
                finally:
                    self._lock.release()


class UninterruptedCondition(UninterruptedLock):
    """A condition on such a lock. The main thread waits for slices of time, because no signal ends a wait."""

    __slots__ = ("_condition",)

    def __init__(self) -> None:
        self._condition = threading.Condition()
        super().__init__(self._condition)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait, with the lock free, until another thread notifies, or as long. Its caller has the lock."""
        # Others have the lock meanwhile. It comes back without memory: who ends the region must find it.
        region = self._region
        try:
            self._condition.wait(timeout_s)
        finally:
            self._region = region

    def notify(self, threads: int) -> None:
        """Wake as many of the `threads` that wait. Its caller has the lock."""
        self._condition.notify(threads)

    def notify_all(self) -> None:
        """Wake all threads that wait. Its caller has the lock."""
        self._condition.notify_all()


def wait_uninterrupted(wait: Callable[[float], _T], timeout_s: float | None = None) -> _T:
    """Return `wait(timeout_s)`, by default of a slice: no signal cuts it short, and their handlers run behind it."""
    with deferred_interrupts():
        return wait(SLICE_S if timeout_s is None else timeout_s)


def with_room(call: Callable[[], _T]) -> _T:
    """Return `call()`. Raises RecursionError before it where the recursion limit leaves it no room."""
    with deferred_interrupts():
        return call()


def _begin() -> None:
    """Replace the handlers. A finalizer's own region may come between: it does the same, and leaves them replaced."""
    global _is_deferring
    _raise_limit()
    if [*map(_get_handler, _SIGNALS)] != _seen:
        _look()
    for number, handler in _handlers.items():
        before = _set_handler(number, _note)
        if before is not handler and before is not _note:
            # A handler has run meanwhile, and has set another.
            _handlers[number] = before
    _is_deferring = True


def _end() -> None:
    """Give each signal its own handler again, then run the handlers of noted signals.

    Only handlers raise in the loop, each for a signal that comes in these few lines: `_raise_limit` has seen to the
    room, and `_set_handler` does all or nothing. So the loop ends.
    """
    global _depth, _noted, _limit_inside, _is_deferring
    # First, because a finalizer's own region may begin and end below: there, the exception of a handler would be lost.
    noted: list[tuple[int, Any]] = []
    noted, _noted = _noted, noted
    raised: BaseException | None = None
    is_done = False
    while not is_done:
        try:
            # From here on a signal is handled at once, also where its handler is not put back yet.
            _depth = 0
            if sys.getrecursionlimit() == _limit_inside:
                sys.setrecursionlimit(_limit_outside)
            _limit_inside = 0
            _is_deferring = False
            for number, handler in _handlers.items():
                # Somebody may have set another one inside the region, or just now; that stays.
                if _get_handler(number) is _note:
                    before = _set_handler(number, handler)
                    if before is not _note:
                        _set_handler(number, before)
            is_done = True
        except BaseException as error:
            raised = raised or error
    try:
        if raised is not None:
            raise raised
    finally:
        # It knows this frame, and with it all that was interrupted.
        del raised
        try:
            if noted:
                _run(noted)
        finally:
            if _noted:
                _run(_noted)


def _look() -> None:
    """Learn which signals have handlers of Python's; of one that is replaced already, it is known."""
    global _seen, _handlers
    seen = [*map(_get_handler, _SIGNALS)]
    own = (
        (n, _handlers.get(n) if found is _note else found) for n, found in zip(_SIGNALS, seen, strict=True)
    )
    _handlers = {number: handler for number, handler in own if callable(handler)}
    _seen = seen


def _run(noted: list[tuple[int, Any]]) -> None:
    """Run the handlers of all noted signals, also where one of them raises."""
    if noted:
        number, handler = noted.pop(0)
        try:
            handler(number, sys._getframe())
        finally:
            _run(noted)


def _note(number: int, frame: FrameType | None) -> None:
    """Note a signal inside a region; outside, where somebody has put this in a handler's place, handle it."""
    handler = _handlers.get(number)
    if not callable(handler):
        return
    if _depth:
        _noted.append((number, handler))
    else:
        handler(number, frame)


def _raise_limit() -> None:
    """Make room for the region.

    Python refuses a limit that the calls of the moment have reached. These go one deeper than those of `_end`.
    """
    global _limit_outside, _limit_inside
    limit = sys.getrecursionlimit()
    if limit != _limit_inside:
        _limit_outside, _limit_inside = limit, limit + _FRAMES_INSIDE
        sys.setrecursionlimit(_limit_inside)
