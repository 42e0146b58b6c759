# SPDX-License-Identifier: Apache-2.0
"""Parameters of every kind, and changes to them between steps."""

import copy

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import OPTIONS, assert_same_weights, hybrid, reference, train, twins
from torch import nn

from reference_impl import CpuUpdate, HybridDeviceOptimizer
from reference_impl.optimizers import SGD


def assert_follows_torch(device, params, *, steps=3, fraction=1.0):
    """Give copies of `params` to torch, both the same gradients, and compare bitwise on the CPU."""
    ours = [nn.Parameter(param.detach()) for param in params]
    theirs = [nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]
    other = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    generator = torch.Generator().manual_seed(0)
    with hybrid(ours, offload_fraction=fraction) as optimizer:
        for _ in range(steps):
            for one, its in zip(ours, theirs, strict=True):
                one.grad = torch.randn(one.shape, generator=generator).to(one)
                # torch's fused kernels pair memory with memory: theirs needs the parameter's own layout.
                its.grad = torch.empty_like(its).copy_(one.grad)
            optimizer.step()
            other.step()
        for one, its in zip(ours, theirs, strict=True):
            if device.is_accelerator:
                torch.testing.assert_close(one, its)
            else:
                assert torch.equal(one, its)
        return optimizer.state_dict(), other.state_dict()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_an_empty_parameter_has_an_empty_state(device, fraction):
    place = device.torch_device
    params = [torch.randn(70, device=place), torch.empty(0, 4, device=place), torch.randn(3, device=place)]
    ours, theirs = assert_follows_torch(device, params, fraction=fraction)
    assert ours["state"].keys() == theirs["state"].keys()
    assert ours["state"][1]["exp_avg"].shape == (0, 4)


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_dense_strides_of_any_order_are_kept(device, fraction):
    place = device.torch_device
    params = [
        torch.randn(33, 20, device=place).t(),
        torch.randn(4, 5, 6, device=place).permute(2, 0, 1),
        torch.randn(100, device=place)[7:90],
        torch.randn(1, 9, device=place),
        torch.randn((), device=place),
    ]
    assert_follows_torch(device, params, fraction=fraction)


def test_a_gradient_of_another_layout_is_laid_out_like_its_parameter(device):
    weight = torch.randn(12, 7, device=device.torch_device)
    ours, theirs = (
        nn.Parameter(weight.t()),
        nn.Parameter(weight.t().clone(memory_format=torch.preserve_format)),
    )
    gradient = torch.randn(7, 12, device=device.torch_device)
    other = torch.optim.AdamW([theirs], fused=True, **OPTIONS)
    with hybrid([ours]) as optimizer:
        for each in (gradient, gradient[:1].expand(7, 12)):
            ours.grad, theirs.grad = each, torch.empty_like(theirs).copy_(each)
            optimizer.step()
            other.step()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
def test_freezing_and_unfreezing_between_steps(device, attached, backward_overlap):
    """A frozen parameter is left alone; one that was frozen from the start joins with its first gradient."""
    model, plain = twins(device)
    data = batches(device.torch_device, 6)
    for net in (model, plain):
        net.first.requires_grad_(False)
    theirs = reference(plain)
    unfrozen = dict(zip(theirs.params, theirs.masters, strict=True))
    with hybrid(model, backward_overlap=backward_overlap) as optimizer:
        if attached:
            optimizer.attach(model)
        for batch, change in zip(
            data,
            [None, lambda net: net.embed.requires_grad_(False), lambda net: net.embed.requires_grad_(True)]
            * 2,
            strict=True,
        ):
            for net, opt in ((model, optimizer), (plain, theirs)):
                if change is not None:
                    change(net)
                train(net, opt, [batch])
        for net in (model, plain):
            net.first.requires_grad_(True)
        fresh = [p for p in plain.first.parameters() if p not in unfrozen]
        theirs.params += fresh
        theirs.masters += [nn.Parameter(p.detach().float().cpu()) for p in fresh]
        theirs.inner.add_param_group({"params": theirs.masters[-len(fresh) :]})
        train(model, optimizer, data)
        train(plain, theirs, data)
        assert_same_weights(model, plain)
        index = [param is model.first.weight for param in model.parameters()].index(True)
        assert optimizer.state_dict()["state"][index]["step"] == 6


