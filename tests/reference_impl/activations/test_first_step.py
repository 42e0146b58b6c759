# SPDX-License-Identifier: Apache-2.0
"""The first step is no measure of the others where an optimizer makes its states in it."""

import pytest
import torch

from reference_impl.activations import ActivationOffloader
from reference_impl.memory.ledger import Ledger


def peaks(trainee, device, steps=5):
    """The peak of every step of a training with states that the first step makes."""
    optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=1e-3)
    found = []
    with Ledger(device, track=trainee.model.parameters()) as ledger:
        for _ in range(steps):
            ledger.reset_peak()
            trainee.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(ledger.peak_device_bytes)
    return found


@pytest.fixture
def long(trainee, device):
    # Large against the rounding of single tensors, up to 512 bytes.
    trainee.ids = torch.randint(512, (2, 2048 if device.is_accelerator else 512), device=device.torch_device)
    return trainee


def test_a_budget_counts_the_states(long, device):
    budget_bytes = max(peaks(long, device)) * 3 // 4
    with ActivationOffloader(long.model, budget_bytes=budget_bytes, min_bytes=1024):
        assert max(peaks(long, device)[1:]) <= budget_bytes


def test_room_is_not_what_the_states_left(long, device):
    everything = peaks(long, device)[-1]
    with ActivationOffloader(long.model, num_layers=3, min_bytes=1024, in_flight_bytes=0) as offloader:
        found = peaks(long, device)
        moved_bytes = offloader.offloaded_bytes / len(found)
    assert everything - max(found[1:]) == pytest.approx(moved_bytes, rel=0.05)
