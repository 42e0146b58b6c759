# SPDX-License-Identifier: Apache-2.0
"""Under a limit on pinned memory every mechanism gives the same results, and pins no more than the limit."""

import copy
from contextlib import contextmanager

import layers_trainee
import pytest
import torch
from late_landings import LateWorker
from optimizer_reference import batches
from optimizer_training import fresh, hybrid, streaming, train

from reference_impl import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    Streaming,
    limit_pinned_memory,
)
from reference_impl.integrations.planned import planned
from reference_impl.memory import staged
from reference_impl.memory.arena import HostArena
from reference_impl.memory.disk import DiskSpace
from reference_impl.memory.pinned import pinned_book
from reference_impl.memory.staged import Ring
from reference_impl.verification.model import decoder_loss

LIMIT_BYTES = 2**20
HI_LO = Streaming(states="bf16-moments", chunk_bytes=3000)


@pytest.fixture(params=["as soon as possible", "as late as possible"])
def nothing_left(request, device, monkeypatch):
    """Return a context in which only the ring may be pinned; bytes reach pageable memory early, or late."""
    if request.param == "as late as possible":
        monkeypatch.setattr(staged, "Worker", LateWorker)
    copied = []
    for name in ("copy_in", "copy_out"):
        monkeypatch.setattr(Ring, name, noting(copied, getattr(Ring, name)))

    @contextmanager
    def limited():
        with limit_pinned_memory(LIMIT_BYTES):
            others = HostArena(device)
            others.reserve(pinned_book.left_bytes())
            yield
            # The ring is there from the first pageable slab on.
            assert pinned_book.peak_bytes == LIMIT_BYTES
            assert copied
            assert not device.pageable
            others.close()
        assert pinned_book.pinned_bytes == 0

    return limited


def noting(calls, copy_):
    def call(*args):
        calls.append(copy_)
        return copy_(*args)

    return call


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[name])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value.cpu(), other[name].cpu()), name
        else:
            assert value == other[name], name


def trained(device, make, *, attached=True):
    """Train the toy with `make(model)`; return losses, states and weights."""
    model = fresh(device)
    with make(model) as optimizer:
        if attached:
            optimizer.attach(model)
        losses = train(model, optimizer, batches(device.torch_device, 5))
        states = copy.deepcopy(optimizer.state_dict()["state"])
    return {"losses": dict(enumerate(losses)), "states": states, "weights": model.state_dict()}


OPTIMIZERS = {
    "CPU": lambda model: hybrid(model),
    "CPU, clipped": lambda model: hybrid(model, max_grad_norm=0.5),
    "CPU, whole step": lambda model: hybrid(model, backward_overlap="nothing"),
    "streamed": lambda model: hybrid(model, split=(0, 1, 0)),
    "half masters": lambda model: hybrid(model, split=(0, 1, 0), streaming=HI_LO),
    "three shares": lambda model: hybrid(model, split=(0.3, 0.4, 0.3), max_grad_norm=0.5),
    "states of a user's optimizer": lambda model: streaming(model),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "attached",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["in step()", "behind the forward"],
)
def test_an_optimizer_with_states_on_the_host(device, nothing_left, name, attached):
    expected = trained(device, OPTIMIZERS[name], attached=attached)
    with nothing_left():
        assert_same(trained(device, OPTIMIZERS[name], attached=attached), expected)


def decoded(device, attach, *, frozen=False):
    """Train a decoder with `attach(model)` around it; return losses and weights."""
    model = layers_trainee.decoder(device, dtype=torch.float32)
    if frozen:
        model.layers.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True, lr=1e-2)
    losses = []
    with attach(model):
        for ids in layers_trainee.batches(device, 4, tokens=32):
            loss = decoder_loss(model(ids), ids)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": dict(enumerate(losses)), "weights": model.state_dict()}


ACTIVATIONS = {
    "layers": lambda model: ActivationOffloader(model, num_layers=3, min_bytes=1024),
    "one at a time": lambda model: ActivationOffloader(
        model, num_layers=3, min_bytes=1024, double_buffering=False
    ),
    "weights too": lambda model: ActivationOffloader(model, num_layers=3, min_bytes=1024, weights=True),
    "checkpoints": lambda model: CheckpointOffloader(model, min_bytes=1024),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(device, nothing_left, name):
    expected = decoded(device, ACTIVATIONS[name])
    with nothing_left():
        assert_same(decoded(device, ACTIVATIONS[name]), expected)


def test_activations_that_go_on_to_disk(device, nothing_left, tmp_path):
    def attach(model):
        disk = DiskSpace(path=tmp_path, limit_bytes=2**24, staging_bytes=2**22)
        return ActivationOffloader(model, num_layers=3, min_bytes=1024, host_limit_bytes=2**14, disk=disk)

    expected = decoded(device, attach)
    with nothing_left():
        assert_same(decoded(device, attach), expected)


def test_frozen_layers(device, nothing_left):
    def attach(model):
        return FrozenLayerStreamer(model, resident_layers=1)

    expected = decoded(device, attach, frozen=True)
    with nothing_left():
        assert_same(decoded(device, attach, frozen=True), expected)


@pytest.fixture
def no_limit_afterwards():
    yield
    pinned_book.set_limit(None)


@pytest.mark.usefixtures("no_limit_afterwards")
def test_a_plan_that_a_trainer_is_given_limits_its_process():
    execute = {"optimizer": {"offload_fraction": 1.0}, "pinned_limit_bytes": 2**22}
    assert planned({"execute": execute})["optimizer"]["offload_fraction"] == 1.0
    assert pinned_book.limit_bytes == 2**22
    with pytest.warns(UserWarning, match="offloads nothing"):
        planned({"execute": {"pinned_limit_bytes": 2**23}})
    assert pinned_book.limit_bytes == 2**22


@pytest.mark.parametrize("slices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_trained_layers(device, nothing_left, slices):
    def run():
        model = layers_trainee.decoder(device)
        with layers_trainee.streamed(model) as streamer:
            losses = layers_trainee.train(
                model, streamer.optimizer, layers_trainee.batches(device, 4), backwards=1
            )
            states = copy.deepcopy(streamer.optimizer.state_dict()["state"])
        return {"losses": dict(enumerate(losses)), "states": states, "weights": model.state_dict()}

    expected = run()
    with nothing_left():
        assert_same(run(), expected)
