# SPDX-License-Identifier: Apache-2.0
"""The stand-in on `param.grad` for an offloaded gradient, in loops of other people."""

import contextlib
import copy
import pickle

import pytest
import torch
from begun_steps import allocates
from optimizer_reference import batches
from optimizer_training import OPTIONS, assert_same_weights, hybrid, reference, train, twins
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl import HybridDeviceOptimizer
from reference_impl.optimizers.gradients.stand_in import GradientStandIn


def clipped_steps(model, optimizer, data, clip):
    norms = []
    for batch in data:
        (model(batch) * 30).backward()
        norms.append(clip(model))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("attached", [False, True])
def test_clip_grad_norm_gives_the_bits_of_torch(device, make, dtype, fraction, foreach, attached):
    if device.is_accelerator and (fraction < 1 or foreach is not False):
        pytest.skip("shares round differently there, and so do norms of lists")
    model, plain = twins(device, dtype)
    optimizer = make(model, offload_fraction=fraction)
    if attached:
        optimizer.attach(model)
    data = batches(device.torch_device, 4)

    def clip(net):
        return clip_grad_norm_(net.parameters(), 0.05, foreach=foreach)

    norms = clipped_steps(model, optimizer, data, clip)
    expected = clipped_steps(plain, reference(plain), data, clip)
    assert all(norm > 0.05 for norm in norms)
    optimizer.synchronize()
    if device.is_accelerator and dtype is torch.float32:
        # The hook's kernel for lists of norms sums in another order, which bf16 hides.
        torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
        return
    assert all(torch.equal(one, other) for one, other in zip(norms, expected, strict=True))
    assert_same_weights(model, plain)


def test_three_shares_clip_alike(device, make):
    model, plain = twins(device)
    data = batches(device.torch_device, 3)

    def clip(net):
        return clip_grad_norm_(net.parameters(), 0.05)

    clipped_steps(model, make(model, split=(0.3, 0.3, 0.4)), data, clip)
    clipped_steps(plain, make(plain, split=(0.3, 0.3, 0.4), backward_overlap="nothing"), data, clip)
    assert_same_weights(model, plain)


def test_parameters_may_be_scaled_differently_and_more_than_once(device, make):
    model, plain = twins(device)
    optimizer, other = make(model, offload_fraction=0.7), reference(plain)
    for batch in batches(device.torch_device, 3):
        for net, opt in ((model, optimizer), (plain, other)):
            net(batch).backward()
            for index, param in enumerate(param for param in net.parameters() if param.grad is not None):
                param.grad.mul_(0.3 + index)
                param.grad /= 4
            opt.step()
            opt.zero_grad()
    assert_same_weights(model, plain)


def test_the_own_norm_is_measured_after_scaling(device, make):
    model, _ = twins(device, torch.float32)
    optimizer = make(model, max_grad_norm=1.0, offload_fraction=0.5)
    (model(batches(device.torch_device, 1)[0]) * 30).backward()
    clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(
    "drop",
    [
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: [setattr(param, "grad", None) for param in model.parameters()],
    ],
    ids=["none", "zero", "by hand"],
)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_gradient_that_is_dropped_is_dropped(device, make, drop, fraction):
    model, plain = twins(device)
    data = batches(device.torch_device, 3)
    for net, opt in ((model, make(model, offload_fraction=fraction)), (plain, reference(plain))):
        net(data[0]).backward()
        drop(net)
        train(net, opt, data[1:])
    assert_same_weights(model, plain)


def test_gradients_set_to_zero_are_a_step_as_in_torch(device, make):
    model, plain = twins(device)
    data = batches(device.torch_device, 2)
    for net, opt in ((model, make(model, offload_fraction=0.7)), (plain, reference(plain))):
        train(net, opt, data[:1])
        net(data[1]).backward()
        net.zero_grad(set_to_none=False)
        opt.step()
    assert_same_weights(model, plain)


@pytest.mark.parametrize("fraction", [0.7, 1.0])
def test_a_gradient_that_is_replaced_counts(device, make, fraction):
    if device.is_accelerator and fraction < 1:
        pytest.skip(
            "CPU and GPU kernels round differently, so shares that the CPU updates are not bitwise AdamW's"
        )
    model, plain = twins(device)
    for net, opt in ((model, make(model, offload_fraction=fraction)), (plain, reference(plain))):
        net(batches(device.torch_device, 1)[0]).backward()
        generator = torch.Generator().manual_seed(0)
        for param in net.parameters():
            if param.grad is not None:
                param.grad = torch.randn(param.shape, generator=generator).to(param)
        opt.step()
    assert_same_weights(model, plain)


