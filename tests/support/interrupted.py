# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C before each bytecode of some functions: `interrupted` sends one, `at_each_bytecode` one after the other."""

import os
import signal
import sys

from failing_threads import does_something

# Of one change, in the slow tier. `make test-faults` takes fifty times as many, nearly all.
PLACES = 50 * int(os.environ.get("FAULT_SEEDS_TIMES", "1"))


def interrupted(nth, run, files, functions=None):
    """Run with SIGINT before the `nth` bytecode of `files`; return how many were reached."""
    reached = 0

    def enter(frame, event, argument):
        code = frame.f_code
        if not code.co_filename.endswith(files) or (functions and code.co_name not in functions):
            return None
        frame.f_trace_opcodes = True
        return each

    def each(frame, event, argument):
        nonlocal reached
        if event == "opcode" and does_something(frame):
            reached += 1
            if reached == nth:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)
        return each

    # Python 3.12 sends opcode events only if a frame asked for them before tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(enter)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return reached


def at_each_bytecode(begin, act, check, *, files, functions=None, most=None):
    """`act(begin())` with Ctrl-C before each bytecode of `files`, and `check` with the same behind it.

    `functions` are the names of those that count, by default all. Of more than `most` bytecodes every so many.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        subject = begin()
        bytecodes = interrupted(0, lambda: act(subject), files, functions)
        assert bytecodes > 0
        check(subject, "without an interrupt")
        for nth in range(1, bytecodes + 1, -(-bytecodes // (most or bytecodes))):
            subject = begin()
            interrupted(nth, lambda subject=subject: act(subject), files, functions)
            check(subject, f"bytecode {nth} of {bytecodes}")
    finally:
        signal.signal(signal.SIGINT, before)
