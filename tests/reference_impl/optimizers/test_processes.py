# SPDX-License-Identifier: Apache-2.0
"""Threads and processes: settings of the caller, forks, dying workers, and the end of the program."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import forked
import pytest
import torch
from optimizer_reference import batches
from optimizer_training import hybrid, replace_job, train, twins

from reference_impl.memory.host import host_book
from reference_impl.optimizers.step import WorkLostError

ROOT = Path(__file__).resolve().parents[3]
START = """
import os, sys, threading, time
import torch
from reference_impl import CpuUpdate, HybridDeviceOptimizer

def train(place, steps=3, elements=2**16, width=512, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(4)))
    model.to(place)
    optimizer = HybridDeviceOptimizer(model.parameters(), cpu=CpuUpdate(bucket_elements=elements), lr=1e-2, **options)
    optimizer.attach(model)
    for _ in range(steps):
        model(torch.randn(4, width, dtype=torch.bfloat16).to(place)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer

place = sys.argv[1]
"""


@pytest.fixture
def program(device, tmp_path):
    """Runs code after `START` in a process of its own; returns its output. It must end well within a minute."""

    path, place = tmp_path / "program.py", device.torch_device.type

    def run(code, threads=1):
        path.write_text(START + code)
        if threads == 1:
            result = forked.run(path, place, timeout_s=60)
        else:
            # torch asks when it is imported.
            command = [sys.executable, path, place]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.mark.parametrize("ending", ["pass", "del model, optimizer"])
@pytest.mark.slow
def test_a_program_may_end_with_updates_in_flight(program, ending):
    code = "model, optimizer = train(place, width=1024, elements=2**20)\nprint('end', flush=True)\n"
    assert program(code + ending).split() == ["end"]


@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_backward(program):
    code = """
model, optimizer = train(place, backward_overlap="update")
model(torch.randn(4, 512, dtype=torch.bfloat16).to(place)).sum().backward()
print("end")
"""
    assert program(code).split() == ["end"]


@pytest.mark.slow
def test_one_thread_of_openmp_changes_no_bit(program):
    """torchrun sets it; the update's threads are the optimizer's own."""
    code = """
model, optimizer = train(place)
optimizer.synchronize()
print(*(param.view(torch.int16).long().sum().item() for param in model.parameters()))
optimizer.close()
"""
    one, more = (program(code, threads) for threads in (1, 2))
    assert one == more
    assert len(one.split()) == 8


@pytest.mark.slow
def test_a_forked_child_is_told_and_the_parent_goes_on(device, program):
    if device.is_accelerator:
        pytest.skip("CUDA itself refuses a forked child")
    code = """
model, optimizer = train(place)
child = os.fork()
if child == 0:
    said = 0
    for use in (optimizer.step, optimizer.state_dict, optimizer.synchronize, optimizer.close):
        try:
            use()
        except RuntimeError as error:
            said += "forked process" in str(error)
    os._exit(said)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
model(torch.randn(4, 512, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
optimizer.close()
"""
    assert program(code).split() == ["4"]


@pytest.mark.slow
def test_a_forked_child_may_end_by_itself(program):
    """As a data loader's worker does, with the parent's updates in flight.

    `sys.exit` in place of it destroys the parent's CUDA events, which ends a child of torch alone with SIGABRT, too.
    """
    code = """
import multiprocessing
model, optimizer = train(place, width=1024, elements=2**20)
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join()
print(child.exitcode)
optimizer.close()
"""
    assert program(code).split() == ["0"]


@pytest.mark.slow
def test_data_loader_workers_started_later_work(program):
    code = """
model, optimizer = train(place)
loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
for batch in loader:
    optimizer.zero_grad()
    (model(torch.randn(2, 512, dtype=torch.bfloat16).to(place)).sum() * batch.sum().to(place)).backward()
    optimizer.step()
print(sum(batch.sum().item() for batch in loader))
optimizer.close()
"""
    assert program(code).split() == ["28.0"]


def step_and_die(monkeypatch, model, optimizer, batch):
    """Take a step whose first update fails as soon as `step()` has returned."""
    returned = threading.Event()

    def dies(workers, job, run):
        returned.wait(10)
        raise WorkLostError("no more room")

    replace_job(monkeypatch, dies)
    train(model, optimizer, [batch])
    returned.set()


def test_a_worker_that_dies_unnoticed_is_reported_by_close(device, monkeypatch):
    model, _ = twins(device)
    optimizer = hybrid(model)
    optimizer.attach(model)
    step_and_die(monkeypatch, model, optimizer, batches(device.torch_device, 1)[0])
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no more room"):
        optimizer.close()
    optimizer.close()
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer, batch: optimizer.step(),
        lambda model, optimizer, batch: optimizer.synchronize(),
        lambda model, optimizer, batch: optimizer.state_dict(),
        lambda model, optimizer, batch: model(batch),
        lambda model, optimizer, batch: model.state_dict(),
    ],
    ids=["step", "synchronize", "state_dict", "forward", "model.state_dict"],
)
def test_every_next_call_reports_a_dead_worker(device, use, monkeypatch):
    model, _ = twins(device)
    others = set(threading.enumerate())
    optimizer = hybrid(model)
    optimizer.attach(model)
    data = batches(device.torch_device, 2)
    step_and_die(monkeypatch, model, optimizer, data[0])
    for worker in set(threading.enumerate()) - others:
        worker.join(10)
        assert not worker.is_alive()
    for _ in range(2):
        with pytest.raises(WorkLostError, match="no more room") as caught:
            use(model, optimizer, data[1])
        assert optimizer.status == "broken"
    assert isinstance(caught.value.__cause__, WorkLostError)
    optimizer.close()


def test_closing_from_another_thread_ends_waiting(device, monkeypatch):
    """A forward that waits for a weight is told instead of waiting for ever."""
    model, _ = twins(device)
    optimizer = hybrid(model)
    optimizer.attach(model)
    gate, held = threading.Event(), []
    replace_job(monkeypatch, lambda workers, job, run: (held.append(workers), gate.wait(10)))
    data = batches(device.torch_device, 2)
    train(model, optimizer, data[:1])
    timer = threading.Timer(0.2, lambda: (threading.Timer(0.2, gate.set).start(), held[0].close()))
    timer.start()
    with pytest.raises(RuntimeError, match="closed"):
        model(data[1])
    timer.join()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.close()


@pytest.mark.slow
def test_many_steps_do_not_grow(device):
    model, _ = twins(device)
    held = []
    with hybrid(model, offload_fraction=0.6, max_grad_norm=1.0) as optimizer:
        optimizer.attach(model)
        for index, batch in enumerate(batches(device.torch_device, 300)):
            loss = model(batch)
            (loss * float("nan") if index % 7 == 3 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            if index in (20, 299):
                del loss
                optimizer.synchronize()
                device.synchronize()
                # Earlier tests leave garbage whose going would look like shrinking.
                gc.collect()
                on_device = torch.cuda.memory_allocated() if device.is_accelerator else 0
                held.append(
                    (host_book.reserved_bytes, host_book.live_bytes, threading.active_count(), on_device)
                )
        assert optimizer.state_dict()["state"][0]["step"] == 300 - 43
    assert held[0] == held[1]


def test_closing_gives_everything_back(device):
    before = host_book.reserved_bytes, host_book.live_bytes, threading.active_count()
    model, _ = twins(device)
    with hybrid(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 2))
    assert (host_book.reserved_bytes, host_book.live_bytes, threading.active_count()) == before