@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
@pytest.mark.parametrize("attached", [False, True])
def test_gradients_stay_after_step_until_zero_grad(device, make, backward_overlap, attached):
    model, plain = twins(device)
    optimizer = make(model, split=(0.3, 0.3, 0.4), backward_overlap=backward_overlap)
    if attached:
        optimizer.attach(model)
    data = batches(device.torch_device, 2)
    for net, opt in ((model, optimizer), (plain, reference(plain))):
        net(data[0]).backward()
        opt.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if backward_overlap == "nothing" and not attached and one.grad is not None:
            assert torch.equal(one.grad, other.grad)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_a_step_with_used_gradients_is_refused(device, make):
    model, _ = twins(device)
    optimizer = make(model)
    train_once = batches(device.torch_device, 1)[0]
    model(train_once).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "read",
    [
        lambda gradient: gradient.sum().item(),
        lambda gradient: gradient.clone(),
        lambda gradient: gradient.double(),
        lambda gradient: gradient.data_ptr(),
        lambda gradient: gradient.multiply(2),
        lambda gradient: gradient.div_(3),
        lambda gradient: gradient.mul_(torch.ones(7, 3)),
        lambda gradient: gradient.norm(float("inf")),
        lambda gradient: torch.isfinite(gradient),
        lambda gradient: torch.zeros(7, 3).copy_(gradient),
        lambda gradient: pickle.dumps(gradient),
    ],
)
def test_reading_or_writing_values_is_refused_by_name(read):
    gradient = torch.ones(7, 3)
    with pytest.raises(RuntimeError, match=r"offloaded.*backward_overlap='nothing'"):
        read(GradientStandIn(gradient, gradient.norm()))


@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
def test_a_gradient_that_is_added_to_a_used_one_may_be_dropped_but_not_used(device, make, backward_overlap):
    """Torch would step with the sum, of which one part is gone."""
    model, plain = twins(device)
    optimizer, other = make(model, backward_overlap=backward_overlap), reference(plain)
    optimizer.attach(model)
    data = batches(device.torch_device, 3)
    for net, opt in ((model, optimizer), (plain, other)):
        net(data[0]).backward()
        opt.step()
    model(data[1]).backward()
    with pytest.raises(RuntimeError, match=r"used by an earlier step\(\).*try zero_grad\(\) after each step"):
        optimizer.step()
    assert optimizer.status == "untouched"
    for net, opt in ((model, optimizer), (plain, other)):
        net.zero_grad()
        train(net, opt, data[2:])
    optimizer.synchronize()
    assert_same_weights(model, plain)


