# SPDX-License-Identifier: Apache-2.0
"""`recomputed` against the same function without it: the same bits, and nothing kept but inputs."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from reference_impl.activations.recompute import recomputed, repeatable


@pytest.fixture
def linear(device):
    return nn.Linear(16, 16).to(device.torch_device)


@pytest.fixture
def x(device):
    return torch.randn(8, 16, device=device.torch_device, requires_grad=True)


def gradients(loss, *tensors):
    return [each.clone() for each in torch.autograd.grad(loss, tensors)]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_only_inputs_are_kept_until_backward(linear, x):
    kept = []

    def layer(x):
        middle = linear(x).sin()
        kept.append(weakref.ref(middle))
        return middle.cos()

    gc.disable()
    try:
        out = recomputed(layer, x)
        assert kept[0]() is None
        out.sum().backward()
        assert len(kept) == 2
        assert kept[1]() is None
    finally:
        gc.enable()


def test_inputs_are_saved_by_the_hooks_outside(linear, x):
    saved = []

    def pack(tensor):
        saved.append(tensor.shape)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = recomputed(lambda x, scale, y: (linear(x) * scale).exp() + y, x, 2.0, x.detach())
    assert saved == [x.shape, x.shape]
    assert same(gradients(out.sum(), x), gradients(((linear(x) * 2.0).exp() + x.detach()).sum(), x))


def test_it_ends_with_the_last_tensor_that_is_saved(linear, x):
    calls = []

    def layer(x):
        out = linear(x.sin())
        calls.append(1)
        return out + 1

    recomputed(layer, x).sum().backward()
    assert calls == [1]


def test_random_numbers_are_the_same_and_no_generator_changes(linear, x, device):
    def layer(x):
        return nn.functional.dropout(linear(x).relu(), 0.5) * torch.rand(16).to(x.device)

    def run(call):
        torch.manual_seed(3)
        found = gradients(call(layer, x).square().sum(), x, linear.weight)
        return [*found, torch.rand(4), torch.rand(4, device=device.torch_device)]

    assert same(run(recomputed), run(lambda layer, x: layer(x)))


def test_autocast_is_as_it_was(linear, x, device):
    kind = device.torch_device.type

    def run(call):
        with torch.autocast(kind, dtype=torch.bfloat16):
            out = call(lambda x: linear(linear(x).sin()), x)
        assert out.dtype == torch.bfloat16
        with torch.autocast(kind, enabled=False):
            return gradients(out.float().sum(), x, linear.weight)

    assert same(run(recomputed), run(lambda layer, x: layer(x)))
    # And off, where it is on during backward.
    losses = [call(lambda x: linear(x).sin(), x).sum() for call in (recomputed, lambda layer, x: layer(x))]
    with torch.autocast(kind, dtype=torch.bfloat16):
        assert same(*(gradients(loss, x) for loss in losses))


def test_the_default_device_is_as_it_was(linear, x):
    seen = []

    def layer(x):
        seen.append(torch.empty(0).device.type)
        return linear(x).sin()

    with torch.device("meta"):
        loss = recomputed(layer, x).sum()
    loss.backward()
    assert seen == ["meta", "meta"]
    assert torch.empty(0).device.type == "cpu"


def test_a_graph_that_is_kept_is_computed_again(linear, x):
    calls = []

    def layer(x):
        calls.append(1)
        return linear(x).sin()

    loss = recomputed(layer, x).sum()
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    second = torch.autograd.grad(loss, [x, linear.weight])
    assert torch.equal(first[0], second[0])
    assert len(calls) == 3


def test_second_derivatives(linear, x):
    def run(call):
        (first,) = torch.autograd.grad(call(lambda x: linear(x).sin(), x).sum(), x, create_graph=True)
        return gradients(first.square().sum(), x, linear.weight)

    assert same(run(recomputed), run(lambda layer, x: layer(x)))


def test_one_inside_another(linear, x):
    calls = []

    def inner(x):
        calls.append(1)
        return linear(x).sin()

    def outer(x):
        return recomputed(inner, recomputed(inner, x)).exp()

    assert same(
        gradients(recomputed(outer, x).sum(), x, linear.weight),
        gradients(inner(inner(x)).exp().sum(), x, linear.weight),
    )


def test_a_backward_inside(linear, x):
    def layer(x):
        inner = linear(x).sin()
        (slope,) = torch.autograd.grad(inner.sum(), x, retain_graph=True)
        return inner * slope.detach() + inner.exp()

    assert same(gradients(recomputed(layer, x).sum(), x), gradients(layer(x).sum(), x))


def test_a_derivative_that_is_traced_inside(linear, x):
    def derivative(y):
        return torch.autograd.grad((y.sin() * y).sum(), y)[0]

    def layer(x):
        traced = make_fx(derivative, tracing_mode="fake")(x.detach().requires_grad_())
        return linear(x).sin() * traced(x.detach().requires_grad_()).detach()

    expected = gradients(layer(x).sum(), x, linear.weight)
    assert same(gradients(recomputed(layer, x).sum(), x, linear.weight), expected)


def test_what_is_not_differentiated_is_called_once(linear, x):
    calls = []

    def layer(x):
        calls.append(1)
        return linear(x)

    with torch.no_grad():
        out = recomputed(layer, x)
    assert not out.requires_grad
    assert calls == [1]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x.sin().relu(), r"saved 2 tensors; expected 3"),
        (lambda x: x[:3].sin().relu().exp(), r"tensor 0 .* has 48 elements; expected 128"),
    ],
)
def test_another_second_call_is_refused(x, second, message):
    layers = iter((lambda x: x.sin().relu().exp(), second))
    with pytest.raises(RuntimeError, match=message):
        recomputed(lambda x: next(layers)(x), x).sum().backward()


def test_after_a_second_call_that_fails_backward_can_be_tried_again(linear, x):
    fails = iter((False, True, False))

    def layer(x):
        out = linear(x.sin())
        if next(fails):
            raise MemoryError("planted")
        return out.exp()

    loss = recomputed(layer, x).sum()
    with pytest.raises(MemoryError, match="planted"):
        torch.autograd.grad(loss, [x], retain_graph=True)
    assert same(gradients(loss, x), gradients(linear(x.sin()).exp().sum(), x))


@pytest.mark.slow
def test_a_compiled_layer(linear, x):
    layer = torch.compile(lambda x: linear(x).sin() * 2, backend="aot_eager")
    expected = gradients(layer(x).sum(), x, linear.weight)
    assert same(gradients(recomputed(layer, x).sum(), x, linear.weight), expected)
    whole = torch.compile(lambda x: recomputed(lambda x: linear(x).sin() * 2, x), backend="aot_eager")
    assert same(gradients(whole(x).sum(), x, linear.weight), expected)


def test_what_a_layer_leaves_in_a_dictionary_is_there_for_the_next_and_gone_after_backward(linear, x):
    left = []

    def first(x, shared):
        shared["keys"] = linear(x).sin()
        left.append(weakref.ref(shared["keys"]))
        return shared["keys"].cos()

    def second(x, shared):
        return linear(x) * shared["keys"]

    def loss(run):
        shared = Holder()
        return run(second, run(first, x, shared), shared).sum()

    def again(forward, *args):
        call, leaves = repeatable(forward, args, {})
        return recomputed(call, *leaves)

    class Holder(dict):
        """No container that pytree opens."""

    expected = gradients(loss(lambda forward, *args: forward(*args)), x, linear.weight)
    left.clear()
    gc.disable()
    try:
        assert same(gradients(loss(again), x, linear.weight), expected)
        assert len(left) == 2, "the first layer was not computed again"
        assert all(each() is None for each in left)
    finally:
        gc.enable()


def test_the_first_call_has_the_very_containers(linear, x):
    shared = {}

    def layer(x, shared):
        shared["seen"] = shared.get("seen", 0) + 1
        return linear(x).sin()

    call, leaves = repeatable(layer, (x, shared), {})
    recomputed(call, *leaves).sum().backward()
    assert shared == {"seen": 1}
