# SPDX-License-Identifier: Apache-2.0
"""Where the CPU updates parameters of streamed layers: the failing call, and the loop's actions between backward and
step()."""

import signal

import pytest
import torch
from layers_trainee import assert_same, batches, decoder, resident, streamed, train

from reference_impl.device import Device
from reference_impl.optimizers.cpu.workers import DeadlineWorkers
from reference_impl.optimizers.options import CpuUpdate
from reference_impl.optimizers.step import WorkLostError
from reference_impl.verification.model import decoder_loss

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")
TWIN = Device.of("cpu")
STREAMED, ON_CPU = (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
# Of several parameters each, and of parts of one.
FEW = CpuUpdate(threads=2, bucket_elements=1000)


@pytest.fixture
def failing_once(monkeypatch):
    """Have the next job of a worker fail."""
    run, failures = DeadlineWorkers.run_job, []

    def failing(workers, job):
        if failures:
            raise failures.pop()
        run(workers, job)

    monkeypatch.setattr(DeadlineWorkers, "run_job", failing)
    return lambda: failures.append(MemoryError("none left"))


def step_and_forward(model, optimizer, batch):
    optimizer.step()
    optimizer.zero_grad()
    return model(batch)


def test_a_worker_that_fails_loses_the_step_and_says_so(failing_once):
    model, ids = decoder(TWIN), batches(TWIN, 3)
    with streamed(model, split=ON_CPU) as streamer:
        train(model, streamer.optimizer, ids[:1])
        decoder_loss(model(ids[1]), ids[1]).backward()
        failing_once()
        with pytest.raises(WorkLostError, match="none left") as caught:
            step_and_forward(model, streamer.optimizer, ids[2])
        assert "'broken'" in caught.value.__notes__[0]
        for call in (streamer.optimizer.state_dict, streamer.optimizer.step):
            with pytest.raises(WorkLostError, match="loading the last checkpoint"):
                call()


@pytest.mark.parametrize("how", ["refresh", "load", "closure"])
def test_masters_may_be_made_anew_between_backward_and_step(how):
    """Gradients wait in the staging that masters are usually made through."""
    found = []
    for split in (STREAMED, ON_CPU):
        model, ids = decoder(TWIN), batches(TWIN, 2)
        with streamed(model, split=split, resident_layers=2) as streamer:
            train(model, streamer.optimizer, ids[:1])
            decoder_loss(model(ids[1]), ids[1]).backward()
            if how == "refresh":
                streamer.optimizer.refresh_masters()
            elif how == "load":
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            streamer.optimizer.step(*([None] if how == "closure" else []))
            streamer.optimizer.zero_grad()
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("split", [ON_CPU, (0.3, 0.3, 0.4)], ids=str)
def test_no_step_is_taken_while_weights_are_lent(split):
    """They go home as they are then."""
    ids = batches(TWIN, 3)
    other, model = decoder(TWIN), decoder(TWIN)
    reference = resident(other)
    expected = train(other, reference, ids)
    with streamed(model, split=split) as streamer:
        assert train(model, streamer.optimizer, ids[:1]) == expected[:1]
        decoder_loss(model(ids[1]), ids[1]).backward()
        with streamer.gathered(), pytest.raises(RuntimeError, match="block 0 while its weights are lent"):
            streamer.optimizer.step()
        streamer.optimizer.step()
        streamer.optimizer.zero_grad()
        assert train(model, streamer.optimizer, ids[2:]) == expected[2:]


@pytest.fixture
def ctrl_c():
    """A process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_does_not_have_the_workers_update_twice(monkeypatch):
    ids = batches(TWIN, 2)
    other, model = decoder(TWIN), decoder(TWIN)
    reference = resident(other)
    train(other, reference, ids)
    submit, calls = DeadlineWorkers.submit, []

    def interrupted(workers, jobs):
        calls.append(len(jobs))
        submit(workers, jobs)
        signal.raise_signal(signal.SIGINT)

    with streamed(model, split=ON_CPU) as streamer:
        train(model, streamer.optimizer, ids[:1])
        decoder_loss(model(ids[1]), ids[1]).backward()
        monkeypatch.setattr(DeadlineWorkers, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            streamer.optimizer.step()
        # States read then belong to the begun step.
        assert streamer.optimizer.state[model.head.weight]["step"] == 2
        streamer.optimizer.zero_grad()
        assert_same(model, streamer.optimizer, other, reference)
        assert len(calls) == 1


def test_weights_are_lent_beside_parameters_that_nobody_trains():
    model = decoder(TWIN)
    model.norm.weight.requires_grad_(False)
    with streamed(model) as streamer:
        model.norm.weight.requires_grad_(True)
        model.later = torch.nn.Linear(3, 3)
        with streamer.gathered():
            assert model.layers[0].up.weight.sum().isfinite()
