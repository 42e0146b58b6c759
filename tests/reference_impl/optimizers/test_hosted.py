# SPDX-License-Identifier: Apache-2.0
"""Forward waits: every reader of a weight waits until it is new, and nothing is kept alive."""

import gc
import signal
import threading
import weakref

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import hybrid, train, twins
from torch import nn

from reference_impl.device import Device
from reference_impl.optimizers.forward_waits import ForwardWaits
from reference_impl.optimizers.layout import Member


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

    def check_load(self, inside, remade):
        pass


@pytest.fixture
def waited_for():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    model.forward = lambda names: [model[name](torch.zeros(1, 2)) for name in names]
    members = {layer.weight: Member(layer.weight, 0, order, 0) for order, layer in enumerate(model.values())}
    waiter = Waiter()
    waits = ForwardWaits(
        model,
        members,
        device=Device.of("cpu"),
        wait_for=waiter.wait_for,
        refresh_masters=waiter.refresh,
        check_load=waiter.check_load,
    )
    return model, list(members.values()), waiter, waits


def test_a_module_waits_for_its_own_pending_weights_once(waited_for):
    model, (a, b, c), waiter, _ = waited_for
    a.pending = c.pending = True
    model("abca")
    assert waiter.waited == [[a], [c]]
    assert b.order > a.order


def test_the_order_of_the_last_forward_is_learnt(waited_for):
    model, members, _, _ = waited_for
    for names in ("abc", "cab", "bcabb"):
        model(names)
        learnt = [
            name for name, _ in sorted(zip("abc", members, strict=True), key=lambda pair: pair[1].order)
        ]
        assert learnt == list(dict.fromkeys(names))


def test_a_module_that_is_left_out_keeps_an_older_place(waited_for):
    model, (a, b, c), _, _ = waited_for
    model("abc")
    model("cb")
    assert a.order < c.order < b.order


def test_state_dicts_wait_and_loading_refreshes_module_by_module(waited_for):
    model, (a, b, c), waiter, _ = waited_for
    saved = model.state_dict()
    assert waiter.waited == [[a], [b], [c]]
    waiter.waited.clear()
    model.b.load_state_dict({"weight": saved["b.weight"]})
    assert (waiter.waited, waiter.refreshed) == ([[b]], [[b]])


def test_closing_takes_every_hook_off(waited_for):
    model, _, waiter, waits = waited_for
    waits.close()
    model("abc")
    model.load_state_dict(model.state_dict())
    assert waiter.waited == waiter.refreshed == []
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks
        assert not module._load_state_dict_post_hooks


def test_forward_waits_keep_neither_the_optimizer_nor_the_model_alive(device):
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
    optimizer.close()
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def hooks_on(model):
    kinds = ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return sum(
        len(getattr(module, kind))
        for module in model.modules()
        for kind in (*kinds, "_load_state_dict_post_hooks")
    )


def register_with(monkeypatch, happens, *, at):
    """Let `happens()` come before the hook that is the `at`th to be registered; return all that have been."""
    registered = []

    def wrap(real):
        def register(*arguments, **named):
            if len(registered) == at:
                happens()
            registered.append(real(*arguments, **named))
            return registered[-1]

        return register

    for name in (
        "register_forward_pre_hook",
        "register_state_dict_pre_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ):
        monkeypatch.setattr(nn.Module, name, wrap(getattr(nn.Module, name)))
    return registered


def fail():
    raise MemoryError("no memory for a hook")


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("happens", "error"), [(fail, MemoryError), (interrupt, KeyboardInterrupt)])
def test_no_hook_stays_of_an_attach_that_does_not_come_to_its_end(device, monkeypatch, happens, error):
    model, _ = twins(device)
    own = hooks_on(model)
    with hybrid(model) as optimizer, monkeypatch.context() as patched:
        registered = register_with(patched, happens, at=-1)
        optimizer.attach(model)
    for at in range(len(registered)):
        with hybrid(model) as optimizer, monkeypatch.context() as patched:
            register_with(patched, happens, at=at)
            with pytest.raises(error):
                optimizer.attach(model)
        assert hooks_on(model) == own, f"hook {at}"
    model.load_state_dict(model.state_dict())


def test_a_forward_of_another_thread_teaches_nothing(waited_for):
    model, members, waiter, waits = waited_for
    model("abc")
    waits.on_step(members)
    order = [member.order for member in members]
    members[2].pending = True
    reader = threading.Thread(target=model, args=("cba",))
    reader.start()
    reader.join()
    assert [member.order for member in members] == order
    assert not waits.has_run_since_step
    assert waiter.waited == [[members[2]]]
    model("ab")
    assert waits.has_run_since_step
