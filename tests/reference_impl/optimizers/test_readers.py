# SPDX-License-Identifier: Apache-2.0
"""Who reads weights, when, and whether they are finished by then."""

import copy
import threading

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import OPTIONS, assert_same_weights, hold_updates, hybrid, reference, train, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl import CpuUpdate


@pytest.fixture
def held(monkeypatch):
    """Hold an optimizer's updates back until released, so that every reader that does not wait reads old weights."""
    gates = []

    def hold():
        gates.append(hold_updates(monkeypatch))
        return gates[-1]

    yield hold
    for gate in gates:
        gate.set()


def soon(gate):
    threading.Timer(0.1, gate.set).start()


class Branches(nn.Module):
    """Runs its branches in the order that each call names."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(24, 24, dtype=torch.bfloat16) for _ in range(4))

    def forward(self, inputs, order):
        for index in order:
            inputs = torch.tanh(self.branches[index](inputs))
        return inputs.float().square().sum()


ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2,), (1, 1, 3), (0, 1, 2, 3), (3, 2, 1, 0)]


def test_the_order_may_change_and_modules_may_be_left_out_or_run_twice(device):
    torch.manual_seed(0)
    model = Branches().to(device.torch_device)
    plain = copy.deepcopy(model)
    inputs = torch.randn(5, 24, dtype=torch.bfloat16, device=device.torch_device)
    with hybrid(model) as optimizer:
        optimizer.attach(model)
        other = reference(plain)
        for order in ORDERS:
            for net, opt in ((model, optimizer), (plain, other)):
                net(inputs, order).backward()
                opt.step()
                opt.zero_grad()
        assert_same_weights(model, plain)


@pytest.mark.parametrize("backward_overlap", ["gradients", "update"])
@pytest.mark.parametrize("late", [(1, 3), (1,)])
@pytest.mark.parametrize("split", [(0, 0, 1), (0.3, 0.3, 0.4)])
def test_a_step_leaves_alone_what_another_step_has_in_the_same_bucket(
    device, held, split, late, backward_overlap
):
    """Updates of one step wait while modules that had no part in it run, leave their gradients and step."""
    torch.manual_seed(0)
    model = Branches().to(device.torch_device)
    plain = copy.deepcopy(model)
    inputs = torch.randn(5, 24, dtype=torch.bfloat16, device=device.torch_device)
    cpu = CpuUpdate(bucket_elements=2**20)
    with hybrid(model, split=split, cpu=cpu, backward_overlap=backward_overlap) as optimizer:
        optimizer.attach(model)
        gate = held()
        other = reference(plain)
        for net, opt in ((model, optimizer), (plain, other)):
            for order in ((0, 2), late):
                net(inputs, order).backward()
                opt.step()
                opt.zero_grad()
            gate.set()
            net(inputs, (0, 1, 2, 3)).backward()
            opt.step()
        assert_same_weights(model, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward_overlap", ["gradients", "update"])
def test_recomputation_sees_the_weights_of_its_forward(device, reentrant, backward_overlap):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(3)
            )

        def forward(self, inputs):
            for block in self.blocks:
                inputs = checkpoint(block, inputs, use_reentrant=reentrant)
            return inputs.square().sum()

    torch.manual_seed(0)
    model = Checkpointed().to(device.torch_device)
    plain = copy.deepcopy(model)
    data = [torch.randn(5, 24, device=device.torch_device, requires_grad=True) for _ in range(4)]
    with hybrid(model, backward_overlap=backward_overlap) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data)
        train(plain, reference(plain), data)
        assert_same_weights(model, plain)


def test_evaluation_between_steps_waits(device, held):
    model, plain = twins(device)
    data = batches(device.torch_device, 2)
    with hybrid(model) as optimizer:
        optimizer.attach(model)
        gate = held()
        train(model, optimizer, data[:1])
        soon(gate)
        with torch.no_grad():
            loss = model.eval()(data[1])
        train(plain, reference(plain), data[:1])
        with torch.no_grad():
            assert torch.equal(loss, plain(data[1]))


def test_an_average_of_weights_after_synchronize_is_that_of_new_weights(device, held):
    model, plain = twins(device)
    data = batches(device.torch_device, 3)
    averages = []
    for net, make in ((model, hybrid), (plain, reference)):
        optimizer = make(net)
        if net is model:
            optimizer.attach(net)
        average = [param.detach().float() for param in net.parameters()]
        for batch in data:
            train(net, optimizer, [batch])
            if net is model:
                optimizer.synchronize()
            torch._foreach_lerp_(average, [param.detach().float() for param in net.parameters()], 0.1)
        averages.append(average)
        if net is model:
            optimizer.close()
    for left, right in zip(*averages, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["", "first"])
def test_a_state_dict_waits_also_of_a_submodule(device, held, name):
    model, plain = twins(device)
    data = batches(device.torch_device, 1)
    with hybrid(model) as optimizer:
        optimizer.attach(model)
        gate = held()
        train(model, optimizer, data)
        soon(gate)
        saved = copy.deepcopy(model.get_submodule(name).state_dict())
        train(plain, reference(plain), data)
        torch.testing.assert_close(saved, plain.get_submodule(name).state_dict(), rtol=0, atol=0)


def test_loading_a_submodule_refreshes_its_masters_and_rounds_no_others(device):
    model, _ = twins(device)
    data = batches(device.torch_device, 3)
    with hybrid(model, offload_fraction=0.7) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data[:2])
        before = copy.deepcopy(optimizer.state_dict()["state"])
        model.second.load_state_dict({"weight": torch.full_like(model.second.weight, 0.5)})
        after = optimizer.state_dict()["state"]
        loaded = [param is model.second.weight for param in model.parameters()].index(True)
        assert torch.equal(after[loaded]["master_param"].cpu(), torch.full((48, 131), 0.5))
        for index in before.keys() - {loaded}:
            assert torch.equal(after[index]["master_param"], before[index]["master_param"])


def test_loading_between_backward_and_step_is_refused(device):
    model, plain = twins(device)
    with hybrid(model) as optimizer:
        optimizer.attach(model)
        model(batches(device.torch_device, 1)[0]).backward()
        others = {name: value + 1 for name, value in plain.state_dict().items()}
        with pytest.raises(RuntimeError, match="zero_grad"):
            model.load_state_dict(others)
        optimizer.zero_grad()
        model.load_state_dict(others)


def test_weight_normalisation_reads_after_our_gate(device, held):
    """Its forward pre-hook was there first and computes the weight that the module uses."""
    data = [torch.randn(4, 16, device=device.torch_device) for _ in range(2)]
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 16)))
        nets[-1].to(device.torch_device).eval()
    model, plain = nets
    with hybrid(model) as optimizer:
        optimizer.attach(model)
        gate = held()
        train_squared(model, optimizer, data[:1])
        soon(gate)
        train_squared(model, optimizer, data[1:])
        train_squared(plain, torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS), data)
        optimizer.synchronize()
        for left, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(left, right)


def train_squared(model, optimizer, data):
    for batch in data:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_two_optimizers_on_one_model(device):
    model, plain = twins(device)
    data = batches(device.torch_device, 4)

    def halves(net):
        first = [*net.embed.parameters(), *net.first.parameters()]
        return first, [p for p in net.parameters() if p.requires_grad and all(p is not q for q in first)]

    one, other = (hybrid(part, lr=lr) for part, lr in zip(halves(model), (1e-2, 3e-3), strict=True))
    theirs = reference(plain)
    by_param = dict(zip(theirs.params, theirs.masters, strict=True))
    groups = [
        {"params": [by_param[p] for p in part], "lr": lr}
        for part, lr in zip(halves(plain), (1e-2, 3e-3), strict=True)
    ]
    theirs.inner = torch.optim.AdamW(groups, fused=True, **OPTIONS)
    with one, other:
        for optimizer in (one, other):
            optimizer.attach(model)
        for batch in data:
            model(batch).backward()
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        train(plain, theirs, data)
        assert_same_weights(model, plain)


def test_attaching_again_replaces_the_first_attachment(device):
    model, plain = twins(device)
    data = batches(device.torch_device, 2)
    with hybrid(model) as optimizer:
        for _ in range(2):
            optimizer.attach(model)
        assert len(model.first._forward_pre_hooks) == 1
        train(model, optimizer, data)
    train(plain, reference(plain), data)
    assert_same_weights(model, plain)
    assert not model.first._forward_pre_hooks
    assert not model._forward_pre_hooks
