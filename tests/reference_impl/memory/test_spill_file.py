# SPDX-License-Identifier: Apache-2.0
import errno
import os
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from injector import Injector
from interrupts import Interrupt
from python_faults import deeper

from reference_impl.device import Device
from reference_impl.memory.slab import Slab
from reference_impl.memory.spill_file import PAGE_BYTES, DiskError, SpillFile

LIMIT = 2**22


@pytest.fixture
def file(tmp_path):
    file = SpillFile(tmp_path, limit_bytes=LIMIT)
    yield file
    file.close()


@pytest.fixture
def pages():
    """Page-aligned memory, which direct transfers need."""
    slab = Slab(Device.of("cpu"), 8 * PAGE_BYTES, remedy="")
    yield slab.bytes[: 8 * PAGE_BYTES]
    slab.close()


def fill(memory, seed):
    memory.copy_(torch.randint(256, memory.shape, generator=torch.Generator().manual_seed(seed)))
    return memory.clone()


def test_extents_come_back_as_they_were(file, pages):
    written = {}
    for seed in range(5):
        offset = file.allocate(len(pages))
        written[offset] = fill(pages, seed)
        file.write(offset, pages)
    for offset, expected in written.items():
        pages.zero_()
        file.read(offset, pages)
        assert torch.equal(pages, expected)


def test_the_file_has_no_name(file, tmp_path):
    assert list(tmp_path.iterdir()) == []


def test_extents_are_used_again(file):
    first = file.allocate(PAGE_BYTES)
    file.free(first, PAGE_BYTES)
    assert file.allocate(PAGE_BYTES) == first
    assert file.live_bytes == PAGE_BYTES


def test_short_transfers_are_continued(file, pages, monkeypatch):
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real_write(fd, view[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:1500]], at))
    expected = fill(pages, 1)
    file.write(0, pages)
    pages.zero_()
    file.read(0, pages)
    assert torch.equal(pages, expected)


def test_a_file_system_without_direct_transfers_will_do(file, pages, monkeypatch):
    real = os.pwrite
    refused = []

    def refuse_once(fd, view, at):
        if file.is_direct:
            refused.append(1)
            raise OSError(errno.EINVAL, "not aligned")
        return real(fd, view, at)

    file.is_direct = True
    monkeypatch.setattr(os, "pwrite", refuse_once)
    expected = fill(pages, 2)
    file.write(0, pages)
    pages.zero_()
    file.read(0, pages)
    assert refused == [1]
    assert torch.equal(pages, expected)


def test_a_full_disk_is_named(file, pages, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskError, match=rf"cannot write in {tmp_path}: No space left on device"):
        file.write(0, pages)


def test_reading_past_the_end_is_named(file, pages):
    with pytest.raises(DiskError, match="the file ends early"):
        file.read(0, pages)


def test_the_limit_is_named(file):
    with pytest.raises(DiskError, match="try a larger limit_bytes"):
        file.allocate(LIMIT + PAGE_BYTES)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DiskError, match=r"cannot make a spill file in .*missing.*writable directory"):
        SpillFile(tmp_path / "missing", limit_bytes=LIMIT)


def test_more_than_the_disk_has_is_refused_at_once(tmp_path):
    with pytest.raises(DiskError, match="GiB needed"):
        SpillFile(tmp_path, limit_bytes=2**60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("owner", "call"), [(weakref, "finalize"), (os, "unlink")])
def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch, owner, call):
    descriptors = os.listdir("/proc/self/fd")
    real, calls = getattr(owner, call), []

    def fails_once(*args, **named):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("injected")
        return real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, fails_once)
        with pytest.raises(MemoryError):
            SpillFile(tmp_path, limit_bytes=LIMIT)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_a_close_that_is_cut_short_anywhere_is_finished_by_the_next(tmp_path):
    def cut_short(closed_within):
        file = SpillFile(tmp_path, limit_bytes=LIMIT)
        descriptor, outcome = file._descriptor, "closed"
        try:
            closed_within(file.close)
        except (RecursionError, KeyboardInterrupt) as error:
            outcome = type(error).__name__
        file.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        return outcome

    def interrupted(close, nth):
        with Interrupt(nth, also=("/weakref.py",)).comes(Injector()):
            close()

    limit = sys.getrecursionlimit()
    deep = {cut_short(lambda close, room=room: deeper(limit - room, close)) for room in range(200, 0, -1)}
    assert deep == {"RecursionError", "closed"}
    signals = {cut_short(lambda close, nth=nth: interrupted(close, nth)) for nth in range(1, 250)}
    assert signals == {"KeyboardInterrupt", "closed"}


@pytest.mark.slow
def test_a_killed_process_leaves_nothing(tmp_path):
    script = f"""
        import os, signal
        from reference_impl.memory.spill_file import SpillFile
        file = SpillFile({str(tmp_path)!r}, limit_bytes=2**20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []
