# SPDX-License-Identifier: Apache-2.0
"""torch.func and forward-mode derivatives through offloaded models: as without offload, or refused by name.

Guards are asked before a module runs. Forward-mode derivatives of layers with moving saved tensors have ended the
process inside torch, so no test calls them. There the guard is tried with cases that merely raise.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader, TrainableLayerStreamer
from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.memory.transforms import running_transform
from reference_impl.weights import FrozenLayerStreamer

# The size of a weight that may stream, 16 KiB.
WIDTH = 64
BATCH = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).square().mean()


def trained(model):
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def called(model, params, batch):
    return functional_call(model, params, (batch,))


def of_dual_numbers(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(BATCH, torch.ones(4, WIDTH)))).tangent


def of_stacked_parameters(model):
    stacked = {name: torch.stack([param, 2 * param]) for name, param in trained(model).items()}
    return vmap(lambda params: called(model, params, BATCH))(stacked)


def of_second_derivatives(model):
    params = [param for param in model.parameters() if param.requires_grad]
    first = torch.autograd.grad(model(BATCH), params, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), params)


def of_mapped_inputs(model):
    """A backward behind a vmap, through layers whose outputs were wrapped."""
    inputs = BATCH.unsqueeze(1).requires_grad_()
    return torch.autograd.grad(vmap(model)(inputs).sum(), inputs)


REVERSE = {
    "grad": lambda model: grad(lambda params: called(model, params, BATCH))(trained(model)),
    "per-sample gradients": lambda model: vmap(
        grad(lambda params, batch: called(model, params, batch)), in_dims=(None, 0)
    )(trained(model), BATCH.unsqueeze(1)),
    "hessian": lambda model: hessian(model)(BATCH[:1]),
    "vjp": lambda model: vjp(model, BATCH)[1](torch.ones(())),
}
# Torch makes a graph of their backward.
TWICE = ("hessian", "vjp")
OTHERS = {
    "jvp": lambda model: jvp(model, (BATCH,), (torch.ones(4, WIDTH),)),
    "dual numbers": of_dual_numbers,
    "vmap": lambda model: vmap(model)(BATCH.unsqueeze(1)),
    "inputs of a vmap": of_mapped_inputs,
    "stacked parameters": of_stacked_parameters,
}
WAYS = {**REVERSE, **OTHERS}


def assert_same(found, expected):
    leaves = [torch.utils._pytree.tree_leaves(each) for each in (found, expected)]
    assert leaves[0]
    assert all(map(torch.equal, *leaves))


ACTIVATIONS = {
    "layers": lambda model: ActivationOffloader(model, num_layers=3, min_bytes=1),
    "modules": lambda model: ActivationOffloader(model, modules=["0"], min_bytes=1),
    "checkpoint": lambda model: CheckpointOffloader(model, min_bytes=1),
}


HARMLESS = [
    (kind, way)
    for kind in ACTIVATIONS
    for way in WAYS
    if kind != "layers" or way not in ("jvp", "dual numbers")
]


@pytest.mark.parametrize(("kind", "way"), HARMLESS)
def test_modules_of_activation_offloaders_run_as_they_are(kind, way):
    model, expected = Net(), WAYS[way](Net())
    with ACTIVATIONS[kind](model) as offloader:
        with pytest.warns(
            UserWarning, match=rf"{type(offloader).__name__} offloads and recomputes nothing inside torch"
        ):
            assert_same(WAYS[way](model), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(WAYS[way](model), expected)
        model(BATCH).backward()
        assert offloader.offloaded_bytes > 0


def test_forward_mode_is_a_transform_too_and_guards_ask_for_any(monkeypatch):
    told = []
    jvp(lambda batch: told.append(running_transform()) or batch, (BATCH,), (BATCH,))
    with forward_ad.dual_level():
        told.append(running_transform())
    assert told == ["torch.func.jvp (jacfwd, hessian)", "torch.autograd.forward_ad.dual_level"]
    assert running_transform() is None
    model = Net()
    with ACTIVATIONS["layers"](model) as offloader:
        monkeypatch.setattr("reference_impl.activations.offloader.running_transform", lambda: "dual_level")
        with pytest.warns(UserWarning, match="inside dual_level"):
            model(BATCH).backward()
        assert offloader.offloaded_bytes == 0


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_second_derivatives_and_functional_calls_are_offloaded(kind):
    model, plain = Net(), Net()
    with ACTIVATIONS[kind](model) as offloader:
        assert_same(of_second_derivatives(model), of_second_derivatives(plain))
        before = offloader.offloaded_bytes
        params = {name: param.requires_grad_() for name, param in trained(model).items()}
        assert_same(called(model, params, BATCH), plain(BATCH))
        assert offloader.offloaded_bytes > before > 0


def test_offloaded_weights_are_refused_by_name_before_a_module_runs():
    """Crashing cases are not tried: the guard is asked before that, whatever the transform."""
    model = Net()
    with ActivationOffloader(model, num_layers=2, weights=True, min_bytes=1):
        model(BATCH).backward()
        for way in ("vmap", "grad", "stacked parameters"):
            with pytest.raises(
                RuntimeError, match=r"torch\.func\..*weights are offloaded.*try weights=False, or close\(\)"
            ):
                WAYS[way](model)
        assert running_transform() is None
        model(BATCH).backward()
    assert_same(WAYS["vmap"](model), WAYS["vmap"](Net()))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_layers_that_stream_are_refused_by_name_and_run_while_they_are_gathered(way, prefetch):
    model, expected = Net(), WAYS[way](Net())
    given = torch.optim.AdamW(model.parameters(), fused=True)
    with TrainableLayerStreamer(model, given, prefetch=prefetch) as streamer:
        with pytest.raises(RuntimeError, match=r"with streamer\.gathered\(\):` around"):
            WAYS[way](model)
        with streamer.gathered():
            assert_same(WAYS[way](model), expected)
        model(BATCH).backward()
        streamer.optimizer.step()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_frozen_layers_that_stream_serve_what_has_one_backward(way, prefetch):
    model, plain = Net(), Net()
    for each in (model, plain):
        each.layers.requires_grad_(False)
    expected = WAYS[way](plain)
    with FrozenLayerStreamer(model, prefetch=prefetch) as streamer:
        if way in TWICE:
            with pytest.raises(
                RuntimeError, match=r"create_graph=True.*with streamer\.gathered\(\):` around"
            ):
                WAYS[way](model)
            with streamer.gathered():
                assert_same(WAYS[way](model), expected)
        else:
            assert_same(WAYS[way](model), expected)


@contextmanager
def stepped(model, kind):
    """An attached optimizer whose update is on its way."""
    if kind == "offloader":
        # More chunks than step() queues.
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        made = OptimizerStateOffloader(adamw, chunk_bytes=768)
    else:
        made = HybridDeviceOptimizer(model.parameters())
    with made as optimizer:
        optimizer.attach(model)
        model(BATCH).backward()
        optimizer.step()
        yield


@pytest.mark.parametrize("way", [*REVERSE, "jvp", "dual numbers", "vmap"])
@pytest.mark.parametrize("kind", ["offloader", "hybrid"])
def test_new_weights_of_an_attached_optimizer_arrive_inside_a_transform(kind, way):
    model, plain = Net(), Net()
    adamw = torch.optim.AdamW(plain.parameters(), fused=True)
    plain(BATCH).backward()
    adamw.step()
    with stepped(model, kind):
        assert_same(WAYS[way](model), WAYS[way](plain))
