# SPDX-License-Identifier: Apache-2.0
"""A layer that is computed again changes its state as often as one that is not, and has that of its first call."""

import random
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

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
    """Counts its calls, in a buffer from the third one on."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            self.counted += 1
        return self.linear(x).exp()


def test_a_layer_that_begins_to_change_its_buffers_later():
    layer = Counting()
    for _ in range(6):
        recomputed(layer, torch.ones(2, WIDTH), layer=layer).sum().backward()
    assert (layer.calls, layer.counted) == (6, 4)


class Stateful(nn.Module):
    """A layer whose results depend on what earlier calls have left, in one of several places."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mean, self.calls, self.seen = torch.zeros(WIDTH), {"number": 0}, []
        self.generator = torch.Generator().manual_seed(3)
        self.codes = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x):
        inner = self.inner(x)
        outer = self.outer(functional.gelu(inner * self.scale(x)))
        self.loss = outer.square().mean()
        return outer

    def scale(self, x):
        mean = x.detach().mean(0)
        match self.kind:
            case "an attribute":
                self.mean = 0.5 * self.mean + mean
                return self.mean
            case "a tensor written in place":
                self.mean.mul_(0.5).add_(mean)
                return self.mean.clone()
            case "a count in a dictionary":
                self.calls["number"] += 1
                return self.calls["number"]
            case "a list":
                self.seen.append(mean)
                return torch.stack(self.seen).sum(0)
            case "an attribute from the first call on":
                self.number = getattr(self, "number", 0) + 1
                return self.number
            case "a frozen parameter":
                scale = self.codes.detach().clone()
                self.codes.data.add_(mean)
                return scale
            case "a generator of its own":
                return torch.randn(WIDTH, generator=self.generator)
            case "Python's random numbers":
                return 1 + random.random()
            case "numpy's random numbers":
                return 1 + numpy.random.rand()


PLACES = (
    "an attribute",
    "a tensor written in place",
    "a count in a dictionary",
    "a list",
    "an attribute from the first call on",
    "a frozen parameter",
    "a generator of its own",
    "Python's random numbers",
    "numpy's random numbers",
)


@pytest.mark.parametrize("kind", PLACES)
def test_a_layer_with_state_of_its_own(kind):
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model = Net(partial(Stateful, kind))
        with CheckpointOffloader(model, min_bytes=1) if offloads else nullcontext():
            for step in range(3):
                batch = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
                model(batch).backward()
        assert all(block.loss.grad_fn is not None for block in model.blocks)
        next_numbers = random.random(), numpy.random.rand()
        found.append((next_numbers, [param.grad for param in model.parameters() if param.requires_grad]))
    (expected_numbers, expected), (numbers, gradients) = found
    assert numbers == expected_numbers
    assert all(map(torch.equal, expected, gradients))


@dataclass
class Passed:
    hidden: torch.Tensor
    layer: int = 0


class Writing(nn.Module):
    """Writes the record that it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, passed, generator):
        passed.layer += 1
        noise = torch.randn(WIDTH, generator=generator)
        passed.hidden = self.linear(passed.hidden * noise * passed.layer).exp()


def test_layers_that_write_the_objects_they_are_given():
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList(Writing() for _ in range(3))
        generator = torch.Generator().manual_seed(1)
        with CheckpointOffloader(layers, layers=list(layers), min_bytes=1) if offloads else nullcontext():
            passed = Passed(torch.ones(2, WIDTH))
            for layer in layers:
                layer(passed, generator)
            passed.hidden.log().sum().backward()
        found.append([param.grad for param in layers.parameters()])
    assert all(map(torch.equal, *found))


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
