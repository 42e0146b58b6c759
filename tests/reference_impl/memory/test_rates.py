# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from reference_impl.device import Device, PinningError
from reference_impl.device.cpu_twin import CpuTwin
from reference_impl.memory import rates
from reference_impl.memory.pinned import pinned_book

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def test_the_first_run_does_not_count():
    calls = []
    assert rates.best_seconds(lambda: calls.append(len(calls)), tries=3) >= 0
    assert calls == [0, 1, 2, 3]


def test_rates_are_finite_and_what_they_took_is_given_back(device, tmp_path):
    copies = rates.copy_rates(device, 2**20)
    found = [copies.d2h, copies.h2d, copies.duplex, rates.triad_rate(2**20), rates.pin_rate(device, 2**21)]
    found += [rates.device_copy_rate(device, 2**20), rates.host_rate(device, 2**20)]
    found.append(rates.matmul_rate(device, 64))
    found += rates.disk_rates(tmp_path, 2**20)
    assert all(0 < rate < 1e17 for rate in found)
    assert list(tmp_path.iterdir()) == []


class Stingy(CpuTwin):
    """Refuses to pin more than `limit_bytes` at once, as a driver under `ulimit -l` does."""

    limit_bytes = 200 * 2**20

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.pinned = {}

    def pin(self, memory):
        if sum(self.pinned.values()) + memory.numel() > self.limit_bytes:
            raise PinningError("injected")
        self.pinned[memory.data_ptr()] = memory.numel()

    def unpin(self, address):
        del self.pinned[address]


def test_pageable_copies_are_timed_and_the_limit_is_lifted_again():
    assert rates.staged_rate(Device.of("cpu"), 2**22) > 0
    assert pinned_book.limit_bytes is None
    assert pinned_book.pinned_bytes == 0


def test_the_limit_of_pinned_memory_is_found_and_all_is_unlocked_again():
    device = Stingy()
    found = rates.most_pinned_bytes(device, 2**28)
    assert device.limit_bytes - 2**25 <= found <= device.limit_bytes
    assert not device.pinned
    assert rates.most_pinned_bytes(device, 2**26) is None
    assert not device.pinned
