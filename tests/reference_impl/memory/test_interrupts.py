# SPDX-License-Identifier: Apache-2.0
"""A region runs to its end whatever signals arrive, and their handlers run then."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from python_faults import calls_counted

from reference_impl.memory import interrupts
from reference_impl.memory.interrupts import (
    UninterruptedCondition,
    UninterruptedLock,
    deferred_interrupts,
    wait_uninterrupted,
)

REAL_TIME = signal.SIGRTMIN + 3


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    """Every test leaves the handlers and the recursion limit as it found them, and nothing noted."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGIO, REAL_TIME)
    limit = sys.getrecursionlimit()
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == [signal.default_int_handler] * len(numbers)
    assert sys.getrecursionlimit() == limit
    assert_no_region_is_left()


def assert_no_region_is_left() -> None:
    assert not interrupts._noted
    assert (interrupts._depth, interrupts._limit_inside) == (0, 0)
    assert all(signal.getsignal(number) is not interrupts._note for number in interrupts._SIGNALS)


def run_region(body: Callable[[], object]) -> None:
    with deferred_interrupts():
        body()


def test_the_handler_runs_when_the_region_ends():
    done = []

    def body() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        run_region(body)
    assert done == ["all of it"]


def test_a_quiet_region_changes_nothing():
    with deferred_interrupts():
        pass


def test_a_region_inside_another_ends_with_the_outer_one():
    done = []

    def body() -> None:
        run_region(lambda: signal.raise_signal(signal.SIGINT))
        done.append("the rest of the outer one")

    with pytest.raises(KeyboardInterrupt):
        run_region(body)
    assert done == ["the rest of the outer one"]


def test_the_exception_of_the_body_is_the_interrupts_context():
    def body() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("the body's own")

    with pytest.raises(KeyboardInterrupt) as interrupted:
        run_region(body)
    assert str(interrupted.value.__context__) == "the body's own"


def test_all_handlers_run_although_one_raises():
    ran = []

    def note(number: int, frame: FrameType | None) -> None:
        ran.append(number)

    signal.signal(signal.SIGTERM, note)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_region(lambda: [signal.raise_signal(each) for each in (signal.SIGINT, *[signal.SIGTERM] * 2)])
        assert signal.getsignal(signal.SIGTERM) is note
    finally:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    assert ran == [signal.SIGTERM, signal.SIGTERM]


def test_a_handler_that_is_set_inside_the_region_stays():
    ran = []
    with deferred_interrupts():
        signal.signal(signal.SIGTERM, lambda number, frame: ran.append(number))
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    assert ran == [signal.SIGTERM]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_without_a_handler_of_python_are_left_alone(handler: signal.Handlers):
    signal.signal(signal.SIGUSR1, handler)
    with deferred_interrupts():
        inside = signal.getsignal(signal.SIGUSR1)
    after = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    assert (inside, after) == (handler, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGIO, REAL_TIME])
def test_a_signal_before_any_bytecode_cuts_no_region_in_two(number: int):
    """Any signal may have a handler that raises."""
    done: list[str] = []

    def region() -> None:
        with deferred_interrupts():
            done.append("begun")
            done.append("ended")

    region()
    count = _interrupted(region, {})
    outcomes = []
    for nth in range(1, count + 1):
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            _interrupted(region, {nth: number})
        assert_no_region_is_left()
        outcomes.append(len(done))
    assert set(outcomes) == {0, 2}
    assert outcomes == sorted(outcomes)


def test_two_signals_before_any_bytecodes_leave_all_handlers_in_place():
    # CPython 3.11 takes an exception from a trace function at the end of a `with` block for one that is being handled
    # from then on: every later one of this process would name it as its context, and keep its frames.
    process = multiprocessing.get_context("fork").Process(target=interrupt_twice)
    process.start()
    process.join()
    assert process.exitcode == 0


def interrupt_twice() -> None:
    def region() -> None:
        with deferred_interrupts():
            pass

    region()
    count = _interrupted(region, {})
    for nth in range(1, count, 4):
        for other in range(nth + 1, count + 40, 5):
            with suppress(KeyboardInterrupt):
                _interrupted(region, {nth: signal.SIGIO, other: signal.SIGTERM})
            # The region interrupted by the second signal ends with the next one.
            with suppress(KeyboardInterrupt):
                region()
            assert_no_region_is_left()


@pytest.mark.parametrize("bytecode", range(1, 150, 7))
def test_a_handler_that_sets_another_has_the_last_word(bytecode: int):
    """The first Ctrl-C often asks for an end, and lets the second one kill."""

    def set_another(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)

    signal.signal(signal.SIGTERM, set_another)
    _interrupted(lambda: run_region(lambda: None), {bytecode: signal.SIGTERM})
    try:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def test_a_region_at_the_recursion_limit_does_not_begin_or_has_room():
    done: list[str] = []

    def region() -> None:
        with deferred_interrupts():
            done.append("begun")
            deep(60, lambda: signal.raise_signal(signal.SIGINT))
            done.append("ended")

    limit, outcomes = sys.getrecursionlimit(), []
    for room in range(200, 0, -1):
        done.clear()
        try:
            deep(limit - room, region)
        except (RecursionError, KeyboardInterrupt) as error:
            outcomes.append((type(error), len(done)))
        assert sys.getrecursionlimit() == limit
        assert_no_region_is_left()
    assert set(outcomes) == {(KeyboardInterrupt, 2), (RecursionError, 0)}


