# SPDX-License-Identifier: Apache-2.0
import threading

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.memory.ledger import Ledger, resize_storage, unseen

MIB = 2**20


def test_peak_and_live_bytes_follow_tensors(device):
    with Ledger(device) as ledger:
        before = ledger.device_bytes
        one = torch.empty(MIB, dtype=torch.uint8, device=device.torch_device)
        two = one + 1
        view = two[10:]
        del two
        assert ledger.device_bytes - before == 2 * MIB
        del view
        assert ledger.device_bytes - before == MIB
        assert ledger.peak_device_bytes - before == 2 * MIB
        ledger.reset_peak()
        assert ledger.peak_device_bytes - before == MIB
        del one
    assert ledger.device_bytes == before


def test_backward_is_seen(device):
    layer = nn.Linear(256, 256, bias=False, device=device.torch_device)
    weight_bytes = layer.weight.nbytes
    # The first product on CUDA brings a workspace that stays.
    layer(torch.randn(8, 256, device=device.torch_device)).sum().backward()
    layer.zero_grad()
    with Ledger(device, track=layer.parameters()) as ledger:
        before = ledger.device_bytes
        layer(torch.randn(8, 256, device=device.torch_device)).sum().backward()
        assert weight_bytes <= ledger.device_bytes - before < weight_bytes * 1.3


def test_tracked_tensors_count_from_the_start(device):
    layer = nn.Linear(256, 256, device=device.torch_device)
    with Ledger(device, track=layer.parameters()) as ledger:
        assert ledger.device_bytes >= layer.weight.nbytes + layer.bias.nbytes


def test_resized_storage_leaves_the_book(device):
    with Ledger(device) as ledger:
        tensor = torch.empty(MIB, dtype=torch.uint8, device=device.torch_device)
        full = ledger.device_bytes
        resize_storage(tensor.untyped_storage(), 0)
        assert full - ledger.device_bytes == MIB
        resize_storage(tensor.untyped_storage(), MIB)
        assert ledger.device_bytes == full


def test_memory_that_others_free_under_their_tensors_leaves_the_book(device):
    with Ledger(device) as ledger:
        tensor = torch.empty(MIB, dtype=torch.uint8, device=device.torch_device)
        full = ledger.device_bytes
        tensor.untyped_storage().resize_(0)
        assert full - ledger.device_bytes == MIB
        tensor.untyped_storage().resize_(MIB)
        assert ledger.device_bytes == full
    assert torch.UntypedStorage.resize_ is not resize_storage


@pytest.mark.usefixtures("group")
def test_what_is_inside_a_sharded_tensor_counts():
    sharded = distribute_tensor(
        torch.empty(MIB, dtype=torch.uint8), init_device_mesh("cpu", (1,)), [Shard(0)]
    )
    with Ledger(Device.of("cpu")) as ledger:
        other = torch.zeros_like(sharded)
        assert ledger.device_bytes == MIB
        del other
        assert ledger.device_bytes == 0


def test_what_only_the_twin_takes_is_left_out():
    with Ledger(Device.of("cpu")) as ledger:
        with unseen():
            left_out = torch.empty(MIB, dtype=torch.uint8)
        assert ledger.device_bytes == 0
        seen = torch.empty(MIB, dtype=torch.uint8)
        assert ledger.device_bytes == seen.nbytes == left_out.nbytes


def test_what_one_thread_leaves_out_counts_where_another_makes_it():
    """An optimizer's workers add up weights beside the backward that is measured."""
    begun, may_end = threading.Event(), threading.Event()

    def leave_out():
        with unseen():
            begun.set()
            may_end.wait()

    worker = threading.Thread(target=leave_out)
    with Ledger(Device.of("cpu")) as ledger:
        worker.start()
        begun.wait()
        with unseen():
            with unseen():
                pass
            left_out = torch.empty(MIB, dtype=torch.uint8)
        seen = torch.empty(2 * MIB, dtype=torch.uint8)
        may_end.set()
        worker.join()
        assert ledger.device_bytes == seen.nbytes == 2 * left_out.nbytes


def test_host_tier_is_apart_from_the_device_tier(device):
    arena = HostArena(device)
    with Ledger(device) as ledger:
        device_before, host_before = ledger.device_bytes, ledger.host_bytes
        block = arena.allocate(MIB)
        block.view(torch.uint8, (MIB,)).fill_(1)
        assert ledger.device_bytes == device_before
        assert ledger.host_bytes - host_before == MIB
        arena.free(block)
        assert ledger.host_bytes == host_before
        assert ledger.peak_host_bytes - host_before == MIB
    arena.close()
