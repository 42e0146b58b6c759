# SPDX-License-Identifier: Apache-2.0
"""Real signals at a chosen or at a random moment of training.

`Interrupt.comes` sends a signal to this process, SIGINT unless another is chosen; its handler raises KeyboardInterrupt.
It comes before the n-th bytecode of the package, or of torch around a step, on the main thread; or from another thread
after a time, at another place in each run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from injector import Injector

import reference_impl

_NAMED = frozenset(int(each) for each in signal.Signals)
# Code that runs between the user's loop and the package in a step.
AROUND_A_STEP = ("torch/amp/grad_scaler.py", "torch/optim/optimizer.py", "/contextlib.py")
PACKAGE = os.path.dirname(reference_impl.__file__) + os.sep


@dataclass(frozen=True)
class Interrupt:
    """Signal `number` before bytecode `nth`, counted as by `counted`, or after `delay_s` seconds of training."""

    nth: int | None
    delay_s: float = 0.0
    also: tuple[str, ...] = AROUND_A_STEP
    number: int = signal.SIGINT
    may_break = False

    def __str__(self) -> str:
        name = signal.Signals(self.number).name if self.number in _NAMED else f"signal {self.number}"
        if self.nth is None:
            return f"{name} after {self.delay_s * 1e3:.1f} ms"
        return f"{name} before bytecode {self.nth}"

    @contextmanager
    def comes(self, injector: Injector) -> Iterator[None]:
        """Send the signal while the program inside runs; `injector.error` says that it has been sent."""
        before = signal.signal(self.number, signal.default_int_handler)

        def send() -> None:
            injector.error = KeyboardInterrupt()
            os.kill(os.getpid(), self.number)

        try:
            with self._timed(send) if self.nth is None else counted(self.nth, send, of=of_package(self.also)):
                yield
                # A signal that is still under way must not hit the judge.
                signal.signal(self.number, signal.SIG_IGN)
        finally:
            if signal.getsignal(self.number) in (signal.default_int_handler, signal.SIG_IGN):
                signal.signal(self.number, before)

    @contextmanager
    def _timed(self, send: Callable[[], None]) -> Iterator[None]:
        over = threading.Event()

        def wait() -> None:
            if not over.wait(self.delay_s):
                send()

        timer = threading.Thread(target=wait, daemon=True)
        timer.start()
        try:
            yield
        finally:
            over.set()
            timer.join()


def of_package(also: tuple[str, ...] = AROUND_A_STEP) -> Callable[[str], bool]:
    """Return whether a path is a file of the package, or ends like one of `also`."""
    return lambda path: path.startswith(PACKAGE) or path.endswith(also)


@contextmanager
def counted(
    nth: int | None, send: Callable[[], None], *, of: Callable[[str], bool] | None = None
) -> Iterator[list[int]]:
    """Count bytecodes on this thread, into the list that is returned; call `send` before the `nth`.

    Those count whose file's path is one `of`: by default of the package, and of torch around a step.
    """
    count, is_counted = [0], of or of_package()

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_counted(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    def each(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            count[0] += 1
            if count[0] == nth:
                sys.settrace(None)
                send()
        return each

    # Python 3.12 sends opcode events only if a frame asked for them before tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(enter)
    try:
        yield count
    finally:
        sys.settrace(None)


def seconds_of(train: Callable[[], object]) -> float:
    """Return how long `train` takes."""
    start = time.perf_counter()
    train()
    return time.perf_counter() - start
