# SPDX-License-Identifier: Apache-2.0
"""Users' code around a step as torch lets it through, and torch's own functions that do the same."""

import copy
import itertools

import pytest
import torch
from optimizer_training import OPTIONS, hybrid
from torch import nn
from torch.nn.utils import parametrize

from reference_impl import HybridDeviceOptimizer, TrainableLayerStreamer

LOST_IN_BETWEEN = r"was used between backward and step\(\).*backward_overlap='gradients'"


def made(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(device.torch_device)


def inputs(device):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator).to(device.torch_device) for _ in range(4)]


def plain(model):
    return torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)


def attached(model, **options):
    optimizer = hybrid(model, **options)
    optimizer.attach(model)
    return optimizer


def three_ways(model):
    return attached(model, split=(0.3, 0.4, 0.3))


def resident(model):
    return attached(model, offload_fraction=0.0)


def in_backward(model):
    return attached(model, backward_overlap="update")


def blocks_in_backward(model):
    streamer = TrainableLayerStreamer(model, plain(model), layers=list(model)[:2], backward_overlap="update")
    optimizer, close = streamer.optimizer, streamer.optimizer.close
    optimizer.close = lambda: (streamer.close(), close())
    return optimizer


def trained(device, make, *, before_step=None, behind_step=None):
    """Return the weights of two models behind some steps; each hook is called with both and the number of the step."""
    models = [made(device, seed) for seed in range(2)]
    optimizers = [make(model) for model in models]
    for index, x in enumerate(inputs(device)):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            if before_step is not None:
                before_step(model)
            optimizer.step()
            optimizer.zero_grad()
        if behind_step is not None:
            behind_step(*models, index)
    for optimizer in optimizers:
        for end in ("synchronize", "close"):
            getattr(optimizer, end, lambda: None)()
    return [param.detach() for model in models for param in model.parameters()]


def exchanged(first, second, index):
    """As an evolution of several models exchanges them."""
    if index == 1:
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            one.data, other.data = other.data, one.data


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def parametrized(first, second, index):
    """Which calls `set_` of the weight with itself."""
    if index == 1:
        parametrize.register_parametrization(first[0], "weight", Symmetric())
    if index == 2:
        parametrize.remove_parametrizations(first[0], "weight")


def given_other_memory(first, second, index):
    with torch.no_grad():
        first[1].weight.set_(first[1].weight * 0.5)


def copied_as_a_parameter(first, second, index):
    with torch.no_grad():
        second[2].weight.copy_(nn.Parameter(first[2].weight))


@pytest.mark.parametrize("make", [attached, three_ways, resident])
@pytest.mark.parametrize("use", [exchanged, parametrized, given_other_memory, copied_as_a_parameter])
def test_weights_that_are_used_behind_a_step_are_new(device, make, use):
    if device.is_accelerator and make is not resident:
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")
    ours, theirs = (trained(device, each, behind_step=use) for each in (make, plain))
    assert all(map(torch.equal, ours, theirs))


def test_a_copy_of_a_parameter_on_its_way_is_a_parameter_of_torch(device):
    model = made(device)
    with attached(model) as optimizer:
        model(inputs(device)[0]).square().mean().backward()
        optimizer.step()
        (found,) = copy.deepcopy([model[0].weight])
        assert type(found) is nn.Parameter
        optimizer.synchronize()
        assert torch.equal(found, model[0].weight)


def drop(param):
    param.grad = None


@pytest.mark.parametrize("make", [attached, three_ways, in_backward, blocks_in_backward])
def test_a_gradient_that_a_hook_of_the_users_drops_is_none(device, make):
    """Hooks that stand on a parameter before the optimizer's run first."""

    def with_hooks(make, model):
        model[1].weight.register_post_accumulate_grad_hook(drop)
        return make(model)

    if device.is_accelerator and make is not blocks_in_backward:
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")
    ours, theirs = (
        trained(device, lambda model, make=make: with_hooks(make, model)) for make in (make, plain)
    )
    assert all(map(torch.equal, ours, theirs))


def run(model):
    model(inputs_of(model))


def inputs_of(model):
    return torch.ones(1, 16, device=next(model.parameters()).device)


def load(model):
    model.load_state_dict(model.state_dict())


def read(model):
    model[2].weight.detach()


@pytest.mark.parametrize(
    ("make", "use"),
    [*itertools.product([in_backward, blocks_in_backward], [run, copy.deepcopy, load]), (in_backward, read)],
)
def test_no_model_is_used_between_a_backward_that_updates_and_its_step(device, make, use):
    """Some of its weights are new by then: the optimizer goes on."""

    def refused(model):
        with pytest.raises(RuntimeError, match=LOST_IN_BETWEEN):
            use(model)

    uses, none = (trained(device, make, before_step=each) for each in (refused, None))
    assert all(map(torch.equal, uses, none))


@pytest.mark.parametrize("of_layer", [False, True])
@pytest.mark.parametrize("make", [attached, in_backward, blocks_in_backward])
def test_a_load_that_is_refused_before_step_has_written_nothing(device, make, of_layer):
    """Neither a weight with a begun update, nor a module in front of it unknown to the optimizer."""

    def counting(model):
        model.register_buffer("seen", torch.zeros(1, device=device.torch_device))
        return make(model)

    def refused(model):
        loaded = model[1] if of_layer else model
        ones = {
            name: torch.ones(each.shape)
            for name, each in (*loaded.named_parameters(), *model.named_buffers())
        }
        with pytest.raises(RuntimeError, match=r"between backward and step\(\)"):
            loaded.load_state_dict(ones, strict=False)
        assert not model.seen

    with_loads, without = (trained(device, counting, before_step=each) for each in (refused, None))
    assert all(map(torch.equal, with_loads, without))


@pytest.mark.parametrize("is_used", [False, True])
def test_memory_of_a_gradient_that_has_left_is_refused_by_name(device, is_used):
    model = made(device)
    with HybridDeviceOptimizer(model.parameters(), offload_fraction=1.0, **OPTIONS) as optimizer:
        model(inputs(device)[0]).square().mean().backward()
        if is_used:
            optimizer.step()
        # Torch would read a storage that has no memory, and end the process.
        for call in (lambda grad: grad.share_memory_(), lambda grad: grad.untyped_storage()):
            with pytest.raises(RuntimeError, match=r"untyped_storage\(\) reads .*; try "):
                call(model[0].weight.grad)