def test_unused_and_frozen_parameters_have_no_state(device):
    model, _ = twins(device)
    with hybrid(model, offload_fraction=0.5) as optimizer:
        train(model, optimizer, batches(device.torch_device, 2))
        names = [name for name, _ in model.named_parameters()]
        stated = {names[index] for index in optimizer.state_dict()["state"]}
        assert stated == {"scale", "embed.weight", "first.weight", "first.bias", "second.weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_exchanged_memory_of_a_parameter_is_followed(device, dtype, fraction):
    model, plain = twins(device, dtype)
    data = batches(device.torch_device, 4)
    with (
        hybrid(model, offload_fraction=fraction) as optimizer,
        hybrid(plain, offload_fraction=fraction) as other,
    ):
        train(model, optimizer, data[:2])
        for param in model.parameters():
            param.data = param.data.clone()
        train(model, optimizer, data[2:])
        train(plain, other, data)
        assert_same_weights(model, plain)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_changed_memory_format_is_named(device, fraction):
    layer = nn.Conv2d(3, 4, 3, device=device.torch_device)
    with hybrid(layer, offload_fraction=fraction) as optimizer:
        layer.to(memory_format=torch.channels_last)
        layer.weight.grad = torch.ones_like(layer.weight)
        with pytest.raises(RuntimeError, match="memory format"):
            optimizer.step()


def test_weights_written_by_hand_count_after_refresh(device):
    model, plain = twins(device)
    data = batches(device.torch_device, 1)
    with hybrid(model, offload_fraction=0.5) as optimizer, torch.no_grad():
        model.first.weight.fill_(0.25)
        optimizer.refresh_masters()
        master = optimizer.state[model.first.weight]["master_param"]
        assert torch.equal(master.cpu(), torch.full((131, 48), 0.25))
    for net in (model, plain):
        with torch.no_grad():
            net.first.weight.fill_(0.25)
    with hybrid(model) as optimizer:
        train(model, optimizer, data)
        train(plain, reference(plain), data)
        assert_same_weights(model, plain)


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("algorithm", [None, SGD()], ids=["adamw", "sgd"])
def test_a_learning_rate_may_be_a_tensor(device, fraction, algorithm):
    """The one of `step()` counts, also when it is changed in place right after."""
    model, plain = twins(device)
    data = batches(device.torch_device, 3)
    options = {} if algorithm is None else {"algorithm": algorithm}
    own = {} if algorithm is None else {"betas": None, "eps": None}
    hyper = {name: value for name, value in OPTIONS.items() if name not in own}
    rate = torch.tensor(1e-2)
    one = HybridDeviceOptimizer(
        model.parameters(),
        **options,
        offload_fraction=fraction,
        cpu=CpuUpdate(bucket_elements=1024),
        **{**hyper, "lr": rate},
    )
    other = HybridDeviceOptimizer(
        plain.parameters(), **options, offload_fraction=fraction, cpu=CpuUpdate(bucket_elements=1024), **hyper
    )
    with one, other:
        one.attach(model)
        for batch, lr in zip(data, [1e-2, 5e-3, 2e-2], strict=True):
            rate.fill_(lr)
            other.param_groups[0]["lr"] = rate.item()
            train(model, one, [batch])
            rate.fill_(99.0)
            train(plain, other, [batch])
        assert_same_weights(model, plain)


def test_a_group_added_to_an_attached_model_is_waited_for(device):
    model, plain = twins(device)
    data = batches(device.torch_device, 3)
    first = list(model.first.parameters())
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not q for q in first)]
    with hybrid(rest) as optimizer:
        optimizer.attach(model)
        optimizer.add_param_group({"params": first})
        train(model, optimizer, data)
        train(plain, reference(plain), data)
        assert_same_weights(model, plain)


@pytest.mark.parametrize(
    ("group", "error"),
    [({"amsgrad": True}, ValueError), ({"lr": -1.0}, ValueError), ({"dtype": torch.complex64}, ValueError)],
    ids=["option", "value", "dtype"],
)
def test_a_group_that_is_refused_leaves_no_trace(device, group, error):
    model, plain = twins(device)
    extra = torch.zeros(3, dtype=group.pop("dtype", torch.float32), device=device.torch_device)
    with hybrid(model) as optimizer:
        with pytest.raises(error):
            optimizer.add_param_group({"params": [nn.Parameter(extra)], **group})
        assert len(optimizer.param_groups) == 1
        data = batches(device.torch_device, 2)
        train(model, optimizer, data)
        train(plain, reference(plain), data)
        assert_same_weights(model, plain)


def test_the_choice_of_parameters_can_be_the_callers(device):
    model, _ = twins(device)
    with hybrid(model, offload_filter=lambda param: param.ndim > 1) as optimizer:
        for member in optimizer.members.values():
            assert member.on_cpu == (member.param.numel() if member.param.ndim > 1 else 0)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_gradients_may_be_zeroed_in_place(device, fraction):
    model, plain = twins(device)
    data = batches(device.torch_device, 3)
    other = copy.deepcopy(plain)
    with (
        hybrid(model, offload_fraction=fraction) as optimizer,
        hybrid(other, offload_fraction=fraction) as same,
    ):
        for batch in data:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        train(other, same, data)
        for name in ("embed", "first", "second"):
            left, right = getattr(model, name).weight, getattr(other, name).weight
            assert torch.equal(left, right), name
