# SPDX-License-Identifier: Apache-2.0
"""Tensors come back early: in backward's learnt order, and never above the step's own peak."""

import pytest
import torch
from torch import nn

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.activations.headroom import Headroom, _falls
from reference_impl.activations.run import BackwardOrders, ForwardPass, SavedStorage
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger

SMALL = {"min_bytes": 1024}


class Loads:
    """Watches the order in which storages come back, and how much lies there ahead of its use."""

    def __init__(self, monkeypatch):
        self.order, self.most_ahead_bytes = [], 0
        real = SavedStorage.load

        def load(saved):
            real(saved)
            self.order.append(saved.index)
            self.most_ahead_bytes = max(self.most_ahead_bytes, saved.run.ahead_bytes - saved.size_bytes)

        monkeypatch.setattr(SavedStorage, "load", load)


def test_the_first_backward_goes_in_reverse_and_the_second_as_the_first_has_shown(
    trainee, device, monkeypatch
):
    loads = Loads(monkeypatch)
    with (
        # A tensor still waiting for its copy out when backward asks for it does not come back: it is still there.
        ActivationOffloader(trainee.model, in_flight_bytes=0, **SMALL),
        Ledger(device, track=trainee.model.parameters()),
    ):
        orders = []
        for _ in range(3):
            loads.order.clear()
            trainee.step()
            orders.append(list(loads.order))
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(set(orders[1])) == len(orders[1])
    # From the second step on nothing is fetched out of turn.
    assert orders[1] == orders[2]


def test_a_storage_comes_back_once(trainee, monkeypatch):
    loads = Loads(monkeypatch)
    with ActivationOffloader(trainee.model, **SMALL) as offloader:
        trainee.step()
        assert len(loads.order) == len(set(loads.order))
        moved = offloader.offloaded_bytes
        trainee.step()
        assert offloader.offloaded_bytes == 2 * moved


def peaks_and_ahead(trainee, device, monkeypatch, **options):
    trainee.ids = torch.randint(512, (2, 1024), device=device.torch_device)
    peaks, ahead = [], []
    with (
        ActivationOffloader(trainee.model, num_layers=2, in_flight_bytes=0, **SMALL, **options),
        Ledger(device, track=trainee.model.parameters()) as ledger,
    ):
        for _ in range(3):
            loads = Loads(monkeypatch)
            trainee.model.zero_grad()
            ledger.reset_peak()
            trainee.loss().backward()
            peaks.append(ledger.peak_device_bytes)
            ahead.append(loads.most_ahead_bytes)
    return peaks, ahead


def test_after_the_first_step_more_comes_early_without_a_higher_peak(trainee, device, monkeypatch):
    peaks, ahead = peaks_and_ahead(trainee, device, monkeypatch)
    assert ahead[-1] > 2 * ahead[0]
    assert peaks[-1] <= peaks[0] * 1.01


def test_without_double_buffering_no_more_comes_early_than_in_the_first_step(trainee, device, monkeypatch):
    _, ahead = peaks_and_ahead(trainee, device, monkeypatch, double_buffering=False)
    assert ahead[-1] <= ahead[0]


@pytest.mark.parametrize("length", [1, 3, 100])
def test_an_unknown_length_is_answered_in_reverse(length):
    assert list(BackwardOrders().of(length)) == list(reversed(range(length)))


def test_orders_are_kept_by_length_and_the_oldest_goes():
    orders = BackwardOrders()
    for length in range(1, 100):
        orders.learn(length, list(range(length)))
    assert list(orders.of(99)) == list(range(99))
    assert list(orders.of(1)) == [0]
    assert list(orders.of(5)) == [4, 3, 2, 1, 0]


class Late(nn.Module):
    """A layer whose backward has its peak first, in its wide part, and then goes on in a narrow one."""

    def __init__(self):
        super().__init__()
        self.kept = nn.Linear(64, 256)
        self.wide = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))

    def forward(self, x):
        x = x + self.kept(x).unflatten(1, (64, 4)).sum(2).sin()
        return x + self.wide(x)


def test_a_layers_tensors_come_while_the_layer_above_is_past_its_peak(device, monkeypatch):
    torch.manual_seed(0)
    # Frozen, so that each layer's backward takes the same memory.
    model = nn.Sequential(*(Late() for _ in range(5))).requires_grad_(False).to(device.torch_device)
    x = torch.randn(512, 64, device=device.torch_device)
    asked, late, peaks = [], [], []
    real, load = SavedStorage.fetch, SavedStorage.load
    monkeypatch.setattr(
        SavedStorage, "fetch", lambda saved, token: (asked.append(saved), real(saved, token))[1]
    )
    monkeypatch.setattr(
        SavedStorage, "load", lambda saved: (late.append(asked[-1:] == [saved]), load(saved))[1]
    )
    with (
        CheckpointOffloader(model, layers=list(model), keep=["kept"], **SMALL),
        Ledger(device, track=model.parameters()) as ledger,
    ):
        for _ in range(3):
            late.clear()
            ledger.reset_peak()
            model(x.detach().requires_grad_()).sum().backward()
            peaks.append(ledger.peak_device_bytes)
    # Two storages a layer: the input, and the result that is kept. The last layer's first one is asked for at once.
    assert len(late) == 10
    assert sum(late) == 1
    assert peaks[-1] <= peaks[0]


def test_a_layer_that_goes_on_more_often_than_in_the_first_step_is_before_its_next_request():
    headroom = Headroom(Device.of("cpu"))
    headroom._asked_in, headroom._free["backward"] = [1, 3, 4], [7, 6, 5, 9, 4]
    run = [
        (asked, passed, last)
        for asked, passed, last in [(0, 0, 0), (0, 9, 0), (1, 0, 1), (1, 1, 1), (1, 9, 2)]
    ]
    assert [headroom.free_bytes(*each) for each in run] == [6, 6, 5, 9, 4]
    assert headroom.free_bytes(2, 0, 3) is None


@pytest.mark.parametrize(("passed", "are_alike"), [([0, 1, 0], True), ([0, 0, 0], False), ([0, 2, 0], False)])
def test_nothing_comes_within_a_layer_once_layers_go_on_in_other_numbers(device, passed, are_alike):
    headroom, run = Headroom(device), ForwardPass(device, BackwardOrders(), None, None)
    headroom._asked_in, headroom._free["backward"] = [0, 2, 3], [0, 0, 9, 0, 9]
    headroom._rises = frozenset({2, 4})
    assert headroom.goes_on(run, 1, 1)
    for asked, each in enumerate(passed):
        headroom.on_request(run, asked, each)
    assert headroom.goes_on(run, 1, 1) is are_alike


def test_memory_is_found_free_where_the_need_has_fallen_by_a_part_of_its_range():
    assert _falls([]) == frozenset()
    assert _falls([160, 159, 150, 149, 0, 100, 0]) == {3, 4, 6}
