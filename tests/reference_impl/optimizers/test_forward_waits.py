# SPDX-License-Identifier: Apache-2.0
"""The forward that waits for a weight: its owner's, or the reader's if the owner has none."""

import copy

import pytest
import torch
from optimizer_training import OPTIONS, assert_same_weights, hybrid, streaming
from torch import nn


def half(model):
    return hybrid(model, offload_fraction=0.5)


def in_three_shares(model):
    return hybrid(model, split=(0.3, 0.4, 0.3))


BUILDS = pytest.mark.parametrize("build", [hybrid, half, in_three_shares, streaming])


class Mixing(nn.Module):
    """Multiplies by the matrices of a container, which has no forward."""

    def __init__(self, weights, items):
        super().__init__()
        self.weights, self.items = weights, items

    def forward(self, x):
        for weight in self.items(self.weights):
            x = torch.tanh(x @ weight)
        return x


def matrices(count=2):
    return [torch.randn(16, 16) for _ in range(count)]


def in_a_list():
    return Mixing(nn.ParameterList(matrices()), list)


def in_a_dict():
    return Mixing(nn.ParameterDict(zip("ab", matrices(), strict=True)), lambda held: held.values())


def in_a_list_of_lists():
    lists = nn.ModuleList(nn.ParameterList(matrices(1)) for _ in range(2))
    return Mixing(lists, lambda held: [each[0] for each in held])


def in_a_list_that_two_modules_share():
    shared = nn.ParameterList(matrices())
    return nn.Sequential(
        Mixing(shared, lambda held: [held[0]]), nn.Tanh(), Mixing(shared, lambda held: [held[1]])
    )


def beside_the_module_that_is_called():
    """A linear layer whose weight is read by its parent before the first trained module is called."""

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.called = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

        def forward(self, x):
            return self.called(x @ self.read.weight)

    return Reading()


def by_the_model_alone():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return x @ self.read.weight

    return Reading()


@BUILDS
@pytest.mark.parametrize(
    "make",
    [
        in_a_list,
        in_a_dict,
        in_a_list_of_lists,
        in_a_list_that_two_modules_share,
        beside_the_module_that_is_called,
        by_the_model_alone,
    ],
)
def test_weights_are_waited_for_wherever_they_are_read(device, build, make):
    if device.is_accelerator and build in (half, hybrid, in_three_shares):
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")
    torch.manual_seed(0)
    model = make().to(device.torch_device)
    plain = copy.deepcopy(model)
    x = torch.randn(4, 16, device=device.torch_device)
    other = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    with build(model) as optimizer:
        optimizer.attach(model)
        for net, opt in ((model, optimizer), (plain, other)):
            for _ in range(4):
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        optimizer.synchronize()
        assert_same_weights(model, plain)


@BUILDS
@pytest.mark.parametrize(
    "other",
    [copy.deepcopy, lambda model: model[0], lambda model: nn.Sequential(model[0], copy.deepcopy(model[1]))],
    ids=["a copy", "a part", "one that shares a part"],
)
def test_a_model_that_lacks_a_trained_parameter_is_refused(device, build, other):
    """At once, and the one that was attached before stays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(device.torch_device)
    x = torch.randn(4, 16, device=device.torch_device)
    with build(model) as optimizer:
        optimizer.attach(model)
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        with pytest.raises(ValueError, match=r"a parameter of shape .* is not in the .*try attach\(\) of"):
            optimizer.attach(other(model))
        assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@BUILDS
def test_several_modules_are_attached_as_a_list(device, build):
    """A criterion that trains, too: the refusal's advice."""
    if device.is_accelerator and build is not streaming:
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")

    def trained(make):
        torch.manual_seed(0)
        model = nn.Linear(16, 16).to(device.torch_device)
        criterion = nn.Bilinear(16, 16, 1).to(device.torch_device)
        both = nn.ModuleList([model, criterion])
        optimizer = make(both)
        if make is build:
            with pytest.raises(ValueError, match=r"torch\.nn\.ModuleList\(\[\.\.\.\]\)"):
                optimizer.attach(model)
            optimizer.attach(both)
        x = torch.randn(4, 16, device=device.torch_device)
        for _ in range(4):
            criterion(model(x), x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if make is build:
            optimizer.close()
        return both

    assert_same_weights(
        trained(build), trained(lambda both: torch.optim.AdamW(both.parameters(), fused=True, **OPTIONS))
    )


@BUILDS
def test_a_group_that_the_attached_model_lacks_is_refused(device, build):
    torch.manual_seed(0)
    model = nn.Linear(16, 16, device=device.torch_device)
    late = nn.Linear(16, 4, device=device.torch_device)
    with build(model) as optimizer:
        optimizer.attach(model)
        with pytest.raises(ValueError, match="is not in the Linear that is attached"):
            optimizer.add_param_group({"params": list(late.parameters())})
        assert len(optimizer.param_groups) == 1
        assert not any(param in optimizer.members for param in late.parameters())
        model.late = late
        optimizer.add_param_group({"params": list(late.parameters())})
        model.late(model(torch.ones(2, 16, device=device.torch_device))).sum().backward()
        optimizer.step()
        optimizer.synchronize()


@BUILDS
def test_copies_and_saves_wait_for_weights_in_containers(device, build):
    torch.manual_seed(0)
    model = in_a_dict().to(device.torch_device)
    x = torch.randn(4, 16, device=device.torch_device)
    with build(model) as optimizer:
        optimizer.attach(model)
        model(x).square().mean().backward()
        optimizer.step()
        saved, copied = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
        optimizer.synchronize()
        assert_same_weights(copied, model)
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
