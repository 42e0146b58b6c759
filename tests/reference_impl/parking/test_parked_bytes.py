# SPDX-License-Identifier: Apache-2.0
"""Parking's bytes on host and device: nothing is copied twice, taken twice or waited for in vain."""

import copy
import threading
import time

import pytest
import torch
from small_net import loss_of, net
from torch import nn

from reference_impl import park
from reference_impl.device import Device
from reference_impl.device.cpu_twin import CpuTwin
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger, resize_storage
from reference_impl.parking import transfer
from reference_impl.parking.storage import Fingerprints

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


@pytest.fixture
def model(device):
    return net(device)


@torch.no_grad()
def fused_write(weight):
    weight.requires_grad_(True)
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    weight.grad = None
    weight.requires_grad_(False)


@torch.no_grad()
def storage_write(weight):
    weight.untyped_storage().copy_((weight + 1).untyped_storage())


WRITES = {
    "a fused kernel": fused_write,
    "in place": lambda weight: weight.detach().add_(1),
    "data": lambda weight: weight.data.mul_(2),
    "the storage": storage_write,
    "another storage": lambda weight: setattr(weight, "data", weight.data + 1),
    "one bit": lambda weight: weight.data.view(torch.int32)[5, 5].bitwise_xor_(1),
    "two rows exchanged": lambda weight: weight.data.copy_(weight.data[torch.arange(64).flip(0)]),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_frozen_weight_is_copied_again_only_where_it_was_written(device, write):
    model = net(device).requires_grad_(False)
    parked = park(model)
    with parked:
        pass
    with parked:
        assert parked.report.copied_bytes == 0
    weight = model[1][0].weight
    WRITES[write](weight)
    written = weight.clone()
    with parked:
        assert parked.report.copied_bytes == weight.nbytes
    assert torch.equal(weight, written)
    parked.close()


def test_a_fingerprint_changes_with_every_byte(device):
    flat = torch.randint(256, (8 * (2**20 + 5) + 3,), dtype=torch.uint8, device=device.torch_device)
    fingerprint = Fingerprints(device).of
    seen = {fingerprint(flat)}
    for place in (0, 1, 8 * 2**20 - 1, 8 * 2**20, flat.numel() - 4, flat.numel() - 1):
        flat[place] ^= 1
        seen.add(fingerprint(flat))
    assert len(seen) == 7
    first, second = flat[: 8 * 2**20].clone(), flat[:8].clone()
    assert fingerprint(torch.cat([first, first.roll(8)])) != fingerprint(torch.cat([first.roll(8), first]))
    assert fingerprint(second) != fingerprint(second.flip(0))


def test_host_memory_is_taken_once(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parked = park(model, optimizer)
    reserved, before_bytes = [], host_book.reserved_bytes
    for step in range(6):
        loss_of(model, step).backward()
        optimizer.step()
        with parked:
            reserved.append(host_book.reserved_bytes - before_bytes)
        optimizer.zero_grad()
    assert len(set(reserved)) == 1
    assert reserved[0] <= 1.03 * sum(parked.report.parked_bytes.values()) + 2**21
    parked.close()


def test_host_memory_can_be_given_back(model):
    before = host_book.reserved_bytes
    parked = park(model, keep_host=False)
    for _ in range(2):
        with parked:
            assert host_book.reserved_bytes > before
        assert host_book.reserved_bytes == before
    parked.close()


def test_too_little_host_memory_moves_nothing(model):
    before = copy.deepcopy(model.state_dict())
    parked = park(model, host_limit_bytes=4096)
    with pytest.raises(MemoryError, match="try a larger host_limit_bytes"):
        parked.park()
    assert parked.status == "present"
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    parked.close()


def test_prepared_memory_is_that_of_the_first_parking(model):
    parked = park(model, torch.optim.AdamW(model.parameters()))
    parked.prepare()
    with parked:
        assert parked.status == "parked"
    assert loss_of(model, 0).isfinite()
    parked.close()


class WithRoom(CpuTwin):
    """A twin with an allocator that notes the storages of each room made."""

    segments_grow = False

    def __init__(self, torch_device):
        super().__init__(torch_device)
        self.noted = []

    @property
    def allocator(self):
        return self

    def make_room(self, sizes):
        self.noted.append([*sizes])

    def give_back(self):
        pass

    def private_segments(self):
        return []


def test_memory_comes_back_in_ever_longer_pieces_and_gradients_in_short_ones(monkeypatch):
    """The driver takes few long ones back sooner, and gradients are freed together."""
    twin = WithRoom(torch.device("cpu"))
    monkeypatch.setattr(Device, "of", staticmethod(lambda device: twin))
    monkeypatch.setattr(transfer, "_FIRST_PIECE_BYTES", 2 * 2**20)
    monkeypatch.setattr(transfer, "_LONGEST_PIECE_BYTES", 4 * 2**20)
    model = nn.Sequential(*(nn.Linear(1, 2**18, bias=False) for _ in range(11)))
    for param in list(model.parameters())[:5]:
        param.grad = torch.ones_like(param)
    before = [param.clone() for param in model.parameters()]
    with park(model) as parked:
        pass
    assert all(map(torch.equal, model.parameters(), before))
    assert twin.noted == [[2**20] * pieces for pieces in (2, 4, 4, 1, 2, 2, 1)]
    parked.close()


def test_a_restore_waits_for_the_memory_that_somebody_else_holds():
    device = Device.of("cpu")
    with Ledger(device, limit_bytes=400_000):
        model = net(device)
        before = copy.deepcopy(model.state_dict())
        parked = park(model)
        parked.park()
        theirs = torch.ones(80_000)
        with pytest.raises(torch.OutOfMemoryError, match="everything is still parked"):
            parked.restore(timeout_s=0.1)
        assert parked.status == "parked"
        assert not any(param.untyped_storage().nbytes() for param in model.parameters())
        freeing = threading.Thread(
            target=lambda: (time.sleep(0.2), resize_storage(theirs.untyped_storage(), 0))
        )
        freeing.start()
        parked.restore(timeout_s=30)
        freeing.join()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        parked.close()
