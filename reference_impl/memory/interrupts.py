"""Keeps signals from interrupting what must happen as a whole.

Python runs signal handlers between two bytecodes of the main thread, and a handler may raise: Ctrl-C becomes
KeyboardInterrupt anywhere. Inside `deferred_interrupts()` signals are noted, and their handlers run when the region
ends. A region should be short and wait for nothing, because it cannot be interrupted. Python interrupts no other
thread, so there a region does nothing.

Explained in docs/reliability.md.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

# Signals that programs catch. The others either cannot be caught or tell of a fault of the process itself.
_CAUGHT = tuple(
    int(getattr(signal, name))
    for name in (
        *("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGXCPU"),
        *("SIGVTALRM", "SIGPROF", "SIGCHLD", "SIGCONT", "SIGTSTP", "SIGWINCH"),
    )
    if hasattr(signal, name)
)
# Only the main thread touches these.
_depth = 0
# How often handlers have been put back.
_ended = 0
_handlers: dict[int, Any] = {}
_noted: list[tuple[int, Any]] = []


class deferred_interrupts:  # noqa: N801 (used like a function, as contextlib's)
    """Run the handlers of signals at the end of the region; regions may stand inside each other."""

    __slots__ = ("_applies",)

    def __enter__(self) -> Self:
        global _depth
        self._applies = threading.get_ident() == threading.main_thread().ident
        if not self._applies:
            return self
        if _depth == 0:
            try:
                ended = -1
                while ended != _ended:
                    # Again, if a finalizer's own region has begun and ended meanwhile.
                    ended = _ended
                    # `signal.signal` makes enums of what it takes and returns, in ten times the time of this one.
                    for number in _CAUGHT:
                        handler = _signal.getsignal(number)
                        if callable(handler) and handler is not _note:
                            _handlers[number] = handler
                            _signal.signal(number, _note)
            except BaseException:
                # A signal came that was not deferred yet: the region has not begun.
                _put_back()
                raise
        # Last: from here on signals are noted, and the region is sure to end.
        _depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _depth, _noted
        if not self._applies:
            return
        noted: list[tuple[int, Any]] = []
        if _depth == 1:
            # A finalizer's own region may begin and end below: there, what a handler raises would be lost.
            noted, _noted = _noted, noted
        _depth -= 1
        if _depth:
            return
        # From here on a signal is handled at once, also where its handler is not put back yet.
        try:
            _put_back()
        finally:
            try:
                _run(noted)
            finally:
                _run(_noted)


def _put_back() -> None:
    """Give every signal its own handler again; raises what a handler has raised meanwhile, afterwards."""
    global _ended
    _ended += 1
    raised: BaseException | None = None
    while _handlers:
        try:
            # A copy, because a finalizer's own region may put them back meanwhile.
            for number, handler in _handlers.copy().items():
                # Somebody may have set another one inside the region; that stays.
                if _signal.getsignal(number) is _note:
                    _signal.signal(number, handler)
                _handlers.pop(number, None)
        except BaseException as error:
            raised = raised or error
    try:
        if raised is not None:
            raise raised
    finally:
        # It knows this frame, and with it all that was interrupted.
        del raised


def _run(noted: list[tuple[int, Any]]) -> None:
    """Run the handlers of all noted signals, also where one of them raises."""
    if noted:
        number, handler = noted.pop(0)
        try:
            handler(number, sys._getframe())
        finally:
            _run(noted)


def _note(number: int, frame: FrameType | None) -> None:
    """Note a signal inside a region; outside, where an interrupt has left this in a handler's place, handle it."""
    handler = _handlers.get(number, signal.default_int_handler if number == signal.SIGINT else None)
    if handler is None:
        return
    if _depth:
        _noted.append((number, handler))
    else:
        handler(number, frame)