READS = {
    "p.add_(p.grad)": lambda p: p.add_(p.grad),
    "p.add_(p.grad, alpha=a)": lambda p: p.add_(p.grad, alpha=0.05),
    "p.sub_(p.grad)": lambda p: p.sub_(p.grad),
    "p.addcmul_(p, p.grad)": lambda p: p.addcmul_(p, p.grad),
    "p + p.grad": lambda p: p + p.grad,
    "p.grad + p": lambda p: (p.grad + p).norm(),
    "p.grad + p.grad": lambda p: p.grad + p.grad,
    "p.grad.add_(p.grad)": lambda p: p.grad.add_(p.grad),
    "p.grad * p": lambda p: p.grad * p,
    "p.grad - p": lambda p: p.grad - p,
    "p.grad.sub_(p)": lambda p: p.grad.sub_(p),
    "p.grad.abs()": lambda p: p.grad.abs(),
    "_foreach_add_([p], [p.grad])": lambda p: torch._foreach_add_([p], [p.grad]),
    "_foreach_add_([p.grad], [p])": lambda p: torch._foreach_add_([p.grad], [p]),
    "_foreach_add([p.grad], 1)": lambda p: torch._foreach_add([p.grad], 1),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("when", ["before step()", "after step()"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_arithmetic_with_a_gradient_is_refused_by_name_and_changes_nothing(device, make, read, when):
    model, plain = twins(device)
    optimizer, other = make(model), reference(plain)
    optimizer.attach(model)
    data = batches(device.torch_device, 3)
    for net, opt in ((model, optimizer), (plain, other)):
        train(net, opt, data[:1])
        net(data[1]).backward()
    if when == "after step()":
        optimizer.step()
        optimizer.synchronize()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"aten\.\w+.*backward_overlap='nothing'"):
        read(model.first.weight)
    if when == "before step()":
        optimizer.step()
    optimizer.zero_grad()
    other.step()
    other.zero_grad()
    model(data[2]).backward()
    assert isinstance(model.first.weight.grad, GradientStandIn)
    plain(data[2]).backward()
    optimizer.step()
    other.step()
    optimizer.synchronize()
    assert_same_weights(model, plain)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_the_refusal_advises_reads_the_values(device, make, read):
    model, plain = twins(device, torch.float32)
    optimizer, other = make(model, backward_overlap="nothing"), reference(plain)
    optimizer.attach(model)
    data = batches(device.torch_device, 1)
    results = []
    for net, opt in ((model, optimizer), (plain, other)):
        net(data[0]).backward()
        with torch.no_grad():
            results.append(read(net.first.weight))
        opt.zero_grad()
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("alpha", [1, 0.01])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_what_is_added_to_a_gradient_in_place_counts(device, make, fraction, alpha):
    """L2 by hand and noise; clipping and reading find the sum; the next gradients leave as before."""
    if device.is_accelerator:
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")
    model, plain = twins(device, torch.float32)
    both = ((model, make(model, offload_fraction=fraction)), (plain, reference(plain)))
    norms = {model: [], plain: []}
    for batch in batches(device.torch_device, 3):
        for net, opt in both:
            net(batch).backward()
            with torch.no_grad():
                for param in (net.first.weight, net.embed.weight):
                    param.grad.add_(param, alpha=alpha)
            norms[net] += [clip_grad_norm_(net.parameters(), 0.05), net.first.weight.grad.sum()]
            opt.step()
            opt.zero_grad()
    assert all(map(torch.equal, norms[model], norms[plain]))
    assert_same_weights(model, plain)


class FullDevice(TorchDispatchMode):
    """Has no memory for the `at`-th of the allocating operators."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if GradientStandIn in types:
            # Its own operators come here.
            return NotImplemented
        self.left -= allocates(func)
        if self.left == 0 and allocates(func):
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return func(*args, **(kwargs or {}))


def unscaled_behind(failures, device, make):
    """Return the weights after a step whose `unscale_` is called again when one of its operators has failed."""
    # On a GPU torch unscales no gradients in bf16.
    model, _ = twins(device, torch.float32)
    optimizer = make(model, offload_fraction=0.7, backward_overlap="gradients", max_grad_norm=0.1)
    scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**8)
    (x,) = batches(device.torch_device, 1)
    scaler.scale(model(x).float().square().mean()).backward()
    with contextlib.suppress(torch.OutOfMemoryError), FullDevice(failures):
        scaler.unscale_(optimizer)
        return None
    scaler.unscale_(optimizer)
    optimizer.step()
    optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def test_gradients_are_unscaled_once_though_unscaling_has_failed_in_its_midst(device, make):
    expected = unscaled_behind(1, device, make)
    for at in range(2, 200):
        found = unscaled_behind(at, device, make)
        if found is None:
            break
        assert all(map(torch.equal, found, expected)), at
    assert at > 5


def test_values_cannot_be_clipped_behind_its_back(device, make):
    model, _ = twins(device)
    make(model)
    model(batches(device.torch_device, 1)[0]).backward()
    with pytest.raises(RuntimeError, match="backward_overlap='nothing'"):
        clip_grad_value_(model.parameters(), 1.0)


def test_a_norm_after_the_step_is_refused_for_what_it_is(device, make):
    model, _ = twins(device)
    optimizer = make(model, split=(0, 1, 0))
    optimizer.attach(model)
    model(batches(device.torch_device, 1)[0]).backward()
    optimizer.step()
    for param in (param for param in model.parameters() if param.grad is not None):
        with pytest.raises(
            RuntimeError, match=r"that an update has begun to use.*between backward and step\(\)"
        ):
            param.grad.norm()


@pytest.mark.parametrize("overlap", ["nothing", "gradients", "update"])
def test_a_model_that_is_cast_behind_its_step_is_told_to_drop_its_gradients(device, make, overlap):
    """Advice on backward_overlap would help nobody: the step has its gradients, whatever that is."""
    model, _ = twins(device)
    optimizer = make(model, backward_overlap=overlap)
    optimizer.attach(model)
    model(batches(device.torch_device, 1)[0]).backward()
    optimizer.step()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match=r"has begun to use.*try zero_grad\(\) first, .* model\.double"):
        model.double()
    optimizer.zero_grad()
    model.double()
    assert all(param.dtype == torch.float64 for param in model.parameters())


def test_scaling_after_an_update_has_begun_is_refused(device):
    model, _ = twins(device)
    with hybrid(model, backward_overlap="update") as optimizer:
        model(batches(device.torch_device, 1)[0]).backward()
        with pytest.raises(RuntimeError, match=r"a norm .* an update has begun to use.*none with .*'update'"):
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_a_copied_model_has_its_own_parameters(device, make):
    model, _ = twins(device)
    make(model)
    model(batches(device.torch_device, 1)[0]).backward()
    for param in model.parameters():
        param.grad = None
    assert_same_weights(copy.deepcopy(model), model)


def test_the_scale_may_change_after_it_was_used():
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
    plain = copy.deepcopy(params)
    with HybridDeviceOptimizer(params, **OPTIONS) as optimizer:
        other = torch.optim.AdamW(plain, fused=True, **OPTIONS)
        for step in range(2):
            scale = torch.tensor(0.5 + step)
            for listed in (params, plain):
                (listed[0] * 3 + listed[1]).sum().backward()
                for param in listed:
                    param.grad.mul_(scale)
                    scale.add_(1)
                scale.sub_(2)
            for opt in (optimizer, other):
                opt.step()
                opt.zero_grad()
    assert all(torch.equal(one, its) for one, its in zip(params, plain, strict=True))


def test_what_logs_a_gradient_is_told_what_answers(device, make):
    model, _ = twins(device, torch.float32)
    optimizer = make(model, offload_fraction=1.0)
    model(batches(device.torch_device, 1)[0]).backward()
    gradient = next(iter(model.parameters())).grad
    assert isinstance(gradient, GradientStandIn)
    with pytest.raises(
        RuntimeError, match=r"aten\.abs.*; try param\.grad\.norm\(\) to log or check its size, or "
    ):
        gradient.abs().max()
    assert gradient.norm() > 0
    optimizer.step()
