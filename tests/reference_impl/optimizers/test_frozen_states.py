# SPDX-License-Identifier: Apache-2.0
"""States of parameters that are frozen when they are loaded: saved again, and there once they train again."""

import copy

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import OPTIONS, SMALL_CHUNKS, assert_same_weights, fresh, hybrid, streaming, train

MAKERS = {
    "on the CPU": hybrid,
    "resident": lambda model: hybrid(model, offload_fraction=0.0),
    "three ways": lambda model: hybrid(model, split=(0.3, 0.3, 0.4), streaming=SMALL_CHUNKS),
    "streamed": streaming,
}
KINDS = pytest.mark.parametrize("kind", MAKERS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.mark.parametrize("attached", [False, True])
@DTYPES
@KINDS
def test_a_run_resumed_twice_while_a_layer_is_frozen_goes_on_with_the_same_bits(
    device, kind, dtype, attached
):
    data = batches(device.torch_device, 8)

    def run(*, resumes):
        model = fresh(device, dtype)
        optimizer = MAKERS[kind](model)
        for index, batch in enumerate(data):
            if resumes and index in (3, 5):
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                frozen = model.first.weight.requires_grad
                optimizer.close()
                model = fresh(device, dtype)
                model.first.requires_grad_(frozen)
                optimizer = MAKERS[kind](model)
                if attached:
                    optimizer.attach(model)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            if index in (2, 6):
                model.first.requires_grad_(index == 6)
            train(model, optimizer, [batch])
        states = optimizer.state_dict()["state"]
        optimizer.close()
        return model, states

    (whole, expected), (resumed, found) = run(resumes=False), run(resumes=True)
    assert_same_weights(whole, resumed)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, check_device=False)


def test_states_that_a_wrapped_optimizer_has_of_a_frozen_layer_are_saved(device):
    model = fresh(device, torch.float32)
    given = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    train(model, given, batches(device.torch_device, 2))
    expected = copy.deepcopy(given.state_dict()["state"])
    model.first.requires_grad_(requires_grad=False)
    with streaming(model, wrapped=given) as optimizer:
        found = optimizer.state_dict()["state"]
        assert set(found) == set(expected)
        torch.testing.assert_close(
            {key: found[key] for key in expected}, expected, rtol=0, atol=0, check_device=False
        )


def test_a_weight_that_was_written_while_it_was_frozen_stays(device):
    data = batches(device.torch_device, 2)
    model = fresh(device)
    with hybrid(model) as optimizer:
        train(model, optimizer, data[:1])
        saved = copy.deepcopy(optimizer.state_dict())
    model.second.requires_grad_(requires_grad=False)
    with hybrid(model) as optimizer:
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            model.second.weight[:2] += 1
        written = model.second.weight.detach().clone()
        model.second.requires_grad_(requires_grad=True)
        train(model, optimizer, data[1:])
        assert (model.second.weight.detach() - written).abs().max() < 0.1
