# SPDX-License-Identifier: Apache-2.0
"""Graphs that are not one forward and one backward: each token answers for itself."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl.activations import ActivationOffloader
from reference_impl.memory.ledger import Ledger

SMALL = {"min_bytes": 256}


class Smooth(nn.Module):
    """Twice differentiable everywhere."""

    def __init__(self, checkpointing=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.checkpointing = checkpointing

    def forward(self, x):
        for layer in self.layers:
            x = self.through(layer, x).tanh()
        return x

    def through(self, layer, x):
        if self.checkpointing is None:
            return layer(x).sin()
        return checkpoint(lambda y: layer(y).sin(), x, use_reentrant=self.checkpointing == "reentrant")


class Block(nn.Module):
    def __init__(self, checkpointing):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.checkpointing = checkpointing

    def forward(self, x):
        def body(y):
            return self.linear(y).sin().exp()

        return checkpoint(body, x, use_reentrant=self.checkpointing == "reentrant")


@pytest.fixture
def model(device):
    return Smooth().to(device.torch_device)


@pytest.fixture
def x(device):
    return torch.randn(16, 32, device=device.torch_device, requires_grad=True)


def equal(got, expected):
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def both_ways(model, action, **options):
    """Return the results of `action` without offload and, twice, with it."""
    expected = action()
    with ActivationOffloader(model, **SMALL, **options) as offloader:
        got = [action(), action()]
        assert offloader.offloaded_bytes > 0
    return expected, *got


def test_a_retained_graph_can_be_traversed_again(model, x):
    def action():
        model.zero_grad()
        out = model(x).sum()
        first = torch.autograd.grad(out, x, retain_graph=True)
        second = torch.autograd.grad(out, x, retain_graph=True)
        out.backward()
        return [*first, *second, *(p.grad.clone() for p in model.parameters())]

    expected, first, second = both_ways(model, action)
    assert equal(first, expected)
    assert equal(second, expected)


def test_double_backward(model, x):
    def action():
        model.zero_grad()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [gradient.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected, first, second = both_ways(model, action)
    assert equal(first, expected)
    assert equal(second, expected)


def test_one_of_two_losses_first(model, x):
    def action():
        model.zero_grad()
        out = model(x)
        out[:8].sum().backward(retain_graph=True)
        out[8:].square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected, first, second = both_ways(model, action)
    assert equal(first, expected)
    assert equal(second, expected)


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out", "one forward, one backward"])
def test_several_micro_batches_in_flight(model, device, order):
    batches = [torch.randn(16, 32, device=device.torch_device) for _ in range(4)]

    def action():
        model.zero_grad()
        if order == "one forward, one backward":
            waiting = [model(batches[0]).sum()]
            for batch in batches[1:]:
                waiting.append(model(batch).sum())
                waiting.pop(0).backward()
        else:
            waiting = [model(batch).sum() for batch in batches]
        for loss in waiting if order == "first in, first out" else reversed(waiting):
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected, first, second = both_ways(model, action)
    assert equal(first, expected)
    assert equal(second, expected)


def test_layers_called_without_the_model(model, x):
    def action():
        model.zero_grad()
        out = x
        for layer in model.layers:
            out = layer(out).exp().tanh()
        out.sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected, first, second = both_ways(model, action)
    assert equal(first, expected)
    assert equal(second, expected)


def test_what_layers_called_without_the_model_leave_free_is_learnt(device, x):
    """Without it, each layer would wait for the last one's copy."""
    model = Smooth().to(device.torch_device)
    with Ledger(device), ActivationOffloader(model, **SMALL) as offloader:
        for _ in range(3):
            out = x
            for layer in model.layers:
                out = layer(out).exp().tanh()
            out.sum().backward()
        assert len(offloader.engine.headroom.learnt_peaks()["forward"]) > len(model.layers)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("side", ["checkpoint around a layer", "checkpoint inside a layer"])
def test_together_with_torch_checkpoint(device, x, checkpointing, side):
    model = Smooth(checkpointing).to(device.torch_device)
    if side == "checkpoint inside a layer":
        model.checkpointing = None
        model.layers = nn.ModuleList(Block(checkpointing) for _ in range(3)).to(device.torch_device)

    def action():
        model.zero_grad()
        x.grad = None
        model(x).sum().backward()
        return [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]

    expected = action()
    with ActivationOffloader(model, **SMALL):
        assert equal(action(), expected)
        assert equal(action(), expected)


def test_nested_offloaders(model, x):
    def action():
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = action()
    with ActivationOffloader(model, num_layers=2, **SMALL) as first:
        with ActivationOffloader(model, **SMALL) as second:
            assert equal(action(), expected)
            assert first.offloaded_bytes > 0
            assert second.offloaded_bytes > 0
        assert equal(action(), expected)


def test_a_layer_that_runs_twice(device, x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

        def forward(self, x):
            for layer in (*self.layers, *self.layers, self.layers[0]):
                x = layer(x).sin()
            return x

    model = Twice().to(device.torch_device)

    def action():
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected, first, second = both_ways(model, action)
    assert equal(first, expected)
    assert equal(second, expected)


@pytest.mark.parametrize("moves", [True, False])
def test_writing_a_saved_tensor_raises_as_eager_does(device, x, moves):
    class Layer(nn.Linear):
        def forward(self, x):
            y = super().forward(x).exp()
            return y.add_(1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(32, 32)])

        def forward(self, x):
            return self.layers[0](x)

    model = Model().to(device.torch_device)
    message = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    with (
        ActivationOffloader(model, min_bytes=1 if moves else 2**30),
        pytest.raises(RuntimeError, match=message),
    ):
        model(x).sum().backward()


def test_a_tensor_saved_again_after_a_write_is_another_one(device):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32))

        def forward(self, x):
            state = torch.zeros(16, 32, device=x.device)
            first = (self.scale * (state + x)).sum()
            state = state + 0
            with torch.no_grad():
                state.add_(2)
            return first + (self.scale * state).sum()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer()])

        def forward(self, x):
            return self.layers[0](x)

    model = Model().to(device.torch_device)
    x = torch.randn(16, 32, device=device.torch_device)

    def action():
        model.zero_grad()
        model(x).backward()
        return [model.layers[0].scale.grad.clone()]

    expected, first, _ = both_ways(model, action)
    assert equal(first, expected)
