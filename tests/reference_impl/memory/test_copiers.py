# SPDX-License-Identifier: Apache-2.0
"""Copies within host memory: their values, order, concurrency and faults."""

import ctypes
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from failing_threads import fails_before

from reference_impl.memory import copiers as module
from reference_impl.memory import interrupts
from reference_impl.memory.copiers import Copiers

COPIES = 6


@pytest.fixture
def cores(monkeypatch):
    """Let this many cores be idle, or as many as `cores` is set to later."""
    idle = [4]
    monkeypatch.setattr(module, "own_cores", lambda: 8)
    monkeypatch.setattr(module, "idle_cores", lambda own: idle[0])
    return idle


@pytest.fixture
def copiers(cores):
    copiers = Copiers("test-copies")
    yield copiers
    copiers.close()
    assert not any(thread.name == "test-copies" for thread in threading.enumerate())


def pairs(count=COPIES, size=1000):
    return [
        (torch.zeros(size, dtype=torch.uint8), torch.full((size,), 1 + n, dtype=torch.uint8))
        for n in range(count)
    ]


class Watched:
    """`memmove` that records its calls, and may be held up."""

    def __init__(self):
        self.lock = threading.Lock()
        self.sources, self.at_once, self.most = [], 0, 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def memmove(self, target, source, size):
        with self.lock:
            self.sources.append(source)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        self.may_go_on.wait()
        ctypes.memmove(target, source, size)
        with self.lock:
            self.at_once -= 1

    def wait_for(self, count):
        while len(self.sources) < count:
            self.may_go_on.wait(0.001)


@pytest.fixture
def watched(monkeypatch):
    watched = Watched()
    monkeypatch.setattr(module, "ctypes", watched)
    return watched


def test_every_byte_is_copied_in_parts(copiers, monkeypatch):
    monkeypatch.setattr(module, "_PART_BYTES", 300)
    some = pairs()
    copiers.copy(some)
    assert all(torch.equal(target, source) for target, source in some)


def test_threads_share_a_copy_and_the_first_is_there_before_the_next(copiers, watched, monkeypatch):
    monkeypatch.setattr(module, "_PART_BYTES", 100)
    some = pairs(3)
    watched.may_go_on.clear()
    started = [copiers.start(*pair, is_needed=True) for pair in some]
    watched.wait_for(4)
    assert [some[0][1].data_ptr() + 100 * n for n in range(4)] == sorted(watched.sources)
    watched.may_go_on.set()
    for copy, (target, source) in zip(started, some, strict=True):
        copiers.wait(copy)
        assert torch.equal(target, source)
    parts = [
        [start <= at < start + 1000 for at in watched.sources] for start in (s.data_ptr() for _, s in some)
    ]
    # Whatever is taken of a copy is taken before anything of the one behind it.
    assert all(sum(each) == 10 for each in parts)
    assert all(max(_places(a)) < min(_places(b)) + 4 for a, b in itertools.pairwise(parts))


def _places(flags):
    return [place for place, flag in enumerate(flags) if flag]


@pytest.mark.parametrize("idle", [1, 3])
def test_as_many_copy_at_once_as_cores_are_idle(copiers, cores, watched, idle):
    cores[0] = idle
    watched.may_go_on.clear()
    started = [copiers.start(*pair, is_needed=True) for pair in pairs()]
    watched.wait_for(idle)
    watched.may_go_on.set()
    for copy in started:
        copiers.wait(copy)
    assert watched.most == idle


def test_no_thread_takes_the_call_of_another(copiers, cores, watched, monkeypatch):
    # One that missed its call would sleep until then.
    monkeypatch.setattr(module, "SLICE_S", 1000.0)
    monkeypatch.setattr(module, "_PART_BYTES", 100)
    for _ in range(200):
        watched.may_go_on.clear()
        watched.sources.clear()
        some = [copiers.start(*pair, is_needed=True) for pair in pairs(2, size=400)]
        watched.wait_for(4)
        watched.may_go_on.set()
        for copy in some:
            copiers.wait(copy)
    # Those that wait now end soon.
    monkeypatch.setattr(module, "SLICE_S", 0.01)
    for call in [*copiers._waiting.values()]:
        call.put(None)