def test_a_user_keeps_the_recursion_limit_that_is_set_inside_a_region():
    limit = sys.getrecursionlimit()
    run_region(lambda: sys.setrecursionlimit(limit + 10))
    after = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    assert after == limit + 10


def deep(frames: int, call: Callable[[], object]) -> None:
    if frames:
        deep(frames - 1, call)
    else:
        call()


def test_a_finalizer_that_runs_while_the_region_ends_takes_no_signal_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Garbage may be collected there, and an exception in a finalizer is lost."""
    get_handler = interrupts._get_handler
    finalizers: list[bool] = []

    def collecting(number: int) -> object:
        if finalizers and finalizers.pop():
            with suppress(KeyboardInterrupt), deferred_interrupts():
                pass
        return get_handler(number)

    monkeypatch.setattr(interrupts, "_get_handler", collecting)
    with pytest.raises(KeyboardInterrupt):
        run_region(lambda: [signal.raise_signal(signal.SIGINT), finalizers.append(True)])
    assert not finalizers


def test_a_handler_runs_once_the_lock_is_free():
    lock, done = UninterruptedLock(), []

    def body() -> None:
        with lock:
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        body()
    with lock:
        assert done == ["all of it"]


def test_a_lock_that_is_taken_twice_is_given_back_twice():
    inner = threading.RLock()
    lock = UninterruptedLock(inner)

    def body() -> None:
        with lock:
            with lock:
                signal.raise_signal(signal.SIGINT)
            taken.append(inner._is_owned())

    taken: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        body()
    assert taken == [True]
    assert not inner._is_owned()


def test_another_thread_that_takes_the_lock_defers_nothing():
    """Nor does it end the region of the main thread, which waits for it."""
    lock, holds = UninterruptedLock(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            go_on.wait()

    go_on = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    go_on.set()
    with lock:
        assert interrupts._depth == 1
    thread.join()


def test_a_wait_for_a_condition_ends_as_the_region_of_its_own_thread():
    """Others take the lock while it waits, and wait too: each gives back its own region."""
    changed, steps = UninterruptedCondition(), []

    def other() -> None:
        with changed:
            steps.append("other has the lock")
            changed.notify_all()
            while "main is through" not in steps:
                changed.wait()

    thread = threading.Thread(target=other)

    def body() -> None:
        with changed:
            thread.start()
            signal.raise_signal(signal.SIGINT)
            while not steps:
                changed.wait()
            steps.append("main is through")
            changed.notify_all()

    with pytest.raises(KeyboardInterrupt):
        body()
    thread.join()
    assert steps == ["other has the lock", "main is through"]
    assert_no_region_is_left()


def test_a_wait_that_lacks_memory_gives_the_lock_back():
    """In a thread that then ends: whoever closes the queue took the lock for ever."""

    def fail(where: str) -> None:
        raise MemoryError(where)

    def wait(changed: UninterruptedCondition) -> None:
        with suppress(MemoryError), changed:
            changed.wait(0.0)

    for nth in itertools.count(1):
        changed = UninterruptedCondition()
        with calls_counted(nth, fail, on_main=False) as count:
            thread = threading.Thread(target=wait, args=[changed])
            thread.start()
            thread.join()
        assert changed._condition.acquire(blocking=False), f"call {nth}"
        if count[0] < nth:
            break
    assert nth > 4


def test_a_signal_does_not_end_a_wait_that_it_comes_in():
    gate = threading.Lock()

    def wait(timeout_s: float) -> bool:
        signal.raise_signal(signal.SIGINT)
        with gate:
            waits.append(timeout_s)
        return True

    waits: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        wait_uninterrupted(wait)
    assert waits == [interrupts.SLICE_S]
    assert not gate.locked()


def test_another_thread_defers_nothing():
    """It is never interrupted; the main thread's handlers run at once meanwhile."""
    inside, leave = threading.Event(), threading.Event()

    def region() -> None:
        with deferred_interrupts():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=region)
    thread.start()
    inside.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        leave.set()
        thread.join()


def test_no_region_is_cut_in_two_by_real_signals():
    """A timer of the kernel interrupts a child 300 times; no region ends half done, and the handler is back."""
    child = subprocess.run(
        [sys.executable, "-c", _HAMMERED, str(Path(interrupts.__file__).parent)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert child.stdout.split() == ["0", "True"]


def _interrupted(call: Callable[[], object], signals: dict[int, int]) -> int:
    """Call with a signal before each numbered bytecode of `interrupts`; return how many bytecodes there are."""
    count = 0

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != interrupts.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    def each(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
            if count in signals:
                # An exception ends the tracing of Python, so that it has to be begun again.
                sys.settrace(None)
                try:
                    signal.raise_signal(signals[count])
                finally:
                    sys.settrace(enter)
        return each

    # Python 3.12 sends opcode events only if a frame asked for them before tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


_HAMMERED = """
import random, signal, sys
sys.path.insert(0, sys.argv[1])
from interrupts import deferred_interrupts

armed = False

def interrupt(number, frame):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 2e-4)
torn = interrupted = 0
while interrupted < 300:
    begun = ended = 0
    try:
        armed = True
        while True:
            with deferred_interrupts():
                begun += 1
                for _ in range(random.randrange(40)):
                    pass
                ended += 1
    except KeyboardInterrupt:
        interrupted += 1
        torn += begun != ended
signal.setitimer(signal.ITIMER_REAL, 0)
with deferred_interrupts():
    pass
print(torn, signal.getsignal(signal.SIGALRM) is interrupt)
"""
