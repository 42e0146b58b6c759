# SPDX-License-Identifier: Apache-2.0
"""Whatever the disk or its threads do, the caller hears of it, and staging memory and extents come back."""

import errno
import os
import threading

import pytest
import torch

from reference_impl.device import REACHED
from reference_impl.memory import disk, worker
from reference_impl.memory.disk import DiskSpace, DiskTier
from reference_impl.memory.host import HostMemoryError
from reference_impl.memory.spill_file import DiskError

SIZE = 2**20


@pytest.fixture
def tier(device, tmp_path):
    tier = DiskTier(device, DiskSpace(path=tmp_path, limit_bytes=8 * SIZE, staging_bytes=3 * SIZE))
    yield tier
    tier.close()


def source(tier, value=1):
    """Bytes that are there: `REACHED` would not wait for later kernels."""
    filled = torch.full((SIZE,), value, dtype=torch.uint8, device=tier.device.torch_device)
    tier.device.synchronize()
    return filled


def store(tier, value=1):
    """Store, and wait until only the file has the bytes."""
    stored = tier.store(source(tier, value), after=REACHED)
    tier.writer.wait(tier.writer.submit(lambda: None), deadline_s=60)
    return stored


def load(tier, stored):
    target = torch.empty_like(source(tier))
    stored.load(target).synchronize()
    return target


def is_empty(tier):
    tier.sweep()
    return (tier.staging.live_bytes, tier.file.live_bytes) == (0, 0)


def flip_a_bit(monkeypatch, at=4321):
    real = os.preadv

    def flipped(descriptor, views, offset):
        count = real(descriptor, views, offset)
        views[0][at] ^= 16
        return count

    monkeypatch.setattr(os, "preadv", flipped)


def test_a_flipped_bit_is_named_with_file_offset_and_remedy(tier, tmp_path, monkeypatch):
    first, second = store(tier, 1), store(tier, 2)
    with monkeypatch.context() as patch:
        flip_a_bit(patch)
        with pytest.raises(
            DiskError,
            match=rf"cannot read in {tmp_path}: {SIZE} bytes at offset {SIZE} .* changed.*another disk",
        ):
            load(tier, second)
    # The disk may have been right.
    assert torch.equal(load(tier, second), source(tier, 2))
    assert torch.equal(load(tier, first), source(tier, 1))
    first.release()
    second.release()
    assert is_empty(tier)


def test_a_page_of_another_extent_is_noticed(tier, monkeypatch):
    stored, real = store(tier), os.preadv
    torch.manual_seed(0)
    random = torch.randint(256, (SIZE,), dtype=torch.uint8)
    stored.release()
    mixed = tier.store(random, after=REACHED)

    def swapped(descriptor, views, offset):
        count = real(descriptor, views, offset)
        pages = views[0]
        pages[:4096], pages[4096:8192] = bytes(pages[4096:8192]), bytes(pages[:4096])
        return count

    tier.writer.wait(tier.writer.submit(lambda: None), deadline_s=60)
    monkeypatch.setattr(os, "preadv", swapped)
    with pytest.raises(DiskError, match="have changed"):
        load(tier, mixed)
    mixed.release()


def store_for_ever(tier):
    while True:
        tier.store(source(tier), after=REACHED).release()


def test_writes_that_a_failed_step_has_left_fail_no_later_one(tier, monkeypatch):
    real, may_fail, is_told = os.pwrite, threading.Event(), threading.Event()
    waits = iter((may_fail, is_told))

    def full(*args):
        if (event := next(waits, None)) is None:
            return real(*args)
        assert event.wait(60)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    left = [tier.store(source(tier), after=REACHED) for _ in range(2)]
    may_fail.set()
    # The second write waits, so the first one's error is there soon.
    with pytest.raises(DiskError, match="No space left"):
        store_for_ever(tier)
    for each in left:
        each.release()
    is_told.set()
    tier.writer.wait(tier.writer.submit(lambda: None), deadline_s=60)
    stored = store(tier, 7)
    assert torch.equal(load(tier, stored), source(tier, 7))
    stored.release()
    assert is_empty(tier)


def test_after_read_errors_storing_goes_on(tier, monkeypatch):
    stored = [store(tier, value) for value in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        errors = []
        for each in stored:
            with pytest.raises(DiskError, match="Input/output error") as raised:
                load(tier, each)
            # Whoever keeps the exceptions keeps their frames.
            errors.append(raised)
    assert tier.staging.live_bytes == 0
    more = [store(tier, 7) for _ in range(4)]
    assert all(torch.equal(load(tier, each), source(tier, value)) for value, each in enumerate(stored))
    for each in (*stored, *more):
        each.release()
    assert is_empty(tier)


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit, OSError])
def test_what_the_writing_thread_raises_reaches_the_next_store(tier, monkeypatch, error):
    def fail(*_):
        raise error("injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        kept = store(tier, 1)
    with pytest.raises((error, DiskError)):
        tier.store(source(tier), after=REACHED)
    # The bytes have never left memory.
    assert torch.equal(load(tier, kept), source(tier, 1))
    kept.release()
    again = store(tier, 2)
    assert torch.equal(load(tier, again), source(tier, 2))
    again.release()
    assert is_empty(tier)


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit])
def test_what_the_reading_thread_raises_reaches_the_load(tier, monkeypatch, error):
    stored = store(tier)

    def fail(*_):
        raise error("injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(error, match="injected"):
            load(tier, stored)
    assert torch.equal(load(tier, stored), source(tier))
    stored.release()
    assert is_empty(tier)


def test_staging_memory_that_nothing_will_free_is_waited_for_in_vain(tier, monkeypatch):
    monkeypatch.setattr(disk, "_OTHERS_TURN_S", 0.0)
    blocks = [tier.staging.allocate(SIZE) for _ in range(3)]
    with pytest.raises(HostMemoryError, match="try more staging_bytes"):
        tier.store(source(tier), after=REACHED)
    for block in blocks:
        tier.staging.free(block)
    assert is_empty(tier)


def test_staging_memory_that_the_host_has_no_room_for_is_to_be_smaller(device, tmp_path):
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HostMemoryError, match=rf"GiB available; try a smaller staging_bytes than {2**50}"):
        DiskTier(device, DiskSpace(path=tmp_path, limit_bytes=8 * SIZE, staging_bytes=2**50))
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_copy_that_fails_gives_its_extent_and_staging_back(tier, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(type(tier.device), "copy_out", fail)
        with pytest.raises(torch.OutOfMemoryError):
            tier.store(source(tier), after=REACHED)
    assert is_empty(tier)


def test_a_wait_ends_when_the_thread_is_dead(tier, monkeypatch):
    monkeypatch.setattr(worker, "SLICE_S", 0.01)
    stored, held = store(tier), threading.Event()
    tier.reader.submit(held.wait)
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: thread.name[:9] != "disk-read")
    with pytest.raises(RuntimeError, match=r"thread 'disk-read' has died.*try a new offloader"):
        load(tier, stored)
    monkeypatch.undo()
    held.set()
    assert torch.equal(load(tier, stored), source(tier))
    stored.release()