def test_an_update_that_begins_gets_its_cores_back(copiers, cores, watched):
    watched.may_go_on.clear()
    started = [copiers.start(*pair, is_needed=True) for pair in pairs(16)]
    watched.wait_for(4)
    cores[0] = 1
    watched.most = 0
    watched.may_go_on.set()
    for copy in started:
        copiers.wait(copy)
    # Begun jobs end; later ones run one at a time.
    assert watched.most <= 1 + 3
    assert not copiers._needed


def test_what_somebody_waits_for_goes_first(copiers, cores, watched):
    cores[0] = 1
    some = pairs()
    watched.may_go_on.clear()
    first = copiers.start(*some[0], is_needed=False)
    watched.wait_for(1)
    others = [copiers.start(*pair, is_needed=False) for pair in some[1:4]]
    needed = [copiers.start(*pair, is_needed=True) for pair in some[4:]]
    with ThreadPoolExecutor(1) as waiting:
        # From here on it is needed too, behind those.
        wait = waiting.submit(copiers.wait, others[2])
        while others[2] in copiers._others:
            wait.done()
        watched.may_go_on.set()
        for copy in (first, *others, *needed):
            copiers.wait(copy)
        wait.result()
    order = [
        next(n for n, (_, source) in enumerate(some) if source.data_ptr() == at) for at in watched.sources
    ]
    assert order == [0, 4, 5, 3, 1, 2]


def test_a_copy_that_fails_tells_who_waits_and_no_other_writes_later(copiers, cores, monkeypatch):
    cores[0] = 1
    some = pairs()
    failing = some[2][1].data_ptr()

    class Failing:
        @staticmethod
        def memmove(target, source, size):
            if source == failing:
                raise MemoryError("planted")
            ctypes.memmove(target, source, size)

    monkeypatch.setattr(module, "ctypes", Failing)
    with pytest.raises(MemoryError, match="planted"):
        copiers.copy(some)
    for _, source in some:
        source.fill_(99)
    monkeypatch.undo()
    assert all(target[0] != 99 for target, _ in some)
    again = pairs()
    copiers.copy(again)
    assert all(torch.equal(target, source) for target, source in again)


def test_a_thread_that_does_not_start_fails_the_first_copy_alone(copiers, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (target, source), *_ = pairs()
    with pytest.raises(RuntimeError, match="can't start"):
        copiers.start(target, source, is_needed=True)
    monkeypatch.undo()
    copiers.copy([(target, source)])
    assert torch.equal(target, source)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    # The one that runs does them all.
    copiers.copy(pairs())


def test_closed_copiers_take_nothing_and_what_was_queued_is_lost(cores, watched):
    cores[0] = 1
    copiers = Copiers("test-copies")
    watched.may_go_on.clear()
    started = [copiers.start(*pair, is_needed=True) for pair in pairs()]
    watched.wait_for(1)
    with ThreadPoolExecutor(1) as closing:
        closed = closing.submit(copiers.close)
        while not copiers._worker._is_closed:
            closed.done()
        watched.may_go_on.set()
        closed.result()
    assert all(copy.is_over for copy in started)
    copiers.close()
    with pytest.raises(RuntimeError, match="closed"):
        copiers.start(*pairs()[0], is_needed=True)


def raised_by(call, *arguments):
    try:
        call(*arguments)
    except (MemoryError, RuntimeError) as error:
        return error
    return None


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_no_fault_in_the_bookkeeping_of_a_thread_leaves_a_wait_without_an_end(cores, monkeypatch, every):
    monkeypatch.setattr(module, "_DEADLINE_S", 20.0)
    # Waits that end at once if a thread is dead.
    monkeypatch.setattr(interrupts, "SLICE_S", 0.001)
    monkeypatch.setattr(module, "SLICE_S", 0.001)
    # One thread, so that the count of its bytecodes is exact.
    monkeypatch.setattr(module, "own_cores", lambda: 1)
    told = 0
    for nth in itertools.count(1, every):
        copiers = Copiers("test-copies")
        some = pairs(3)
        with fails_before(nth, ("memory/copiers.py",), but_lines=("with self._lock",)) as count:
            started = [copiers.start(*pair, is_needed=False) for pair in some]
            for copy in started:
                error = raised_by(copiers.wait, copy)
                assert "within 20 s" not in str(error), f"before bytecode {nth}"
                told += error is not None
            copiers.close()
        for copy, (target, source) in zip(started, some, strict=True):
            fine = copy.is_over and copy.error is None
            assert not fine or torch.equal(target, source), f"before bytecode {nth}"
        if count[0] < nth:
            break
    assert told > 0
