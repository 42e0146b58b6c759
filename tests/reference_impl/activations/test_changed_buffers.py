# SPDX-License-Identifier: Apache-2.0
"""A layer that is computed again changes its buffers as often as one that is not."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from reference_impl import ActivationOffloader, CheckpointOffloader, TrainableLayerStreamer
from reference_impl.activations.recompute import recomputed
from reference_impl.memory.ledger import Ledger

WIDTH = 8
KINDS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()),
    "a mean of all steps": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
    ),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.GELU()
    ),
    "spectral norm by a hook": lambda: nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.GELU()
    ),
}


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def trained(device, kind, offloaded, *, train_from=0):
    torch.manual_seed(0)
    model = Net(KINDS[kind]).to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    with offloaded(model, optimizer) as streamer:
        optimizer = getattr(streamer, "optimizer", optimizer)
        for step in range(4):
            model.train(step >= train_from)
            batch = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = model(batch.to(device.torch_device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


class Nothing:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.GELU())
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


OFFLOADED = {
    "inputs": lambda model, _: CheckpointOffloader(model, layers=list(model.blocks)),
    "layers": lambda model, optimizer: TrainableLayerStreamer(model, optimizer, layers=list(model.blocks)),
    "layers and inputs": lambda model, optimizer: TrainableLayerStreamer(
        model, optimizer, layers=list(model.blocks), inputs="host"
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offloaded", OFFLOADED)
def test_losses_and_buffers_are_those_of_a_model_that_is_not_offloaded(device, kind, offloaded):
    losses, state = trained(device, kind, OFFLOADED[offloaded])
    expected, expected_state = trained(device, kind, Nothing)
    assert losses == expected
    assert all(torch.equal(state[name], expected_state[name]) for name in expected_state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_evaluation_that_goes_into_training(device, kind):
    losses, state = trained(device, kind, OFFLOADED["inputs"], train_from=2)
    expected, expected_state = trained(device, kind, Nothing, train_from=2)
    assert losses == expected
    assert all(torch.equal(state[name], expected_state[name]) for name in expected_state)


class Counting(nn.Module):
    """Counts its calls from the third one on."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.calls > 2 * 2:
            self.counted += 1
        return self.linear(x).exp()


def test_a_layer_that_begins_to_change_its_buffers_later():
    """Its first such call is counted twice, later ones are learnt."""
    layer = Counting()
    for _ in range(6):
        recomputed(layer, torch.ones(2, WIDTH), layer=layer).sum().backward()
    assert layer.counted == 4 + 1


def test_a_budget_computes_no_batch_norm_again_that_writes_its_statistics(device):
    states = []
    for budget in (False, True):
        torch.manual_seed(0)
        model = Images().to(device.torch_device)
        with ExitStack() as stack:
            if budget:
                stack.enter_context(Ledger(device))
                blocks = list(model.blocks)
                stack.enter_context(
                    ActivationOffloader(model, layers=blocks, budget_bytes="least", min_bytes=256)
                )
            for step in range(5):
                images = torch.randn(4, WIDTH, 16, 16, generator=torch.Generator().manual_seed(step))
                model(images.to(device.torch_device)).backward()
        gradients = [param.grad for param in model.parameters()]
        states.append([tensor.cpu() for tensor in (*model.state_dict().values(), *gradients)])
    assert all(map(torch.equal, *states))
