# SPDX-License-Identifier: Apache-2.0
"""Reading an absent weight is an error with its name, never a crash and never wrong values."""

import pickle

import pytest
import torch
from torch import nn

from reference_impl.memory.absent import mark_absent, mark_present
from reference_impl.weights import FrozenLayerStreamer

READS = {
    "arithmetic": lambda weight: weight + 1,
    "function": lambda weight: nn.functional.linear(torch.zeros(1, weight.shape[1]), weight),
    "reduction": lambda weight: weight.sum(),
    "index": lambda weight: weight[0],
    "view": lambda weight: weight.view(-1),
    "transpose": lambda weight: weight.T,
    "clone": lambda weight: weight.clone(),
    "move": lambda weight: weight.cpu(),
    "cast": lambda weight: weight.double(),
    "list": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.numpy(),
    "data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach() + 1,
    "write": lambda weight: weight.mul_(2),
    "equal": lambda weight: torch.equal(weight, weight),
    "pickle": pickle.dumps,
    "derivative": lambda weight: torch.autograd.grad(weight, weight, torch.zeros(())),
}


@pytest.fixture
def streamer(trainee):
    with FrozenLayerStreamer(trainee.model, prefetch=0) as streamer:
        trainee.step()
        yield streamer


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_outside_names_the_weight_and_the_way(trainee, streamer, read):
    weight = trainee.layers[3].up.base.weight
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"layers\.3\.up\.base\.weight is not on .*gathered"),
    ):
        read(weight)
    with streamer.gathered():
        weight.sum().item()


def test_it_still_describes_itself(trainee, streamer, device):
    weight = trainee.layers[3].up.base.weight
    assert isinstance(weight, nn.Parameter)
    assert repr(weight).endswith("<layers.3.up.base.weight, not on the device>")
    assert (weight.dtype, weight.device, weight.ndim) == (torch.float32, device.torch_device, 2)
    assert (weight.numel() * weight.element_size(), len(weight)) == (weight.nbytes, weight.size(0))
    assert not weight.requires_grad
    assert weight.is_leaf
    assert weight.is_contiguous()
    assert weight in set(trainee.model.parameters())


def test_a_weight_whose_copy_nobody_has_waited_for_is_not_there(trainee):
    """On CUDA its memory exists and is being filled: a read would see anything."""
    with FrozenLayerStreamer(trainee.model, prefetch=2):
        waiting = [layer for layer in trainee.layers if layer.up.base.weight.untyped_storage().nbytes() > 0]
        assert len(waiting) == 3
        for layer in waiting:
            with pytest.raises(RuntimeError, match="is not on the device"):
                layer.up.base.weight.sum()


def test_buffers_too(device):
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)).to(device.torch_device).requires_grad_(False)
    for layer in model:
        layer.register_buffer("table", torch.zeros(64, 64, device=device.torch_device))
    with (
        FrozenLayerStreamer(model, prefetch=0),
        pytest.raises(RuntimeError, match=r"2\.table is not on the device"),
    ):
        model[2].table.sum()
    assert type(model[2].table) is torch.Tensor


def test_everything_is_itself_again_afterwards(trainee):
    parameters = dict(trainee.model.named_parameters())
    with FrozenLayerStreamer(trainee.model, prefetch=1) as streamer:
        trainee.step()
        with streamer.gathered():
            assert {type(p) for p in trainee.model.parameters()} == {nn.Parameter}
    for name, parameter in trainee.model.named_parameters():
        assert parameter is parameters[name]
        assert type(parameter) is nn.Parameter


def test_marking_twice_is_marking_once():
    tensor = torch.ones(2)
    mark_absent(tensor, "one", "try this")
    mark_absent(tensor, "two", "try that")
    with pytest.raises(RuntimeError, match="one is not on the device"):
        tensor.sum()
    mark_present(tensor)
    mark_present(tensor)
    assert type(tensor) is torch.Tensor
    assert tensor.sum() == 2
