# SPDX-License-Identifier: Apache-2.0
"""A worker's task runs once, in turn, or never; and its waiter hears of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import forked
import pytest
from failing_threads import fails_before

from reference_impl.memory import worker as worker_module
from reference_impl.memory.worker import Worker

# Long for a living thread, short for a hanging test.
DEADLINE_S = 20.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("tested")
    yield worker
    worker.close()


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_task_whose_submit_has_raised_never_runs(worker, monkeypatch):
    ran: list[str] = []
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(RuntimeError, match=r"can't start new thread; expected room.*ulimit -u"):
            worker.submit(lambda: ran.append("refused"))
    worker.wait(worker.submit(lambda: ran.append("taken")), deadline_s=DEADLINE_S)
    assert ran == ["taken"]


def test_threads_that_cannot_be_started_leave_the_tasks_to_those_that_are(monkeypatch):
    worker = Worker("tested", threads=2)
    first = worker.submit(lambda: 1)
    refuse_threads(monkeypatch)
    second = worker.submit(lambda: 2)
    assert [worker.wait(each, deadline_s=DEADLINE_S) for each in (first, second)] == [1, 2]
    monkeypatch.undo()
    worker.close()


def test_each_task_has_a_thread_where_so_many_are_allowed():
    worker, together = Worker("tested", threads=3), threading.Barrier(3)
    for future in [worker.submit(lambda: together.wait(DEADLINE_S)) for _ in range(3)]:
        worker.wait(future, deadline_s=DEADLINE_S)
    worker.end()
    for thread in worker._threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert worker.is_alive, "all that was queued has been carried out"


def test_what_a_task_has_raised_is_raised(worker):
    def fail() -> None:
        raise ValueError("the task's own")

    with pytest.raises(ValueError, match="the task's own"):
        worker.wait(worker.submit(fail), deadline_s=DEADLINE_S)
    assert worker.wait(worker.submit(lambda: 5), deadline_s=DEADLINE_S) == 5


def test_a_closed_one_takes_no_tasks(worker):
    worker.close()
    with pytest.raises(RuntimeError, match=r"closed; expected .*; try constructing a new one"):
        worker.submit(lambda: None)


def test_closing_forgets_what_is_queued(worker):
    running, leave, ran = threading.Event(), threading.Event(), []
    first = worker.submit(lambda: [running.set(), leave.wait(DEADLINE_S)])
    second = worker.submit(lambda: ran.append("forgotten"))
    assert running.wait(DEADLINE_S)
    closing = threading.Thread(target=worker.close)
    closing.start()
    while not second.cancelled():
        pass
    leave.set()
    closing.join(DEADLINE_S)
    assert first.done()
    assert not ran


def test_a_result_that_cannot_be_handed_over_is_an_error(worker, monkeypatch):
    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise MemoryError("in the bookkeeping")

    monkeypatch.setattr(Future, "set_result", fail)
    with pytest.raises(MemoryError, match="in the bookkeeping"):
        worker.wait(worker.submit(lambda: 5), deadline_s=DEADLINE_S)
    assert worker.wait(worker.submit(lambda: 6), deadline_s=DEADLINE_S) == 6


def test_a_thread_without_memory_to_begin_a_task_goes_on(worker, monkeypatch):
    """Nothing of the task has run: its waiter hears of the error, and close() and later tasks do not."""

    def lacks(*_):
        raise MemoryError("to begin a task")

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "_carry_out", lacks)
        future = worker.submit(lambda: 5)
        with pytest.raises(MemoryError, match="to begin a task"):
            worker.wait(future, deadline_s=DEADLINE_S)
    assert worker.wait(worker.submit(lambda: 6), deadline_s=DEADLINE_S) == 6


def test_a_thread_that_has_died_says_of_what():
    def prepare() -> None:
        raise MemoryError("of the thread")

    worker = Worker("tested", prepare=prepare)
    with pytest.raises(RuntimeError, match="thread 'tested' has died with a task unfinished") as raised:
        worker.wait(worker.submit(lambda: 5), deadline_s=DEADLINE_S)
    assert str(raised.value.__cause__) == "of the thread"
    worker.close()


# Before the thread's first line Python itself tells of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_before_any_bytecode_of_the_thread_leaves_nobody_waiting():
    """The task is carried out, or its waiter hears of the error or of the thread that has died of it."""
    with fails_before(-1, (worker_module.__file__,)) as count:
        carry_out_two()
    outcomes = set()
    for nth in range(1, count[0] + 1):
        with fails_before(nth, (worker_module.__file__,)):
            outcomes.add(carry_out_two())
    assert outcomes == {"done", "MemoryError", "thread 'tested' has died"}


def carry_out_two() -> str:
    worker = Worker("tested")
    try:
        for future in [worker.submit(lambda: 5), worker.submit(lambda: 5)]:
            assert worker.wait(future, deadline_s=DEADLINE_S) == 5
        return "done"
    except MemoryError as error:
        return type(error).__name__
    except RuntimeError as error:
        return str(error)[:24]
    finally:
        worker.close()


def test_a_thread_that_outlives_the_main_one_trains_on(tmp_path):
    """Python ends the threads of `concurrent.futures` with the main one."""
    program = tmp_path / "outlives.py"
    program.write_text(_OUTLIVES)
    done = forked.run(program, timeout_s=120)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["trained"], "", 0)


_OUTLIVES = """
import tempfile, threading
import torch
from reference_impl import ActivationOffloader
from reference_impl.memory.disk import DiskSpace

def train():
    threading.main_thread().join()
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    space = DiskSpace(path=tempfile.gettempdir(), limit_bytes=2**24, staging_bytes=2**22)
    options = dict(layers=list(model), min_bytes=1, host_limit_bytes=1, disk=space)
    with ActivationOffloader(model, **options) as offloader:
        model(torch.ones(64, 32)).sum().backward()
        assert offloader.offloaded_bytes
    print("trained")

threading.Thread(target=train).start()
"""


def test_a_thread_that_lacks_memory_to_end_the_others_does_not_keep_them():
    class PassesOnlyMains(SimpleQueue):
        def put(self, item):
            if item is None and threading.current_thread() is not threading.main_thread():
                raise MemoryError("for the other threads")
            super().put(item)

    worker = Worker("two", threads=2)
    worker._tasks = PassesOnlyMains()
    both = threading.Barrier(2)
    for future in [worker.submit(both.wait) for _ in range(2)]:
        worker.wait(future)
    worker.close()
    assert not any(thread.is_alive() for thread in worker._threads)
