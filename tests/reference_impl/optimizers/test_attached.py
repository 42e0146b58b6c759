# SPDX-License-Identifier: Apache-2.0
"""An attached optimizer between steps: waits for weights, a death's remains, and the end."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from optimizer_reference import MasterAdamW, batches
from optimizer_training import (
    OPTIONS,
    assert_same_weights,
    hold_updates,
    hybrid,
    train,
    twins,
)

from reference_impl import CpuUpdate, HybridDeviceOptimizer
from reference_impl.optimizers.writes.awaited import new_weights_are_made


def test_attached_step_returns_while_weights_are_on_their_way(device, make, monkeypatch):
    model, plain = twins(device)
    optimizer = make(model)
    optimizer.attach(model)
    gate = hold_updates(monkeypatch)
    data = batches(device.torch_device, 2)
    model(data[0]).backward()
    optimizer.step()
    assert any(member.pending for member in optimizer.members.values())
    threading.Timer(0.2, gate.set).start()
    optimizer.zero_grad()
    model(data[1]).backward()
    optimizer.step()
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), data)
    assert_same_weights(model, plain)


def test_use_outside_the_owning_forward_waits(device, make, monkeypatch):
    model, plain = twins(device)
    optimizer = make(model)
    optimizer.attach(model)
    gate = hold_updates(monkeypatch)
    ids = batches(device.torch_device, 1)[0]
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    threading.Timer(0.2, gate.set).start()
    weight = model.first.weight
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.shape == plain.first.weight.shape
    assert optimizer.members[weight].pending
    ones = torch.ones(1, 48, dtype=torch.bfloat16).to(ids.device)
    found = torch.nn.functional.linear(ones, weight)
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), [ids])
    assert torch.equal(found, torch.nn.functional.linear(ones, plain.first.weight))
    assert type(weight) is torch.nn.Parameter


def test_a_thread_that_has_made_new_weights_waits_for_those_of_others(device, make, monkeypatch):
    model, plain = twins(device)
    optimizer = make(model)
    optimizer.attach(model)
    gate = hold_updates(monkeypatch)
    ids = batches(device.torch_device, 1)[0]
    model(ids).backward()
    optimizer.step()
    with new_weights_are_made():
        assert torch.equal(model.first.weight, plain.first.weight)
    threading.Timer(0.2, gate.set).start()
    found = model.first.weight.detach().clone()
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), [ids])
    assert torch.equal(found, plain.first.weight)


def test_copies_of_weights_on_their_way_are_new_and_ordinary(device, make, monkeypatch):
    model, plain = twins(device)
    optimizer = make(model)
    optimizer.attach(model)
    gate = hold_updates(monkeypatch)
    ids = batches(device.torch_device, 1)[0]
    model(ids).backward()
    optimizer.step()
    threading.Timer(0.2, gate.set).start()
    model.zero_grad()
    copied = copy.deepcopy(model)
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), [ids])
    assert_same_weights(copied, plain)
    assert {type(param) for each in (copied, model) for param in each.parameters()} == {torch.nn.Parameter}


def test_state_dict_and_evaluation_see_finished_weights(device, make):
    model, plain = twins(device)
    optimizer = make(model)
    optimizer.attach(model)
    data = batches(device.torch_device, 2)
    train(model, optimizer, data)
    saved = copy.deepcopy(model.state_dict())
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), data)
    for name, value in plain.state_dict().items():
        assert torch.equal(saved[name], value), name
    with torch.no_grad():
        assert torch.equal(model(data[0]), plain(data[0]))


def test_a_loaded_model_refreshes_masters(device, make):
    model, plain = twins(device)
    optimizer = make(model, offload_fraction=0.5)
    optimizer.attach(model)
    data = batches(device.torch_device, 2)
    train(model, optimizer, data[:1])
    model.load_state_dict(plain.state_dict())
    state = optimizer.state_dict()["state"]
    for index, param in enumerate(p for p in model.parameters()):
        if index in state:
            assert torch.equal(state[index]["master_param"].to(param), param)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_callers_threads_are_left_alone(device, make, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        make(twins(device)[0])
        assert torch.get_num_threads() == threads
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [threads]
    finally:
        torch.set_num_threads(before)


def test_close_is_final_and_repeatable(device, make):
    model, _ = twins(device)
    optimizer = make(model)
    with optimizer:
        pass
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()
    model(batches(device.torch_device, 1)[0]).backward()
    assert model.first.weight.grad is not None


def test_a_forgotten_optimizer_is_collected(device):
    model, _ = twins(device)
    optimizer = HybridDeviceOptimizer(model.parameters(), cpu=CpuUpdate(bucket_elements=1024))
    train(model, optimizer, batches(device.torch_device, 1))
    watcher = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert watcher() is None


@pytest.mark.parametrize("split", [(0, 0, 1), (0.3, 0.3, 0.4)])
def test_a_closed_optimizer_lets_its_parameters_go(device, split):
    """Without the garbage collector, which knows nothing of device memory and may be long in coming."""
    # torch imports its compiler for the first optimizer of a process, in frames that only the collector frees.
    torch.optim.SGD([torch.zeros(1)])
    gc.collect()
    gc.disable()
    try:
        model, _ = twins(device)
        with hybrid(model, split=split) as optimizer:
            optimizer.attach(model)
            train(model, optimizer, batches(device.torch_device, 1))
        watcher = weakref.ref(model.first.weight)
        del model, optimizer
        assert watcher() is None
    finally:
        gc.enable()


def test_bulk_copies_give_way_while_the_cpu_updates_anything(device):
    model, _ = twins(device)
    before = len(device.latency_sensitive)
    with hybrid(model, offload_fraction=0.0):
        assert len(device.latency_sensitive) == before
    with hybrid(model, split=(0, 1, 0)):
        assert len(device.latency_sensitive) == before
    with hybrid(model, offload_fraction=0.5):
        assert len(device.latency_sensitive) == before + 1
    assert len(device.latency_sensitive) == before


class FusedHead(torch.nn.Module):
    """Reads its head's weight without a forward of the head, as fused losses do."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(8, 48, dtype=torch.bfloat16)

    def forward(self, ids):
        return (
            self.body(ids)
            + torch.nn.functional.linear(ids[:1, :1].bfloat16().expand(1, 8), self.head.weight).sum()
        )


def test_a_weight_that_is_read_without_its_module_is_waited_for(device, make, monkeypatch):
    model, plain = (FusedHead(each).to(device.torch_device) for each in twins(device))
    plain.load_state_dict(model.state_dict())
    optimizer = make(model)
    optimizer.attach(model)
    gate = hold_updates(monkeypatch)
    threading.Timer(0.2, gate.set).start()
    data = batches(device.torch_device, 4)
    train(model, optimizer, data)
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), data)
    assert_same_weights(model, plain)


def test_a_detached_step_returns_finished(device, make):
    model, plain = twins(device)
    optimizer = make(model)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    data = batches(device.torch_device, 4)
    for is_attached in (True, False):
        if is_attached:
            optimizer.attach(model)
        else:
            optimizer.detach()
            optimizer.detach()
        for batch in data[:2] if is_attached else data[2:]:
            model(batch).backward()
            optimizer.step()
            assert is_attached or not any(member.pending for member in optimizer.members.values())
            optimizer.zero_grad()
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), data)
    assert_same_weights(model, plain)
    optimizer.attach(model)
    optimizer.close()
    optimizer.detach()
