# SPDX-License-Identifier: Apache-2.0
"""An interrupt before any bytecode leaves locks, blocks and threads usable, for other threads too."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from interrupted import at_each_bytecode
from interrupts import counted, of_package

from reference_impl.device import REACHED
from reference_impl.memory.arena import HostArena
from reference_impl.memory.disk import DiskSpace, DiskTier
from reference_impl.memory.host import host_book, host_storages
from reference_impl.memory.in_flight import InFlight
from reference_impl.memory.pinned import pinned_book
from reference_impl.memory.slab import Slab, SlabSupply, _promises
from reference_impl.memory.spill_file import SpillFile
from reference_impl.memory.worker import Worker

MIB = 2**20
# With the standard library's own code: its locks may be left behind, too.
TRACED = (threading.__file__, *(f"/concurrent/futures/{name}.py" for name in ("_base", "thread")))


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_everywhere(operation: Callable[[], object], check: Callable[[], object], *, most=400) -> int:
    """Interrupt `operation` before each of its bytecodes, or `most` of them, and `check` from another thread each time.

    Returns how often it was interrupted.
    """
    operation()
    with counted(None, lambda: None, of=of_package(TRACED)) as count:
        operation()
    times = 0
    for nth in range(1, count[0] + 1, -(-count[0] // most)):
        try:
            with counted(nth, lambda: signal.raise_signal(signal.SIGINT), of=of_package(TRACED)):
                operation()
        except KeyboardInterrupt:
            times += 1
        in_time(check, f"bytecode {nth} of {count[0]}")
    assert times
    return times


def in_time(check: Callable[[], object], when: str) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            check()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), f"hangs after an interrupt before {when}"
    assert not raised, f"after an interrupt before {when}: {raised[0]!r}"


def test_an_arena(device):
    arena = HostArena(device, slab_bytes=2 * MIB)
    before_bytes = host_book.live_bytes
    others = arena.allocate(MIB)
    lost = []

    def operation() -> None:
        block = arena.allocate(1000)
        try:
            arena.free(arena.allocate(600 * 1024))
        finally:
            arena.free(block)

    def check() -> None:
        blocks = [arena.allocate(size) for size in (1000, 600 * 1024, 3000)]
        ranges = sorted((id(b.slab), b.offset, b.offset + b.size_bytes) for b in (others, *blocks))
        assert all(one[0] != two[0] or one[2] <= two[1] for one, two in pairwise(ranges))
        for block in blocks:
            arena.free(block)
        assert host_book.live_bytes - before_bytes == arena.live_bytes
        lost.append(arena.live_bytes - others.size_bytes)

    # At their first and their last bytecodes neither a call nor its caller has a block; nowhere else is one lost.
    assert interrupted_everywhere(operation, check) > 300
    assert lost[-1] <= 8 * 600 * 1024
    arena.close()
    assert host_book.live_bytes == before_bytes


# An interrupt inside a finalizer is lost, as always in Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_arena_whose_slabs_are_made_ahead(device):
    def operation() -> None:
        arena = HostArena(device, slab_bytes=2 * MIB)
        try:
            arena.expect([MIB, 2 * MIB])
            arena.allocate(MIB)
            arena.allocate(3 * MIB)
        finally:
            arena.close()

    reserved_bytes = host_book.reserved_bytes
    interrupted_everywhere(operation, lambda: None, most=100)
    # After an interrupted close() a thread may still be making an unwanted slab.
    stop = time.monotonic() + 10
    while host_book.reserved_bytes != reserved_bytes and time.monotonic() < stop:
        gc.collect()
        time.sleep(0.01)
    assert host_book.reserved_bytes == reserved_bytes


# An interrupt inside a finalizer is lost, as always in Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_slab_is_locked_and_counted_or_not(device, monkeypatch, pinned):
    locked = set()
    monkeypatch.setattr(type(device), "pin", lambda self, pages: locked.add(pages.data_ptr()))
    monkeypatch.setattr(type(device), "unpin", lambda self, address: locked.remove(address))

    def taken():
        gc.collect()
        return (
            host_book.reserved_bytes,
            pinned_book.pinned_bytes,
            len(host_storages),
            _promises._size_bytes,
            locked,
        )

    def check(subject, where):
        assert taken() == before, where

    before = (*taken()[:-1], set())
    at_each_bytecode(
        lambda: None,
        lambda subject: Slab(device, MIB, remedy="", pinned=pinned, touching_threads=1).close(),
        check,
        files=("memory/slab.py", "memory/closing.py"),
    )


def test_a_supply_of_slabs(device):
    supply = SlabSupply(device, remedy="", pinned=True)

    def operation() -> None:
        supply.order(2 * MIB)
        order = supply.take()
        if order is not None:
            supply.made(order).close()

    def check() -> None:
        while (order := supply.take()) is not None:
            supply.made(order).close()

    interrupted_everywhere(operation, check, most=150)
    supply.close()


def test_what_is_in_flight(device):
    in_flight = InFlight(device, limit_bytes=100)
    event, kept = REACHED, torch.ones(1)

    def operation() -> None:
        in_flight.hold(event, kept, 60)
        in_flight.hand_over(kept)
        in_flight.trim(10)
        in_flight.drain()

    def check() -> None:
        in_flight.clear()
        assert in_flight.size_bytes == 0

    interrupted_everywhere(operation, check)


def test_interrupts_that_are_not_deferred_are_found(device, monkeypatch):
    monkeypatch.setattr("reference_impl.memory.in_flight.UninterruptedLock", threading.Lock)
    with pytest.raises(AssertionError, match="after an interrupt before bytecode"):
        test_what_is_in_flight(device)


def test_a_spill_file(tmp_path):
    file = SpillFile(tmp_path, limit_bytes=64 * MIB)

    def operation() -> None:
        file.free(file.allocate(4096), 4096)

    def check() -> None:
        file.free(file.allocate(8192), 8192)

    interrupted_everywhere(operation, check)
    file.close()


def test_a_worker():
    worker = Worker("tested")

    def operation() -> None:
        assert worker.wait(worker.submit(lambda: 5), deadline_s=5) == 5

    def check() -> None:
        assert worker.submit(lambda: 6).result(10) == 6

    interrupted_everywhere(operation, check)
    in_time(worker.close, "close()")


def test_a_disk(device, tmp_path):
    space = DiskSpace(path=tmp_path, limit_bytes=64 * MIB, staging_bytes=MIB)
    tier = DiskTier(device, space)
    stored_bytes = torch.arange(256, dtype=torch.uint8, device=device.torch_device).repeat(1024)
    other_bytes = stored_bytes.flip(0)

    def stores(source: torch.Tensor) -> None:
        stored = tier.store(source, after=device.record())
        try:
            target = torch.empty_like(source)
            stored.prepare()
            device.wait(stored.load(target))
            assert torch.equal(target, source)
        finally:
            stored.release()

    interrupted_everywhere(lambda: stores(stored_bytes), lambda: stores(other_bytes), most=150)
    in_time(tier.close, "close()")
