# SPDX-License-Identifier: Apache-2.0
"""A thread that only reads changes nothing: a begun step is carried out by one thread, and the others wait for it."""

import os
import signal
import sys
import threading

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import assert_same_weights, hybrid, streaming, train, twins

from reference_impl.optimizers.resident import ResidentUpdate
from reference_impl.optimizers.streamed.share import StreamedShare

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")

BUILDS = {
    "cpu": lambda model: hybrid(model),
    "kept": lambda model: hybrid(model, backward_overlap="nothing"),
    "updates in backward": lambda model: hybrid(model, backward_overlap="update"),
    "half": lambda model: hybrid(model, split=(0.5, 0.0, 0.5)),
    "three ways": lambda model: hybrid(model, split=(0.3, 0.4, 0.3), max_grad_norm=1.0),
    "streamed": lambda model: hybrid(model, split=(0.0, 1.0, 0.0)),
    "wrapped": streaming,
}
EACH = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@pytest.fixture
def eager_switches():
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def reading(model, optimizer, data, *, states):
    """Everything that only reads."""

    def saves():
        packed = optimizer.state_dict()["state"].values()
        steps = {float(each["step"]) for each in packed}
        assert len(steps) <= 1, steps

    calls = [lambda: model(data[0]), model.state_dict, lambda: optimizer.status]
    return [*calls, optimizer.synchronize, saves] if states else calls


@EACH
def test_a_thread_that_reads_changes_no_bit(device, eager_switches, build):
    model, plain = twins(device)
    data = batches(device.torch_device, 6)
    with build(plain) as reference:
        train(plain, reference, data)
    optimizer = build(model)
    optimizer.attach(model)
    # In this mode some weights are new before step(), and nobody can finish or save the others.
    states = build is not BUILDS["updates in backward"]
    over, raised = threading.Event(), []

    def read():
        while not over.is_set():
            for call in reading(model, optimizer, data, states=states):
                try:
                    with torch.no_grad():
                        call()
                except BaseException as error:
                    raised.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        train(model, optimizer, data)
    finally:
        over.set()
        for reader in readers:
            reader.join()
        optimizer.close()
    assert not raised
    assert_same_weights(model, plain)


@pytest.mark.parametrize(
    ("build", "call"),
    [
        pytest.param(build, call, id=f"{name}, {call}")
        for name, build in BUILDS.items()
        for call in range(5 if name != "updates in backward" else 3)
    ],
)
def test_one_thread_carries_out_a_begun_step(device, monkeypatch, build, call):
    """Another is let in at the worst place, and waits."""
    model, plain = twins(device)
    data = batches(device.torch_device, 3)
    with build(plain) as reference:
        train(plain, reference, data)
    owner, name = (StreamedShare, "advance") if build is streaming else (ResidentUpdate, "run")
    real, inside, together, readers, raised = getattr(owner, name), set(), [], [], []
    optimizer = build(model)
    optimizer.attach(model)
    read = reading(model, optimizer, data, states=True)[call]

    def reads():
        try:
            read()
        except BaseException as error:
            raised.append(error)

    def carried_out(*arguments):
        inside.add(threading.get_ident())
        together.append(len(inside))
        if not readers:
            readers.append(threading.Thread(target=reads))
            readers[0].start()
            readers[0].join(0.05)
            together.append(0 if readers[0].is_alive() else 2)
        real(*arguments)
        inside.discard(threading.get_ident())

    train(model, optimizer, data[:1])
    monkeypatch.setattr(owner, name, carried_out)
    train(model, optimizer, data[1:])
    readers[0].join()
    optimizer.close()
    assert not raised
    assert max(together) == 1
    assert_same_weights(model, plain)


def test_a_reader_that_has_carried_out_a_step_stays_a_reader(device, monkeypatch):
    """Between step()'s two turns a reader takes the step. In the next backward it waits for nothing, as before."""
    model, plain = twins(device)
    data, raised = batches(device.torch_device, 3), []
    with hybrid(plain, backward_overlap="update") as reference:
        train(plain, reference, data)
    optimizer = hybrid(model, backward_overlap="update")
    optimizer.attach(model)
    take = optimizer._take_step

    def read():
        def inside():
            try:
                with torch.no_grad():
                    model(data[0])
            except BaseException as error:
                raised.append(error)

        reader = threading.Thread(target=inside)
        reader.start()
        reader.join()

    monkeypatch.setattr(optimizer, "_take_step", lambda: (read(), take())[1])
    # While some updates of this backward have been queued, and others, of the same parameter, have not.
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _: read())
    train(model, optimizer, data)
    optimizer.synchronize()
    assert raised == []
    assert_same_weights(model, plain)
    optimizer.close()


def test_a_reader_on_a_stream_of_its_own_waits_behind_that_of_the_steps(device, monkeypatch):
    """Nobody waits again for an event after a step has: so the training stream has to."""
    if device.is_accelerator:
        pytest.skip("numbers stand for streams here, on which no CUDA kernel runs")
    model, _ = twins(device)
    data, on, told = batches(device.torch_device, 2), [], []
    optimizer = hybrid(model)
    optimizer.attach(model)
    steps, waits = threading.get_ident(), type(device).wait

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            on.append(self.stream)

        def __exit__(self, *_):
            on.pop()

    kind = type(device)
    monkeypatch.setattr(kind, "current_stream", lambda _: on[-1] if on else threading.get_ident())
    monkeypatch.setattr(kind, "on", lambda _, stream: On(stream))
    train(model, optimizer, data[:1])
    optimizer._engine.open.drain()
    real = optimizer._engine.open.wait_for
    monkeypatch.setattr(
        optimizer._engine.open,
        "wait_for",
        lambda members: (told.append(device.current_stream()), real(members)),
    )

    def wait(self, event):
        if threading.get_ident() != steps and not on:
            told.append("behind it")
        waits(self, event)

    def read():
        model(data[1])
        told.append("read")

    monkeypatch.setattr(kind, "wait", wait)
    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    assert told[:2] == [steps, "behind it"]
    assert told[-1] == "read"
    optimizer.close()


@pytest.mark.parametrize("build", [hybrid, streaming])
def test_a_turn_that_another_thread_has_is_free_in_a_forked_child(device, build):
    if device.torch_device.type != "cpu":
        pytest.skip("a process that has used CUDA cannot fork")
    model, _ = twins(device)
    optimizer = build(model)
    taken, over = threading.Event(), threading.Event()

    def holds():
        with optimizer._failures.turn:
            taken.set()
            over.wait(10)

    holder = threading.Thread(target=holds)
    holder.start()
    taken.wait()
    child = os.fork()
    if not child:
        # An endless wait ends here, too.
        signal.alarm(10)
        try:
            optimizer.synchronize()
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(3)
    _, status = os.waitpid(child, 0)
    over.set()
    holder.join()
    optimizer.close()
    assert status == 0
