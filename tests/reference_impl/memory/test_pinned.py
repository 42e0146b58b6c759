# SPDX-License-Identifier: Apache-2.0
import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl import limit_pinned_memory
from reference_impl.device import Device
from reference_impl.memory import copiers
from reference_impl.memory.arena import HostArena
from reference_impl.memory.pinned import PinnedMemoryError, pinned_book
from reference_impl.memory.slab import Slab

MIB = 2**20


def bytes_of(count, device, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), generator=generator, dtype=torch.uint8).to(device.torch_device)


def taken(arena, size):
    return arena.allocate(size).view(torch.uint8, (size,))


def pageable(arena, size):
    """More than may be pinned, and of that the first bytes."""
    return taken(arena, 3 * MIB)[:size]


@pytest.fixture
def limit():
    with limit_pinned_memory(2 * MIB):
        yield


@pytest.fixture
def arena(device, limit):
    arena = HostArena(device, slab_bytes=MIB)
    yield arena
    arena.close()


@pytest.mark.usefixtures("limit")
def test_what_exceeds_the_limit_is_pageable_and_comes_back_whole(device, arena):
    source, back = (
        bytes_of(3 * MIB + 7, device),
        torch.empty(3 * MIB + 7, dtype=torch.uint8, device=device.torch_device),
    )
    host = taken(arena, source.numel())
    stored = device.copy_out(host, source, after=[device.record()])
    stored.synchronize()
    assert torch.equal(host, source.cpu())
    device.copy_in(back, host, after=[stored]).synchronize()
    assert torch.equal(back, source)
    assert host.untyped_storage().data_ptr() in device.pageable
    assert pinned_book.peak_bytes <= 2 * MIB


def test_what_fits_is_pinned(device, arena):
    small, large = taken(arena, MIB), taken(arena, 3 * MIB)
    assert large.untyped_storage().data_ptr() in device.pageable
    assert small.untyped_storage().data_ptr() not in device.pageable
    assert MIB <= pinned_book.pinned_bytes <= 2 * MIB


