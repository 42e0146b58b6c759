# SPDX-License-Identifier: Apache-2.0
import gc
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from python_faults import calls_counted

from reference_impl.device import Device
from reference_impl.memory.arena import ALIGNMENT_BYTES, HostArena
from reference_impl.memory.host import HostMemoryError, host_book

MIB = 2**20


@pytest.fixture
def arena(device):
    arena = HostArena(device, slab_bytes=4 * MIB)
    yield arena
    arena.close()


class Pending:
    reached = False

    def query(self):
        return self.reached

    def synchronize(self):
        self.reached = True


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300_000)), max_size=40))
def test_live_blocks_never_overlap(steps):
    arena = HostArena(Device.of("cpu"), slab_bytes=2 * MIB)
    live = []
    for release, size in steps:
        if release and live:
            arena.free(live.pop(size % len(live)))
        else:
            live.append(arena.allocate(size))
    for index, one in enumerate(live):
        assert one.offset % ALIGNMENT_BYTES == 0
        for other in live[index + 1 :]:
            apart = (
                one.offset + one.size_bytes <= other.offset or other.offset + other.size_bytes <= one.offset
            )
            assert one.slab is not other.slab or apart
    assert arena.live_bytes == sum(block.size_bytes for block in live)
    arena.close()


def test_equal_sizes_are_recycled_without_growth(arena):
    for _ in range(50):
        blocks = [arena.allocate(300_000) for _ in range(8)]
        for block in blocks:
            arena.free(block)
    assert arena.reserved_bytes == 4 * MIB


def test_recycled_block_carries_the_event_of_its_last_use(arena):
    event = Pending()
    arena.free(arena.allocate(1000), after=event)
    assert arena.allocate(1000).ready is event


def test_merge_leaves_blocks_in_use_by_a_copy_alone(arena):
    busy = Pending()
    arena.free(arena.allocate(3 * MIB), after=busy)
    arena.allocate(2 * MIB)
    assert arena.reserved_bytes > 4 * MIB
    busy.reached = True
    before = arena.reserved_bytes
    arena.allocate(1 * MIB)
    arena.allocate(2 * MIB)
    assert arena.reserved_bytes == before


def test_views_have_dtype_and_shape(arena):
    view = arena.allocate(6 * 4).view(torch.float32, (2, 3))
    assert view.shape == (2, 3)
    assert view.dtype == torch.float32


def test_limit_is_named_before_anything_is_taken(device):
    arena = HostArena(device, limit_bytes=4 * MIB, remedy="try a smaller fraction")
    with pytest.raises(
        HostMemoryError, match=r"0\.01 GiB needed.*0\.00 GiB available; try a smaller fraction"
    ):
        arena.allocate(8 * MIB)
    assert arena.reserved_bytes == 0


def test_more_than_the_host_has_is_refused(device):
    with pytest.raises(HostMemoryError, match="GiB available"):
        HostArena(device).reserve(2**50)


def test_close_returns_every_byte_and_can_be_repeated(device):
    live, reserved = host_book.live_bytes, host_book.reserved_bytes
    arena = HostArena(device)
    arena.allocate(1000)
    arena.close()
    arena.close()
    assert (host_book.live_bytes, host_book.reserved_bytes) == (live, reserved)


def test_a_forgotten_arena_leaves_nothing_in_the_book(device):
    live, reserved = host_book.live_bytes, host_book.reserved_bytes
    arena = HostArena(device)
    arena.allocate(1000)
    del arena
    gc.collect()
    assert (host_book.live_bytes, host_book.reserved_bytes) == (live, reserved)


@pytest.mark.cuda
def test_blocks_are_pinned():
    arena = HostArena(Device.of("cuda"))
    assert arena.allocate(MIB).view(torch.uint8, (MIB,)).is_pinned()
    arena.close()


@pytest.mark.parametrize("limit_bytes", [1, 300, 300_000, 2 * MIB + 1, 5 * MIB - 1])
def test_the_limit_is_kept_to_the_byte(device, limit_bytes):
    arena, blocks = HostArena(device, limit_bytes=limit_bytes), []
    arena.expect([100_000] * 80)
    with pytest.raises(HostMemoryError):
        blocks += [arena.allocate(100_000) for _ in range(80)]
    fitted = arena.live_bytes
    assert arena.reserved_bytes <= limit_bytes
    with suppress(HostMemoryError):
        for _ in range(limit_bytes // 256 + 1):
            blocks.append(arena.allocate(256))
    assert fitted <= arena.live_bytes <= arena.reserved_bytes <= limit_bytes
    assert arena.live_bytes > limit_bytes - 256 - 256
    arena.close()


def test_a_block_comes_back_also_without_memory_for_it(device, monkeypatch):
    arena = HostArena(device, slab_bytes=2**20)
    block = arena.allocate(2**12)
    arena.reserve(2**20)

    def no_memory():
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("reference_impl.memory.interrupts.deferred_interrupts", no_memory)
        arena.free(block)
    assert arena.allocate(2**12) is block
    assert arena.live_bytes == 2**12
    arena.close()


def test_a_call_without_memory_loses_no_byte(device):
    """Neither of the slab, which can be handed out whole afterwards, nor of the book, whichever call fails."""

    def fail(where):
        raise MemoryError(where)

    before_bytes = host_book.live_bytes
    nth, has_failed = 0, True
    while has_failed:
        nth, has_failed = nth + 1, False
        arena = HostArena(device)
        arena.reserve(2 * MIB)
        held = [arena.allocate(1000), arena.allocate(MIB // 2)]
        arena.free(held.pop())
        try:
            with calls_counted(nth, fail, on_main=True):
                held.append(arena.allocate(MIB // 2))
                held.append(arena.allocate(MIB // 4))
        except MemoryError:
            has_failed = True
        for block in held:
            arena.free(block)
        arena.allocate(2 * MIB)
        assert arena.reserved_bytes == arena.live_bytes == 2 * MIB, nth
        arena.close()
        assert host_book.live_bytes == before_bytes, nth
    assert nth > 20
