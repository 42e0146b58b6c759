# SPDX-License-Identifier: Apache-2.0
"""Numbers of the device come to the host, and the block that they come to goes back, whatever fails."""

import weakref

import pytest
import torch

from reference_impl.memory.arena import HostArena, HostBlock
from reference_impl.memory.readback import Readback


@pytest.fixture
def arena(device):
    arena = HostArena(device)
    yield arena
    arena.close()


def test_numbers_are_read_and_their_block_goes_back(device, arena):
    values = torch.arange(5.0, device=device.torch_device)
    found = Readback(device, arena, values)
    assert arena.live_bytes > 0
    assert found.read() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert arena.live_bytes == 0


def test_numbers_that_nobody_reads_keep_no_block(device, arena):
    Readback(device, arena, torch.zeros(5, device=device.torch_device))
    device.synchronize()
    assert arena.live_bytes == 0


@pytest.mark.parametrize("call", ["view", "copy_out", "finalize"])
def test_a_call_that_fails_leaves_no_block_behind(device, arena, monkeypatch, call):
    owner = {"view": HostBlock, "copy_out": type(device), "finalize": weakref}[call]

    def fails(*_, **__):
        raise MemoryError("no memory is left")

    values = torch.zeros(5, device=device.torch_device)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, fails)
        with pytest.raises(MemoryError):
            Readback(device, arena, values)
    device.synchronize()
    assert arena.live_bytes == 0
