"""A region runs to its end whatever signals arrive, and their handlers run then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from reference_impl.memory import interrupts
from reference_impl.memory.interrupts import deferred_interrupts


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    """Every test leaves the handlers as it found them, and nothing noted."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == [signal.default_int_handler] * len(numbers)
    assert not interrupts._noted
    assert not interrupts._handlers


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


def test_a_signal_while_the_region_begins_leaves_all_handlers_in_place(monkeypatch: pytest.MonkeyPatch):
    _raise_at_call(monkeypatch, "getsignal", 4)
    with pytest.raises(KeyboardInterrupt):
        run_region(lambda: pytest.fail("the region must not begin"))
    monkeypatch.undo()
    with deferred_interrupts():
        pass


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_signal_while_the_region_ends_leaves_all_handlers_in_place(
    monkeypatch: pytest.MonkeyPatch, call: int
):
    with pytest.raises(KeyboardInterrupt):
        run_region(lambda: _raise_at_call(monkeypatch, "getsignal", call))


def test_a_finalizer_that_runs_while_the_region_ends_takes_no_signal_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Garbage may be collected there, and what is raised in a finalizer nobody hears of."""
    put_back = interrupts._put_back
    finalizers = [True]

    def collecting() -> None:
        if finalizers and finalizers.pop():
            with suppress(KeyboardInterrupt), deferred_interrupts():
                pass
        put_back()

    monkeypatch.setattr(interrupts, "_put_back", collecting)
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert not finalizers


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


def _raise_at_call(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """Have a signal arrive right before the `call`-th call of `_signal.<name>` from here on."""
    real: Callable[[int], object] = getattr(interrupts._signal, name)
    calls = 0

    def raising(number: int) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(number)

    monkeypatch.setattr(interrupts._signal, name, raising)


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
