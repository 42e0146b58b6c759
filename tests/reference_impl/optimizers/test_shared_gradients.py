# SPDX-License-Identifier: Apache-2.0
"""Gradients in one memory of torch's: if they leave, each counts once, whatever is added or scaled."""

import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch
from optimizer_training import OPTIONS, hybrid, streaming
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import linear

from reference_impl import ShardStreamer, TrainableLayerStreamer

WIDTH = 64


class Sum(nn.Module):
    """A layer whose weight is a sum: both of its parts get one gradient, or with `apart` each its own."""

    def __init__(self, *, apart):
        super().__init__()
        self.apart = apart
        self.a, self.b = (nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, hidden):
        a, b = (self.a * 1.0, self.b * 1.0) if self.apart else (self.a, self.b)
        return torch.tanh(linear(hidden, a.t() + b.t()))


class Model(nn.Module):
    def __init__(self, *, apart, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Sum(apart=apart) for _ in range(layers))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def batches(device):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator).to(device.torch_device) for _ in range(6)]


def steps(model, optimizer, data, *, adds, clips):
    """Steps of `adds` batches each."""
    for begin in range(0, len(data), adds):
        for batch in data[begin : begin + adds - 1]:
            with getattr(optimizer, "accumulate", nullcontext)():
                model(batch).backward()
        model(data[begin + adds - 1]).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
        optimizer.step()
        optimizer.zero_grad()


def train(model, optimizer, data, **loop):
    """Return the weights behind `steps`."""
    steps(model, optimizer, data, **loop)
    getattr(optimizer, "synchronize", lambda: None)()
    return [param.detach().clone() for param in model.parameters()]


def trained_by_adamw(device, *, apart, layers=1, **loop):
    model = Model(apart=apart, layers=layers).to(device.torch_device)
    return train(model, torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS), batches(device), **loop)


def close_to(found, expected):
    """The CPU's share rounds as the CPU does."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


LOOPS = [{"adds": adds, "clips": clips} for adds in (1, 2, 3) for clips in (False, True)]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("split", [(0, 0, 1), (0.5, 0, 0.5), (0, 0.5, 0.5)], ids=str)
def test_where_gradients_leave_each_counts_once(device, split, loop):
    model = Model(apart=False).to(device.torch_device)
    with hybrid(model, split=split) as optimizer:
        optimizer.attach(model)
        close_to(
            train(model, optimizer, batches(device), **loop), trained_by_adamw(device, apart=True, **loop)
        )


@pytest.mark.parametrize("adds", [1, 2, 3])
def test_where_updates_begin_in_backward_each_counts_once(device, adds):
    loop = {"adds": adds, "clips": False}
    model = Model(apart=False).to(device.torch_device)
    with hybrid(model, split=(0, 0, 1), backward_overlap="update") as optimizer:
        optimizer.attach(model)
        close_to(
            train(model, optimizer, batches(device), **loop), trained_by_adamw(device, apart=True, **loop)
        )


@pytest.mark.filterwarnings("ignore:a second backward has added")
def test_sums_that_nobody_has_announced_count_once(device):
    """The first gradients come back, and from then on they stay until `step()`."""
    loop = {"adds": 2, "clips": True}
    model = Model(apart=False).to(device.torch_device)
    with hybrid(model, split=(0, 0, 1)) as optimizer:
        optimizer.attach(model)
        optimizer.accumulate = nullcontext
        close_to(
            train(model, optimizer, batches(device), **loop), trained_by_adamw(device, apart=True, **loop)
        )


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("loop", LOOPS[:4], ids=str)
def test_gradients_of_layers_that_stream_count_once(device, slices, loop):
    model = Model(apart=False, layers=3).to(device.torch_device)
    given = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    with TrainableLayerStreamer(model, given, slices=slices) as streamer:
        train(model, streamer.optimizer, batches(device), **loop)
    expected = trained_by_adamw(device, apart=True, layers=3, **loop)
    torch.testing.assert_close([param.detach() for param in model.parameters()], expected, rtol=0, atol=2e-4)


class Unreduced:
    """An optimizer of FSDP2's shards in whose `accumulate()` gradients add up on the device, unreduced."""

    def __init__(self, optimizer, model):
        self.step, self.zero_grad, self._model = optimizer.step, optimizer.zero_grad, model

    @contextmanager
    def accumulate(self):
        self._model.set_requires_gradient_sync(False)
        yield
        self._model.set_requires_gradient_sync(True)


@pytest.mark.usefixtures("group")
def test_gradients_of_shards_that_stream_count_once(device):
    """FSDP2 reduces each into a place of its own. Earlier sums go to both at once, as with AdamW."""
    mesh = init_device_mesh(device.torch_device.type, (1,))
    wrong = []
    for loop, is_reduced in itertools.product(LOOPS, (True, False)):
        found = []
        for kind, apart in (("torch", is_reduced), ("streamed", False)):
            model = Model(apart=apart, layers=3).to(device.torch_device)
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            optimizer = torch.optim.AdamW(fully_shard(model, mesh=mesh).parameters(), fused=True, **OPTIONS)
            streamer = ShardStreamer(model, optimizer) if kind == "streamed" else None
            stepped = optimizer if streamer is None else streamer.optimizer
            with streamer or nullcontext():
                steps(model, stepped if is_reduced else Unreduced(stepped, model), batches(device), **loop)
            found.append([param.to_local().detach() for param in model.parameters()])
        if not all(map(torch.equal, *found)):
            wrong.append((loop, is_reduced))
    assert not wrong


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("kind", ["nothing", "offloader"])
def test_where_gradients_stay_they_are_what_adamw_finds(device, kind, loop):
    """Torch adds to both at once, and scales them twice."""
    model = Model(apart=False).to(device.torch_device)
    made = (
        streaming(model)
        if kind == "offloader"
        else hybrid(model, split=(0, 1, 0), backward_overlap="nothing")
    )
    with made as optimizer:
        optimizer.attach(model)
        found = train(model, optimizer, batches(device), **loop)
    expected = trained_by_adamw(device, apart=False, **loop)
    assert all(map(torch.equal, found, expected))
