# SPDX-License-Identifier: Apache-2.0
"""An offloader's wrappers on a model show nowhere else: not in its signature, its copies, nor after it is closed."""

import copy
import inspect
import io
import itertools
import pickle
from types import MethodType

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from reference_impl.activations import ActivationOffloader, CheckpointOffloader


class Model(nn.Module):
    def __init__(self, make=lambda: nn.Linear(8, 8)):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x, *, scale: float = 1.0):
        for layer in self.layers:
            x = layer(x)
        return x * scale


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "AveragedModel": lambda model: AveragedModel(model).module,
}


def one(model):
    return [ActivationOffloader(model, min_bytes=1)]


def two(model):
    return [ActivationOffloader(model, min_bytes=1), CheckpointOffloader(model, min_bytes=1)]


def weights_too(model):
    return [ActivationOffloader(model, min_bytes=1, weights=True)]


def zero(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("attach", [one, two, weights_too])
def test_a_copy_is_plain_and_runs_its_own_weights(attach, make):
    model, x = Model(), torch.ones(4, 8)
    attributes = [set(module.__dict__) for module in model.modules()]
    expected = model(x)
    offloaders = attach(model)
    loss = model(x).sum()
    made = make(model)
    assert [set(module.__dict__) for module in made.modules()] == attributes
    assert not made._state_dict_pre_hooks
    assert torch.equal(made(x), expected)
    zero(made)
    assert not made(x).any()
    loss.backward()
    assert all(parameter.grad is None for parameter in made.parameters())
    for offloader in offloaders:
        offloader.close()
    assert not made(x).any()
    assert torch.equal(model(x), expected)


def test_a_copy_of_one_layer_is_plain_too():
    model = Model()
    with ActivationOffloader(model, min_bytes=1):
        layer = copy.deepcopy(model.layers[0])
    assert "forward" not in layer.__dict__


def test_a_copy_keeps_the_users_own_patch():
    model, x = Model(), torch.ones(1, 8)
    plain = model(x)
    model.forward = MethodType(lambda self, x: type(self).forward(self, x) + 1, model)
    with ActivationOffloader(model, min_bytes=1):
        made = copy.deepcopy(model)
        zero(made)
        assert torch.equal(made(x), torch.ones(1, 8))
        assert torch.equal(model(x), plain + 1)


def test_a_method_that_was_put_elsewhere_runs_the_copys_weights():
    """As accelerate does, which keeps the replaced forward in another attribute."""
    model, x = Model(), torch.ones(1, 8)
    with ActivationOffloader(model, min_bytes=1):
        model._original_forward = model.forward
        made = copy.deepcopy(model)
        zero(made)
        assert not made._original_forward(x).any()


def test_the_signature_is_the_users():
    model = Model()
    wanted = [
        inspect.signature(each.forward) for each in model.modules() if not isinstance(each, nn.ModuleList)
    ]
    with ActivationOffloader(model, min_bytes=1), CheckpointOffloader(model, min_bytes=1):
        found = [
            inspect.signature(each.forward) for each in model.modules() if not isinstance(each, nn.ModuleList)
        ]
        names = inspect.getfullargspec(model.forward).args
    assert found == wanted
    assert names == ["self", "x"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_closing_in_any_order_takes_off_what_was_put_on(order):
    model, x = Model(), torch.ones(64, 8)
    before = [dict(module.__dict__) for module in model.modules()]
    expected = model(x)
    offloaders = [
        ActivationOffloader(model, min_bytes=1),
        CheckpointOffloader(model, min_bytes=1),
        ActivationOffloader(model, min_bytes=1, num_layers=1),
    ]
    for number in order:
        offloaders[number].close()
        moved = [each.offloaded_bytes for each in offloaders]
        assert torch.equal(model(x), expected)
        model(x).sum().backward()
        closed = order[: order.index(number) + 1]
        assert all(offloaders[each].offloaded_bytes == moved[each] for each in closed)
        assert all(offloaders[each].arena.reserved_bytes == 0 for each in closed)
    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("opened_inside", [False, True])
def test_a_patch_that_came_later_survives_closing(opened_inside):
    model, x = Model(), torch.ones(1, 8)
    expected = model(x) + 1
    offloader = ActivationOffloader(model, min_bytes=1)
    beneath = model.forward
    model.forward = patch = lambda x: beneath(x) + 1
    inside = CheckpointOffloader(model, min_bytes=1) if opened_inside else None
    offloader.close()
    if inside is not None:
        inside.close()
    assert model.forward is patch
    assert torch.equal(model(x), expected)
    del model.forward
    assert torch.equal(model(x) + 1, expected)


KINDS = {
    "Linear": lambda: nn.Linear(8, 8),
    "Sequential": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
}


def compile_blocks(model):
    for layer in model.layers:
        layer.compile(backend="eager")


@pytest.mark.parametrize(
    "compile_",
    [compile_blocks, pytest.param(lambda model: model.compile(backend="eager"), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "make", [KINDS["Linear"], pytest.param(KINDS["Sequential"], marks=pytest.mark.slow)], ids=KINDS
)
@pytest.mark.parametrize("compiled_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_modules_of_torchs_own(make, compile_, compiled_first):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(make), torch.ones(4, 8)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    if compiled_first:
        compile_(model)
    with ActivationOffloader(model, min_bytes=1) as offloader:
        if not compiled_first:
            compile_(model)
        model(x).sum().backward()
        assert offloader.offloaded_bytes > 0
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
