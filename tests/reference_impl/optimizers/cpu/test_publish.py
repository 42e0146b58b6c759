"""Weights on their way home: gates in front of readers, and flags that say when to go on."""

import gc
import threading
import weakref

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import hybrid, train, twins
from torch import nn

from reference_impl.device import Device
from reference_impl.optimizers.cpu.publish import Arrivals, Gates, Publisher
from reference_impl.optimizers.layout import Member, Piece


class Waiter:
    """Stands in for an optimizer: notes who is waited for."""

    def __init__(self):
        self.waited, self.refreshed = [], []

    def wait_for(self, members):
        self.waited.append(list(members))
        for member in members:
            member.pending = False

    def refresh(self, members):
        self.refreshed.append(list(members))


@pytest.fixture
def gated():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    model.forward = lambda names: [model[name](torch.zeros(1, 2)) for name in names]
    members = {layer.weight: Member(layer.weight, 0, order, 0) for order, layer in enumerate(model.values())}
    waiter = Waiter()
    gates = Gates(model, members, wait_for=waiter.wait_for, refresh_masters=waiter.refresh)
    return model, list(members.values()), waiter, gates


def test_a_module_waits_for_its_own_pending_weights_once(gated):
    model, (a, b, c), waiter, _ = gated
    a.pending = c.pending = True
    model("abca")
    assert waiter.waited == [[a], [c]]
    assert b.order > a.order


def test_the_order_of_the_last_forward_is_learnt(gated):
    model, members, _, _ = gated
    for names in ("abc", "cab", "bcabb"):
        model(names)
        learnt = [
            name for name, _ in sorted(zip("abc", members, strict=True), key=lambda pair: pair[1].order)
        ]
        assert learnt == list(dict.fromkeys(names))


def test_a_module_that_is_left_out_keeps_an_older_place(gated):
    model, (a, b, c), _, _ = gated
    model("abc")
    model("cb")
    assert a.order < c.order < b.order


def test_state_dicts_wait_and_loading_refreshes_module_by_module(gated):
    model, (a, b, c), waiter, _ = gated
    saved = model.state_dict()
    assert waiter.waited == [[a], [b], [c]]
    waiter.waited.clear()
    model.b.load_state_dict({"weight": saved["b.weight"]})
    assert (waiter.waited, waiter.refreshed) == ([[b]], [[b]])


def test_closing_takes_every_hook_off(gated):
    model, _, waiter, gates = gated
    gates.close()
    model("abc")
    model.load_state_dict(model.state_dict())
    assert waiter.waited == waiter.refreshed == []
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks
        assert not module._load_state_dict_post_hooks


def test_gates_keep_neither_the_optimizer_nor_the_model_alive(device):
    model, _ = twins(device)
    optimizer = hybrid(model)
    optimizer.attach(model)
    train(model, optimizer, batches(device.torch_device, 1))
    optimizer.synchronize()
    watched = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert watched() is None
    model(batches(device.torch_device, 1)[0])
    optimizer = hybrid(model)
    optimizer.attach(model)
    gates = optimizer._gates
    optimizer.close()
    watched = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert watched() is None
    assert gates.model is None


def test_all_pieces_of_a_weight_come_home_together(device):
    weight = torch.zeros(300, dtype=torch.bfloat16, device=device.torch_device)
    member = Member(weight, 0, 0, 0)
    pieces = [Piece(member, 0, 128, 64), Piece(member, 128, 300, 0)]
    publisher = Publisher(Device.of(device.torch_device))
    new = torch.arange(300).bfloat16()
    wires = [torch.zeros(256, dtype=torch.bfloat16), torch.zeros(172, dtype=torch.bfloat16)]
    for piece, wire in zip(pieces, wires, strict=True):
        wire[piece.offset : piece.offset + piece.numel] = new[piece.start : piece.stop]

    class Holder:
        def __init__(self, piece, wire):
            self.pieces, self.wire = [piece], wire

    publisher.add([Holder(piece, wire) for piece, wire in zip(pieces, wires, strict=True)])
    member.pieces = pieces
    publisher.publish(member, (), after=device.record())
    member.published.synchronize()
    assert torch.equal(weight.cpu(), new)


def test_a_flag_is_raised_anew_for_every_step():
    arrivals, member = Arrivals(), Member(torch.zeros(3), 0, 0, 0)
    for _ in range(2):
        arrivals.expect(member)
        assert member.pending
        flag = arrivals.flag(member)
        assert not flag.is_set()
        threading.Thread(target=arrivals.arrived, args=(member,)).start()
        assert flag.wait(10)
