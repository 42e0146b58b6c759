# SPDX-License-Identifier: Apache-2.0
"""Raises MemoryError before a chosen bytecode of threads that start meanwhile."""

import dis
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Python marks the begin of a `try` with it, outside of the guard of the block around it: it cannot raise.
_NOTHING = dis.opmap["NOP"]


def does_something(frame: FrameType) -> bool:
    """Return whether the bytecode that `frame` is at can raise, or let a signal's handler run."""
    return frame.f_code.co_code[frame.f_lasti] != _NOTHING


@contextmanager
def fails_before(nth: int, files: tuple[str, ...], *, but_lines: tuple[str, ...] = ()) -> Iterator[list[int]]:
    """Fail before bytecode `nth` of files whose paths end like `files`; yield the list of how many there were.

    Bytecodes of lines that begin like `but_lines` do not count, nor bytecodes that do nothing.
    """
    count = [0]

    def each(frame: FrameType, event: str, argument: Any) -> Any:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).lstrip()
        if event == "opcode" and does_something(frame) and not line.startswith(but_lines):
            count[0] += 1
            if count[0] == nth:
                raise MemoryError(f"before bytecode {nth}")
        return each

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        # Python 3.12 sends opcode events only if a frame asked for them before tracing began.
        frame.f_trace_opcodes = True
        sys.settrace(enter)
        return enter(frame, event, argument)

    threading.settrace(trace)
    try:
        yield count
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
