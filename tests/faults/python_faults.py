# SPDX-License-Identifier: Apache-2.0
"""Faults of Python itself: no memory for a call, and no stack for one.

`NoMemory` raises MemoryError in place of the n-th call that the package's functions make or are, on the main thread or
on the others. `TooDeep` leaves a phase of training too few frames, so that some call in it raises RecursionError, as in
a recursive program.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import begun_steps
from injector import Injector, undisturbed
from interrupts import PACKAGE

# These take no memory. A call that gives a lock back must not, or nobody could use the lock again; nor must the end of
# a region of deferred signals.
_TAKES_NONE = frozenset({"__exit__", "release", "pop", "popleft", "clear", "discard", "remove", "__del__"})
_ENDS_A_REGION = frozenset({"_end", "_run"})
_INTERRUPTS = "memory/interrupts.py"
# As many suffice for other threads, which the same limit holds for.
OTHERS_FRAMES = 100
_SEARCHED_FRAMES = 2000
_RECURSION = "maximum recursion depth exceeded"


@dataclass(frozen=True)
class NoMemory:
    """MemoryError in place of call `nth`, as `calls_counted` counts them on the main thread or on the others."""

    nth: int
    on_main: bool

    def __str__(self) -> str:
        return f"MemoryError at call {self.nth} of {'the main thread' if self.on_main else 'another thread'}"

    @property
    def may_break(self) -> bool:
        """Whether an optimizer may give up after this wherever it comes: an update that has failed half-way is lost."""
        return not self.on_main

    @contextmanager
    def comes(self, injector: Injector) -> Iterator[None]:
        """Fail that call of the program inside."""

        def fail(where: str) -> None:
            injector.fail(MemoryError(f"injected into {where}"))

        with begun_steps.watched(), calls_counted(self.nth, fail, on_main=self.on_main):
            yield


@dataclass(frozen=True)
class TooDeep:
    """Phase `phase` of `step`, or without a phase the whole run, has `spare` frames left."""

    spare: int
    step: int = 0
    phase: str | None = None
    may_break = False

    def __str__(self) -> str:
        where = f" (step {self.step}, {self.phase})" if self.phase else ""
        return f"{self.spare} frames left{where}"

    @contextmanager
    def comes(self, injector: Injector) -> Iterator[None]:
        """Lower the recursion limit; `injector.error` says that it is low, or has been."""
        before, real = sys.getrecursionlimit(), injector.enter

        def enter(step: int, phase: str) -> None:
            sys.setrecursionlimit(before)
            real(step, phase)
            if (step, phase) == (self.step, self.phase):
                injector.error = RecursionError(_RECURSION)
                _leave_frames(self.spare)

        injector.enter = enter  # type: ignore[method-assign]
        try:
            if self.phase is None:
                injector.error = RecursionError(_RECURSION)
                _leave_frames(self.spare)
            yield
        finally:
            sys.setrecursionlimit(before)
            del injector.enter


def _leave_frames(spare: int) -> None:
    """Let the caller's caller call no deeper than `spare` frames."""
    frame, depth = sys._getframe(2), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    # Calls from C into Python count too, so that the limit is below the true depth at first.
    for limit in range(depth, depth + _SEARCHED_FRAMES):
        try:
            sys.setrecursionlimit(limit)
        except RecursionError:
            continue
        sys.setrecursionlimit(limit + spare)
        return
    raise RuntimeError("no recursion limit was found; expected one near the depth of the stack")


def deeper(frames: int, run: Callable[[], Any]) -> Any:
    """Return the result of `run`, called that much deeper in the stack."""
    return deeper(frames - 1, run) if frames else run()


@contextmanager
def calls_counted(nth: int | None, fail: Callable[[str], None], *, on_main: bool) -> Iterator[list[int]]:
    """Count calls into the list that is returned; call `fail` in place of the `nth`, with where it is.

    They are the calls of the package's functions, and those that these make: of Python's, torch's and C's. Other
    threads are heard from their start on, so the program inside starts them.
    """
    count, lock = [0], threading.Lock()

    def heard(frame: FrameType, event: str, argument: Any) -> None:
        if not _is_call(frame, event, argument) or undisturbed.active:
            return
        with lock:
            count[0] += 1
            fails = count[0] == nth
        if fails:
            called = argument.__name__ if event == "c_call" else "itself"
            fail(f"{frame.f_code.co_qualname}, line {frame.f_lineno}: {called}")

    if not on_main:
        threading.setprofile(heard)
        try:
            yield count
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
        return
    sys.setprofile(heard)
    try:
        yield count
    finally:
        sys.setprofile(None)


def _is_call(frame: FrameType, event: str, argument: Any) -> bool:
    if frame.f_code.co_name in _ENDS_A_REGION and frame.f_code.co_filename.endswith(_INTERRUPTS):
        return False
    if event == "c_call":
        return frame.f_code.co_filename.startswith(PACKAGE) and argument.__name__ not in _TAKES_NONE
    code = frame.f_code
    if event != "call" or code.co_name in _TAKES_NONE or not _begins(frame):
        return False
    if code.co_filename == begun_steps.__file__:
        # It is around the end of a region, which never fails.
        return False
    caller = frame.f_back
    return code.co_filename.startswith(PACKAGE) or (
        caller is not None and caller.f_code.co_filename.startswith(PACKAGE)
    )


def _begins(frame: FrameType) -> bool:
    """Return whether the frame is a new one, and not a resumed generator's."""
    # The argument of RESUME says it.
    return frame.f_code.co_code[frame.f_lasti + 1] == 0


@contextmanager
def frames_counted(injector: Injector) -> Iterator[dict[tuple[int, str], int]]:
    """Count how many frames deep each phase goes, into the mapping that is returned."""
    deepest: dict[tuple[int, str], int] = {}
    depth, real = [0], injector.enter

    def enter(step: int, phase: str) -> None:
        real(step, phase)
        depth[0] = 1

    def heard(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            depth[0] += 1
            at = (injector.step, injector.phase)
            deepest[at] = max(deepest.get(at, 0), depth[0])
        elif event == "return":
            depth[0] -= 1

    injector.enter = enter  # type: ignore[method-assign]
    sys.setprofile(heard)
    try:
        yield deepest
    finally:
        sys.setprofile(None)
        del injector.enter