def test_as_many_of_the_first_blocks_are_pinned_as_may_be(device, arena):
    arena.reserve_blocks([MIB, MIB // 2, MIB, MIB // 4])
    reserved = arena.reserved_bytes
    pageable = [
        taken(arena, size).untyped_storage().data_ptr() in device.pageable
        for size in (MIB, MIB // 2, MIB, MIB // 4)
    ]
    assert pageable == [False, False, True, True]
    assert arena.reserved_bytes == reserved
    assert pinned_book.pinned_bytes == 2 * MIB


def test_a_copy_in_waits_for_what_is_on_its_way_into_the_same_bytes(device, arena):
    host = pageable(arena, MIB)
    back = torch.empty(MIB, dtype=torch.uint8, device=device.torch_device)
    for seed in range(5):
        source = bytes_of(MIB, device, seed=seed)
        device.copy_out(host, source, after=[device.record()])
        # Without an event: the ring knows its unfinished copies.
        device.copy_in(back, host, after=[device.record()]).synchronize()
        assert torch.equal(back, source)


def test_the_source_may_be_written_behind_the_event_before_the_bytes_have_landed(device, arena):
    host, source = pageable(arena, MIB), bytes_of(MIB, device)
    expected = source.cpu().clone()
    stored = device.copy_out(host, source, after=[device.record()])
    device.wait(stored)
    source.zero_()
    stored.synchronize()
    assert torch.equal(host, expected)


def test_synchronize_brings_everything_home(device, arena):
    host, source = pageable(arena, 2 * MIB), bytes_of(2 * MIB, device)
    device.copy_out(host, source, after=[device.record()])
    device.synchronize()
    assert torch.equal(host, source.cpu())


def test_threads_may_copy_at_once(device, arena):
    hosts = [pageable(arena, MIB // 2) for _ in range(4)]
    backs = [torch.empty(MIB // 2, dtype=torch.uint8, device=device.torch_device) for _ in range(4)]
    sources = [bytes_of(MIB // 2, device, seed=seed) for seed in range(4)]

    def pass_through(index):
        for _ in range(5):
            device.copy_out(hosts[index], sources[index], after=[device.record()])
            device.copy_in(backs[index], hosts[index], after=[]).synchronize()

    device.synchronize()
    threads = [threading.Thread(target=pass_through, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(back, source) for back, source in zip(backs, sources, strict=True))


class Together:
    """`memmove` of which four have to run at once."""

    def __init__(self):
        self.met, self.barrier = 0, threading.Barrier(4)

    def memmove(self, target, source, size):
        if self.barrier.wait(20) == 0:
            self.met += 1
        ctypes.memmove(target, source, size)


def test_several_threads_fill_and_empty_the_ring_at_once(device, monkeypatch):
    monkeypatch.setattr(copiers, "own_cores", lambda: 4)
    monkeypatch.setattr(copiers, "idle_cores", lambda own: 4)
    together = Together()
    monkeypatch.setattr(copiers, "ctypes", together)
    with limit_pinned_memory(2 * MIB):
        arena = HostArena(device, slab_bytes=MIB)
        # Eight buffers' worth: every copy has three others beside it. On the way in half of all are filled at once.
        source, host = bytes_of(MIB // 2, device), pageable(arena, MIB // 2)
        back = torch.empty_like(source)
        host.copy_(source)
        device.copy_in(back, host, after=[]).synchronize()
        assert torch.equal(back, source)
        came_in = together.met
        host.zero_()
        device.copy_out(host, source, after=[device.record()]).synchronize()
        assert torch.equal(host, source.cpu())
        assert (came_in, together.met - came_in) == (2, 2)
        arena.close()


def test_all_buffers_are_for_the_way_in_until_something_leaves(device, arena):
    """Then each direction has half, even if another thread uses one at that moment."""
    host, source = pageable(arena, MIB), bytes_of(MIB, device)
    back = torch.empty_like(source)
    host.copy_(source)
    device.copy_in(back, host, after=[]).synchronize()
    ring = device.pageable[host.untyped_storage().data_ptr()]
    assert (ring._in.count, ring._out.count) == (8, 0)
    with ThreadPoolExecutor(1) as other:
        coming = [other.submit(device.copy_in, back, host, after=[]) for _ in range(5)]
        device.copy_out(host[:1000], source[:1000], after=[device.record()]).synchronize()
        for each in coming:
            each.result().synchronize()
    assert torch.equal(back, source)
    assert (ring._in.count, ring._out.count) == (4, 4)


def test_the_event_of_a_copy_out_is_that_of_all_its_parts(device, arena, monkeypatch):
    late = threading.Event()
    host, source = pageable(arena, 40_000), bytes_of(40_000, device)

    class FirstPartLast:
        def memmove(self, target, source, size):
            if target == host.data_ptr():
                late.wait(0.2)
            ctypes.memmove(target, source, size)

    monkeypatch.setattr(copiers, "idle_cores", lambda own: 4)
    monkeypatch.setattr(copiers, "ctypes", FirstPartLast())
    device.copy_out(host, source, after=[device.record()]).synchronize()
    assert torch.equal(host, source.cpu())


def test_of_two_copies_into_the_same_bytes_the_later_one_stays(device, arena):
    host = pageable(arena, MIB)
    for seed in range(5):
        device.copy_out(host, bytes_of(MIB, device, seed=seed), after=[device.record()])
    device.synchronize()
    assert torch.equal(host, bytes_of(MIB, device, seed=4).cpu())


def test_what_has_not_landed_is_told_to_who_copies_it_in_until_it_is_written_again(
    device, arena, monkeypatch
):
    host, source = pageable(arena, MIB), bytes_of(MIB, device)
    back = torch.empty_like(source)

    class Failing:
        @staticmethod
        def memmove(target, source, size):
            raise MemoryError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(copiers, "ctypes", Failing)
        device.copy_out(host[:1000], source[:1000], after=[device.record()])
        with pytest.raises(MemoryError, match="planted"):
            device.synchronize()
    # A later copy out, elsewhere, forgets nothing.
    device.copy_out(host[MIB // 2 :], source[MIB // 2 :], after=[device.record()]).synchronize()
    for _ in range(2):
        with pytest.raises(MemoryError, match="planted"):
            device.copy_in(back, host, after=[])
    device.copy_out(host, source, after=[device.record()])
    device.copy_in(back, host, after=[]).synchronize()
    assert torch.equal(back, source)


def test_other_dtypes_and_parts_of_tensors_pass_through(device, arena):
    host = pageable(arena, 4000).view(torch.bfloat16)
    source = torch.arange(4000, device=device.torch_device).bfloat16()
    device.copy_out(host[10:1010], source[100:1100], after=[device.record()]).synchronize()
    assert torch.equal(host[10:1010], source[100:1100].cpu())
    device.copy_out(host[:0], source[:0], after=[]).synchronize()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(st.sampled_from(["take", "free", "reserve", "close"]), st.integers(1, 3 * MIB)), max_size=20
    ),
)
def test_the_limit_is_never_exceeded(limit_mib, steps):
    device = Device.of("cpu")
    with limit_pinned_memory(limit_mib * MIB):
        arenas = [HostArena(device, slab_bytes=MIB) for _ in range(2)]
        live = []
        for step, size in steps:
            arena = arenas[size % 2]
            if step == "take":
                live.append((arena, arena.allocate(size)))
            elif step == "reserve":
                arena.reserve(size)
            elif step == "free" and live:
                owner, block = live.pop(size % len(live))
                owner.free(block)
            elif step == "close":
                live = [each for each in live if each[0] is not arena]
                arena.close()
        assert pinned_book.peak_bytes <= limit_mib * MIB
        for arena in arenas:
            arena.close()
    assert pinned_book.pinned_bytes == 0


def test_the_error_says_what_was_needed_what_the_limit_is_and_what_to_try(device):
    with limit_pinned_memory(2 * MIB), pytest.raises(PinnedMemoryError) as error:
        Slab(device, 2**30, remedy="try less")
    assert str(error.value) == (
        "pinned memory: 1.00 GiB needed, 0.00 GiB available; try a higher limit_pinned_memory() than 2097152"
    )


def test_a_limit_that_holds_no_ring_is_refused():
    with pytest.raises(ValueError, match=r"is 1000 bytes; expected 1048576 or more.*try 1073741824"):
        limit_pinned_memory(1000)


@pytest.mark.usefixtures("limit")
def test_a_second_limit_is_refused():
    with pytest.raises(RuntimeError, match="limited already, to 2097152 bytes"):
        limit_pinned_memory(2 * MIB)


def test_a_limit_below_what_is_pinned_is_refused(device):
    slab = Slab(device, 4 * MIB, remedy="try less")
    with pytest.raises(RuntimeError, match="are pinned already, and limit_bytes is 2097152"):
        limit_pinned_memory(2 * MIB)
    slab.close()
    limit_pinned_memory(2 * MIB).close()


def test_a_limit_stays_while_pageable_memory_is_in_use(device):
    limit = limit_pinned_memory(2 * MIB)
    arena = HostArena(device)
    arena.allocate(10)
    with pytest.raises(RuntimeError, match="pageable memory of an offloader is still in use"):
        limit.close()
    assert pinned_book.limit_bytes == 2 * MIB
    arena.close()
    limit.close()
    assert (pinned_book.limit_bytes, pinned_book.pinned_bytes) == (None, 0)


def test_a_dropped_arena_leaves_no_pageable_memory(device, limit):
    HostArena(device).allocate(10)
    gc.collect()
    assert not device.pageable


def test_a_failed_pin_is_not_counted(device, limit, monkeypatch):
    def refuse(self, memory):
        raise RuntimeError("no")

    monkeypatch.setattr(type(device), "pin", refuse)
    with pytest.raises(RuntimeError, match="no"):
        Slab(device, MIB // 2, remedy="try less", most_bytes=MIB // 2)
    assert pinned_book.pinned_bytes == 0
    monkeypatch.undo()


def test_the_thread_ends_with_the_limit(device):
    with limit_pinned_memory(2 * MIB):
        arena = HostArena(device)
        host = taken(arena, 1000)
        device.copy_out(host, bytes_of(1000, device), after=[device.record()]).synchronize()
        assert any(thread.name.startswith("staged-copies") for thread in threading.enumerate())
        arena.close()
    assert not any(thread.name.startswith("staged-copies") for thread in threading.enumerate())


def test_a_limit_is_set_behind_what_only_the_collector_frees():
    before_bytes = pinned_book.pinned_bytes
    slab = Slab(Device.of("cpu"), 4 * MIB, remedy="")
    ring = [slab]
    ring.append(ring)
    del slab, ring
    with limit_pinned_memory(before_bytes + MIB):
        assert pinned_book.pinned_bytes <= before_bytes
