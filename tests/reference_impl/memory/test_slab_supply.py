# SPDX-License-Identifier: Apache-2.0
"""Slabs that are made in the background."""

import threading

import pytest
import torch

from reference_impl.device import Device
from reference_impl.memory import arena as arena_module
from reference_impl.memory.arena import HostArena
from reference_impl.memory.host import HostMemoryError, host_book
from reference_impl.memory.slab import SlabSupply

MIB = 2**20


@pytest.fixture
def supply(device):
    supply = SlabSupply(device, remedy="try less", pinned=True)
    yield supply
    supply.close()


def test_slabs_come_in_the_order_of_the_orders(supply):
    for count in (2, 6, 4):
        supply.order(count * MIB)
    assert supply.ordered_bytes == 12 * MIB
    slabs = [supply.made(supply.take()) for _ in range(3)]
    assert [slab.size_bytes for slab in slabs] == [2 * MIB, 6 * MIB, 4 * MIB]
    assert supply.take() is None
    for slab in slabs:
        assert slab.bytes.sum() == 0
        slab.close()


def test_an_order_that_the_host_cannot_fill_is_forgotten_with_all_others(supply):
    supply.order(2**50)
    supply.order(2 * MIB)
    assert supply.made(supply.take()) is None
    assert supply.ordered_bytes == 0


def test_closing_gives_back_what_nobody_took(supply):
    before = host_book.reserved_bytes
    for _ in range(4):
        supply.order(2 * MIB)
    supply.close()
    assert host_book.reserved_bytes == before


def test_threads_end_with_the_last_order(supply):
    supply.order(2 * MIB)
    slab = supply.made(supply.take())
    for thread in threading.enumerate():
        if thread.name.startswith("make-slab"):
            thread.join(10)
            assert not thread.is_alive()
    slab.close()


def fill(block, value):
    view = block.view(torch.uint8, (block.size_bytes,))
    view.fill_(value)
    return view


def test_expected_blocks_need_no_slab_made_on_demand(device, monkeypatch):
    made = []
    monkeypatch.setattr(arena_module, "Slab", lambda *_, **__: made.append(1))
    arena = HostArena(device, slab_bytes=4 * MIB)
    sizes = [3 * MIB, MIB, 2 * MIB, 5 * MIB, 1000]
    arena.expect(sizes)
    views = [fill(arena.allocate(size), value) for value, size in enumerate(sizes)]
    assert not made
    assert all((view == value).all() for value, view in enumerate(views))
    arena.close()


def test_what_is_expected_twice_is_made_once(device):
    arena = HostArena(device, slab_bytes=4 * MIB)
    arena.expect([4 * MIB, 4 * MIB])
    arena.expect([4 * MIB, 4 * MIB])
    for _ in range(2):
        arena.allocate(4 * MIB)
    assert arena.reserved_bytes == 8 * MIB
    assert arena.close() is None


def test_a_wrong_guess_changes_nothing_but_time(device):
    arena = HostArena(device, slab_bytes=4 * MIB)
    arena.expect([4 * MIB])
    big = arena.allocate(9 * MIB)
    small = arena.allocate(2 * MIB)
    assert big.slab is not small.slab
    arena.close()


def test_a_guess_stays_within_the_limit(device):
    arena = HostArena(device, limit_bytes=8 * MIB, slab_bytes=4 * MIB)
    arena.expect([4 * MIB] * 10)
    arena.allocate(4 * MIB)
    arena.allocate(4 * MIB)
    assert arena.reserved_bytes == 8 * MIB
    with pytest.raises(HostMemoryError):
        arena.allocate(4 * MIB)
    arena.close()


def test_a_wrong_guess_takes_nothing_from_the_limit(device):
    arena = HostArena(device, limit_bytes=8 * MIB, slab_bytes=4 * MIB)
    arena.expect([6 * MIB])
    arena.allocate(8 * MIB)
    assert arena.reserved_bytes == 8 * MIB
    arena.close()


@pytest.mark.cuda
def test_slabs_made_in_the_background_are_pinned():
    supply = SlabSupply(Device.of("cuda"), remedy="", pinned=True)
    supply.order(4 * MIB)
    slab = supply.made(supply.take())
    assert slab.bytes.is_pinned()
    slab.close()
