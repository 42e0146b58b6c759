# SPDX-License-Identifier: Apache-2.0
"""Tensors come back early: in backward's learnt order, and never above the step's own peak."""

import pytest
import torch

from reference_impl.activations import ActivationOffloader
from reference_impl.activations.run import BackwardOrders, SavedStorage
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
