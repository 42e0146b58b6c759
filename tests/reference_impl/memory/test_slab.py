# SPDX-License-Identifier: Apache-2.0
"""One piece of host memory: present before it is used, and made so that nothing else has to wait for it."""

import mmap
import resource
import weakref
from pathlib import Path

import pytest

from reference_impl.device import Device
from reference_impl.memory import slab as slab_module
from reference_impl.memory.host import HostMemoryError, host_book, host_storages, left_of_address_space
from reference_impl.memory.pinned import pinned_book
from reference_impl.memory.slab import Slab

MIB = 2**20


class Kernel:
    """Notes the pages that it is asked to make present; an old kernel does not know how."""

    def __init__(self, *, is_old):
        self.ranges = []
        self._is_old = is_old

    def madvise(self, address, size_bytes, _):
        self.ranges.append((address, size_bytes))
        return -1 if self._is_old else 0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("is_old", [False, True])
def test_pages_are_made_present_a_little_at_a_time(monkeypatch, threads, is_old):
    """A call holds the lock of the address space. Registering waits for it, and every launch behind that."""
    kernel = Kernel(is_old=is_old)
    monkeypatch.setattr(slab_module, "_libc", kernel)
    slab = Slab(Device.of("cpu"), 100 * MIB, remedy="", touching_threads=threads)
    assert all(size_bytes <= 32 * MIB for _, size_bytes in kernel.ranges)
    begin = slab.bytes.data_ptr()
    for address, size_bytes in sorted(kernel.ranges):
        assert address == begin
        begin += size_bytes
    assert begin == slab.bytes.data_ptr() + slab.size_bytes
    slab.close()


def test_using_a_slab_costs_no_page_fault():
    slab = Slab(Device.of("cpu"), 64 * MIB, remedy="")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    slab.bytes[:: mmap.PAGESIZE] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 64 * MIB / mmap.PAGESIZE / 100
    slab.close()


def test_a_slab_that_the_host_has_no_room_for_takes_nothing():
    before = host_book.reserved_bytes
    with pytest.raises(HostMemoryError, match="try less"):
        Slab(Device.of("cpu"), 2**50, remedy="try less")
    assert host_book.reserved_bytes == before


def test_a_limit_on_address_space_is_named_and_takes_nothing():
    before = host_book.reserved_bytes, pinned_book.pinned_bytes
    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert left_of_address_space() is None
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 64 * MIB, limits[1]))
    try:
        with pytest.raises(
            HostMemoryError,
            match=r"address space of this process: 0\.50 GiB needed, 0\.0\d GiB available; try less, or a higher `uli",
        ):
            Slab(Device.of("cpu"), 512 * MIB, remedy="try less")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert (host_book.reserved_bytes, pinned_book.pinned_bytes) == before


@pytest.mark.parametrize("call", ["finalize", "add", "pin"])
def test_a_call_that_fails_leaves_nothing_locked_or_counted(device, monkeypatch, call):
    """Pages that stay registered after their mapping has gone would be the driver's for good."""
    owner = {"finalize": weakref, "add": host_book, "pin": type(device)}[call]
    before = host_book.reserved_bytes, pinned_book.pinned_bytes, len(host_storages)
    locked = []
    monkeypatch.setattr(type(device), "pin", lambda self, memory: locked.append(memory.data_ptr()))
    monkeypatch.setattr(type(device), "unpin", lambda self, address: locked.remove(address))

    def fails(*_, **__):
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, fails)
        with pytest.raises(MemoryError):
            Slab(device, 4 * MIB, remedy="")
    assert not locked
    assert (host_book.reserved_bytes, pinned_book.pinned_bytes, len(host_storages)) == before


def test_what_closing_has_failed_to_give_back_another_close_gives_back(monkeypatch):
    before = host_book.reserved_bytes
    slab = Slab(Device.of("cpu"), 4 * MIB, remedy="")
    real = slab_module.undo_as_one

    def fails(steps):
        raise MemoryError("injected")

    monkeypatch.setattr(slab_module, "undo_as_one", fails)
    with pytest.raises(MemoryError):
        slab.close()
    assert slab.is_open
    monkeypatch.setattr(slab_module, "undo_as_one", real)
    slab.close()
    slab.close()
    assert not slab.is_open
    assert host_book.reserved_bytes == before
