# SPDX-License-Identifier: Apache-2.0
"""Memory comes back by itself: without backward, after errors, without the garbage collector."""

import gc
import importlib

import pytest
import torch
from torch import nn

from reference_impl.activations import ActivationOffloader
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger

SMALL = {"min_bytes": 1024}


@pytest.fixture
def no_collector():
    # Imported on first use by a dispatch mode, in frames that only the collector frees.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_graph_that_is_dropped_gives_everything_back(trainee, device):
    trainee.step()
    trainee.model.zero_grad()
    with (
        ActivationOffloader(trainee.model, **SMALL) as offloader,
        Ledger(device, track=[trainee.ids, *trainee.model.parameters()]) as ledger,
    ):
        before = ledger.device_bytes
        loss = trainee.loss()
        assert offloader.arena.live_bytes > 0
        del loss
        assert offloader.arena.live_bytes == 0
        device.synchronize()
        offloader.engine.headroom.in_flight.clear()
        assert ledger.device_bytes == before


@pytest.mark.usefixtures("no_collector")
def test_an_operation_that_saves_its_own_output_closes_no_cycle(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(32, 32)])

        def forward(self, x):
            return self.layers[0](x).exp()

    model = Model().to(device.torch_device)
    # Too large a threshold: everything is kept by the engine's own tokens.
    with ActivationOffloader(model, min_bytes=2**30), Ledger(device, track=model.parameters()) as ledger:
        x = torch.randn(16, 32, device=device.torch_device, requires_grad=True)
        before = ledger.device_bytes
        out = model(x)
        del out
        assert ledger.device_bytes == before


def test_evaluation_takes_no_host_memory(trainee):
    with ActivationOffloader(trainee.model, **SMALL) as offloader, torch.no_grad():
        trainee.loss()
        assert offloader.arena.reserved_bytes == 0


class Failure(Exception):
    pass


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_the_next_step_is_right(trainee, where, error):
    expected = trainee.step()
    layer = trainee.model.layers[2]

    def fail(*_):
        raise error

    with ActivationOffloader(trainee.model, **SMALL) as offloader:
        trainee.step()
        hook = (
            layer.down.register_forward_hook(fail)
            if where == "forward"
            else layer.register_full_backward_hook(fail)
        )
        with pytest.raises(error):
            trainee.step()
        hook.remove()
        gc.collect()
        assert trainee.step() == expected
        assert trainee.step() == expected
        assert offloader.arena.live_bytes == 0


def test_a_branch_that_backward_never_visits_gives_its_memory_back(trainee):
    with ActivationOffloader(trainee.model, **SMALL) as offloader:
        x = trainee.model.embedding(trainee.ids)
        used, unused = trainee.model.layers[0](x), trainee.model.layers[1](x)
        used.sum().backward()
        assert offloader.arena.live_bytes > 0
        del unused
        assert offloader.arena.live_bytes == 0


def test_many_lengths_do_not_pile_up_on_the_host(trainee, device):
    with ActivationOffloader(trainee.model, **SMALL) as offloader:
        lengths = torch.randint(16, 128, (30,)).tolist()
        for length in lengths:
            trainee.ids = torch.randint(512, (2, length), device=device.torch_device)
            trainee.step()
        assert offloader.arena.live_bytes == 0
        assert offloader.arena.reserved_bytes <= 256 * 2**20
    assert host_book.reserved_bytes == 0
