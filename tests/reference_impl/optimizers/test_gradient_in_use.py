# SPDX-License-Identifier: Apache-2.0
"""A gradient after an attached step of `OptimizerStateOffloader`: it is read as ever, and written behind its update."""

import copy
import pickle

import pytest
import torch
from optimizer_reference import MasterAdamW, batches
from optimizer_training import OPTIONS, assert_same_weights, train, twins

from reference_impl.optimizers.gradients.in_use import GradientInUse

WRITES = {
    "zero_": lambda g: g.zero_(),
    "detach().zero_()": lambda g: g.detach().zero_(),
    "data.zero_()": lambda g: g.data.zero_(),
    "a view": lambda g: g.view(-1)[:3].fill_(7.0),
    "mul_": lambda g: g.mul_(2),
    "+=": lambda g: g.__iadd__(1),
    "copy_": lambda g: g.copy_(torch.ones_like(g)),
    "[...] =": lambda g: g.__setitem__(..., 3.0),
    "_foreach_zero_": lambda g: torch._foreach_zero_([g]),
    "out=": lambda g: torch.add(torch.ones_like(g), 1, out=g),
}
READS = {
    "norm": lambda g: g.norm().item(),
    "sum": lambda g: (g + 1).sum().item(),
    "tolist": lambda g: g.tolist(),
    "numpy": lambda g: g.float().cpu().numpy().tolist(),
    "unbind": lambda g: [each.sum().item() for each in g.unbind()],
    "deepcopy": lambda g: copy.deepcopy(g).tolist(),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)).tolist(),
    "clone": lambda g: g.clone().tolist(),
}


def stepped(device, offload):
    """Return twins with gradients that a step has used, ours while its update may still read them."""
    model, plain = twins(device)
    both = ((model, offload(model)), (plain, MasterAdamW(plain, on_cpu=False, **OPTIONS)))
    both[0][1].attach(model)
    for net, opt in both:
        net(batches(device.torch_device, 1)[0]).backward()
        opt.step()
    assert isinstance(model.first.weight.grad, GradientInUse)
    return both


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_waits_for_the_update(device, offload, write):
    both = stepped(device, offload)
    for net, _ in both:
        write(net.first.weight.grad)
    ours, theirs = (net.first.weight.grad for net, _ in both)
    assert type(ours) is torch.Tensor
    assert torch.equal(ours, theirs)
    for net, opt in both:
        train(net, opt, batches(device.torch_device, 2))
    both[0][1].synchronize()
    assert_same_weights(both[0][0], both[1][0])


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_finds_the_values_and_waits_for_nothing(device, offload, read):
    (model, optimizer), (plain, _) = stepped(device, offload)
    assert read(model.first.weight.grad) == read(plain.first.weight.grad)
    assert optimizer.members[model.first.weight].pending


def test_the_gradient_itself_is_back_once_the_forward_has_waited(device, offload):
    model, _ = twins(device)
    optimizer = offload(model)
    optimizer.attach(model)
    first, second = batches(device.torch_device, 2)
    model(first).backward()
    before = model.first.weight.grad
    optimizer.step()
    assert model.first.weight.grad is not before
    model(second)
    assert model.first.weight.grad is before


def test_a_gradient_that_stays_is_used_again_where_a_step_leaves_its_module_out(device, offload):
    """As in torch, without zero_grad()."""
    both = stepped(device, offload)
    for net, opt in both:
        net.zero_grad()
        train(net, opt, batches(device.torch_device, 1))
        net(batches(device.torch_device, 1)[0]).backward()
        for _ in range(3):
            opt.step()
    both[0][1].synchronize()
    assert_same_weights(both[0][0], both[1][0])
