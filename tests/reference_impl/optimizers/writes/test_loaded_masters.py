# SPDX-License-Identifier: Apache-2.0
"""A weight is its loaded master rounded from the load on: whatever comes next meets it as a step has left it."""

import copy

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import SMALL_CHUNKS, assert_same_weights, fresh, hybrid, streaming, train

MAKERS = {
    "on the CPU": hybrid,
    "resident": lambda model: hybrid(model, offload_fraction=0.0),
    "three ways": lambda model: hybrid(model, split=(0.3, 0.3, 0.4), streaming=SMALL_CHUNKS),
    "packed": streaming,
    "whole masters": lambda model: streaming(model, offload_masters=False),
}
KINDS = pytest.mark.parametrize("kind", MAKERS)
ATTACHED = pytest.mark.parametrize("attached", [True, False])


def started(device, kind, *, attached):
    model = fresh(device)
    optimizer = MAKERS[kind](model)
    if attached:
        optimizer.attach(model)
    return model, optimizer


def checkpoint(device, kind, data):
    model, optimizer = started(device, kind, attached=False)
    with optimizer:
        train(model, optimizer, data)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@ATTACHED
@KINDS
def test_the_weights_are_the_masters_before_the_next_step(device, kind, attached):
    weights, states = checkpoint(device, kind, batches(device.torch_device, 3))
    model, optimizer = started(device, kind, attached=attached)
    with optimizer:
        optimizer.load_state_dict(states)
        found = model.state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


@ATTACHED
@KINDS
def test_a_model_may_be_loaded_behind_its_optimizer(device, kind, attached):
    data = batches(device.torch_device, 6)
    weights, states = checkpoint(device, kind, data[:3])
    runs = []
    for model_first in (True, False):
        model, optimizer = started(device, kind, attached=attached)
        with optimizer:
            if model_first:
                model.load_state_dict(weights)
            optimizer.load_state_dict(states)
            if not model_first:
                model.load_state_dict(weights)
            train(model, optimizer, data[3:])
            runs.append((model, optimizer.state_dict()["state"]))
    (first, first_states), (second, second_states) = runs
    assert_same_weights(first, second)
    torch.testing.assert_close(first_states, second_states, rtol=0, atol=0)


@pytest.mark.parametrize("steps", [0, 2])
@KINDS
def test_masters_follow_an_uncounted_write_behind_a_load(device, kind, steps):
    data = batches(device.torch_device, 4)
    _, states = checkpoint(device, kind, data[:1])
    model, optimizer = started(device, kind, attached=False)
    with optimizer:
        optimizer.load_state_dict(states)
        train(model, optimizer, data[1 : 1 + steps])
        model.second.weight.data.add_(1)
        written = model.second.weight.detach().clone()
        train(model, optimizer, data[3:])
        # A step changes an element by hardly more than its rate.
        assert (model.second.weight.detach() - written).abs().max() < 0.1


@KINDS
def test_no_graph_of_before_a_load_may_be_used(device, kind):
    data = batches(device.torch_device, 2)
    _, states = checkpoint(device, kind, data[:1])
    model, optimizer = started(device, kind, attached=False)
    with optimizer:
        loss = model(data[1])
        optimizer.load_state_dict(states)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
