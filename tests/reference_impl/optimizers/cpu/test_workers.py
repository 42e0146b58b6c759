# SPDX-License-Identifier: Apache-2.0
import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.device import REACHED
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.optimizers.cpu.workers import DeadlineWorkers, Job, cpu_budget, threads_beside
from reference_impl.optimizers.step import WorkLostError


class Pending:
    def __init__(self):
        self._reached = threading.Event()

    def query(self):
        return self._reached.is_set()

    def synchronize(self):
        self._reached.wait(10)

    def reach(self):
        self._reached.set()


@pytest.fixture
def workers():
    workers = DeadlineWorkers(threads=1)
    yield workers
    workers.close()


def block(workers):
    """Keep the only worker busy until the returned event is set."""
    started, go_on = threading.Event(), threading.Event()
    workers.submit([Job(-1, REACHED, lambda: (started.set(), go_on.wait(10)))])
    started.wait(10)
    return go_on


@settings(max_examples=30)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_the_earliest_deadline_goes_first(deadlines):
    workers = DeadlineWorkers(threads=1)
    go_on, order = block(workers), []
    for deadline in deadlines:
        workers.submit([Job(deadline, REACHED, lambda deadline=deadline: order.append(deadline))])
    go_on.set()
    workers.wait_idle()
    assert order == sorted(deadlines)
    workers.close()


def test_what_has_arrived_goes_before_what_has_not(workers):
    go_on, order, late = block(workers), [], Pending()
    workers.submit(
        [Job(0, late, lambda: order.append("late")), Job(1, REACHED, lambda: order.append("here"))]
    )
    go_on.set()
    while order != ["here"]:
        assert len(order) < 2
    late.reach()
    workers.wait_idle()


def test_an_event_that_many_jobs_share_is_asked_once(workers):
    """In Python's lock, which the training loop needs too."""
    go_on, late, asked = block(workers), Pending(), []
    late.query = lambda: asked.append(late) or Pending.query(late)
    workers.submit([Job(deadline, late, late.reach) for deadline in range(50)])
    go_on.set()
    workers.run_job = lambda job: job.run()
    workers.wait_idle()
    # Before each job, by the only thread.
    assert len(asked) <= 50


def test_each_thread_computes_on_one_core_and_leaves_the_callers_setting_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    workers = DeadlineWorkers(threads=2)
    seen = []
    workers.submit([Job(0, REACHED, lambda: seen.append(torch.get_num_threads())) for _ in range(4)])
    workers.wait_idle()
    assert seen == [1, 1, 1, 1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    workers.close()


def raising(error):
    raise error


def test_a_job_that_fails_has_lost_what_it_was_updating(workers):
    ran = []
    workers.submit(
        [Job(0, REACHED, lambda: raising(ZeroDivisionError("inside"))), Job(1, REACHED, ran.append)]
    )
    calls = [workers.wait_idle, workers.check, lambda: workers.submit([Job(0, REACHED, lambda: None)])]
    for call in calls * 2:
        with pytest.raises(WorkLostError, match=r"inside.*try .*loading the last checkpoint") as caught:
            call()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert ran == []


def test_an_error_that_lasts_stops_the_rest_and_stays(workers):
    go_on, ran = block(workers), []
    workers.submit(
        [
            Job(0, REACHED, lambda: raising(WorkLostError("inside an update"))),
            Job(1, REACHED, lambda: ran.append(1)),
        ]
    )
    go_on.set()
    for _ in range(2):
        with pytest.raises(WorkLostError, match="inside an update"):
            workers.wait_idle()
    with pytest.raises(WorkLostError):
        workers.wait_until(threading.Event())
    assert ran == []


def test_a_wait_for_what_nobody_does_ends(workers):
    with pytest.raises(RuntimeError, match="has not been queued"):
        workers.wait_until(threading.Event())


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("fails", [False, True])
def test_threads_end_with_their_owner(threads, fails):
    workers = DeadlineWorkers(threads=threads)
    mine = [each for each in threading.enumerate() if each.name == "offload-update"][-threads:]
    workers.submit([Job(0, REACHED, lambda: 1 // 0 if fails else None)])
    if fails:
        while workers.error is None:
            pass
    else:
        workers.wait_idle()
    del workers
    gc.collect()
    for thread in mine:
        thread.join(5)
        assert not thread.is_alive()


def test_threads_end_where_their_finalizer_cannot_be_made(monkeypatch):
    before = threading.active_count()

    def fails(*_):
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(weakref, "finalize", fails)
        with pytest.raises(MemoryError):
            DeadlineWorkers(threads=2)
    for thread in threading.enumerate():
        if thread.name == "offload-update":
            thread.join(10)
    assert threading.active_count() == before


def test_closed_workers_say_so(workers):
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit([Job(0, REACHED, lambda: None)])


def test_the_budget_is_shared_by_the_ranks_of_a_node(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cpu_budget() == 14
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpu_budget() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert cpu_budget() == 1


def test_beside_a_stream_few_threads_update(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert threads_beside(0) == cpu_budget() == 14
    # A quarter of the states on the CPU, beside 10 bytes an element of the others; a half; nearly all.
    assert threads_beside(10 * 0.77 / 0.23) == 5
    assert threads_beside(12 * 0.5 / 0.5) == 14
    assert threads_beside(12 * 0.05 / 0.95) == 14
    # Where next to nothing is left to the CPU, a third of the cores.
    assert threads_beside(1e9) == 5
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2)))
    assert threads_beside(1e9) == 1


@pytest.mark.parametrize(("split", "threads"), [((0.0, 0.0, 1.0), 14), ((0.1, 0.7, 0.2), 5)])
def test_an_optimizer_starts_the_threads_that_its_split_needs(monkeypatch, split, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    before = set(threading.enumerate())
    weight = torch.nn.Parameter(torch.zeros(2**16, dtype=torch.bfloat16))
    with HybridDeviceOptimizer([weight], split=split):
        started = [
            thread for thread in set(threading.enumerate()) - before if thread.name == "offload-update"
        ]
        assert len(started) == threads
