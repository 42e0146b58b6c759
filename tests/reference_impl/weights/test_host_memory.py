# SPDX-License-Identifier: Apache-2.0
"""In which order blocks start their way to the device, where some of them are pageable."""

import threading

import pytest
import torch

from reference_impl.device import REACHED
from reference_impl.weights.host_copies import Loader


class Staged:
    """Copies of pageable memory."""

    def __init__(self):
        self.expected = []

    def copy_in(self, target, host):
        target.copy_(host)

    def expect(self, host):
        self.expected.append(host)

    def synchronize(self):
        pass


@pytest.fixture
def hosts():
    return [torch.full((64,), value, dtype=torch.uint8) for value in range(4)]


@pytest.fixture
def staged(device, hosts, monkeypatch):
    """The first and the third of `hosts` are pageable."""
    staged = Staged()
    for host in hosts[::2]:
        monkeypatch.setitem(device.pageable, host.untyped_storage().data_ptr(), staged)
    return staged


@pytest.fixture
def begun(device, monkeypatch):
    """The first byte of each host memory whose copy has begun."""
    begun, copy_in = [], type(device).copy_in

    def copying(self, target, host, *, after):
        begun.append(int(host[0]))
        return copy_in(self, target, host, after=after)

    # Of the class: in pytest 9.0 an undone patch of the object stays its attribute, which hides those of the class.
    monkeypatch.setattr(type(device), "copy_in", copying)
    return begun


@pytest.fixture
def loader(device):
    loader = Loader(device)
    yield loader
    loader.close()


@pytest.fixture
def may_begin(loader):
    """An event that the loader's thread waits for."""
    may_begin = threading.Event()

    def wait():
        assert may_begin.wait(timeout=60)
        return REACHED

    loader.in_turn(wait)
    yield may_begin
    may_begin.set()


def test_a_pinned_block_waits_for_pageable_ones_that_are_needed_before_it(
    device, hosts, staged, begun, loader, may_begin
):
    """Beside them it takes half of the link: the block that is needed next came late, and then two came at once."""
    targets = [torch.empty_like(host, device=device.torch_device) for host in hosts]
    started = [loader.load(target, host, after=REACHED) for target, host in zip(targets, hosts, strict=True)]
    assert begun == []
    may_begin.set()
    for each in started:
        device.wait(each())
    assert begun == [0, 1, 2, 3]
    device.synchronize()
    assert all(torch.equal(target.cpu(), host) for target, host in zip(targets, hosts, strict=True))
    # Behind the first one the next pageable memory is read ahead.
    assert [int(host[0]) for host in staged.expected] == [2]
    # Nothing comes before it now: it needs no thread.
    loader.load(targets[1], hosts[1], after=REACHED)
    assert begun == [0, 1, 2, 3, 1]


def test_what_was_read_ahead_is_forgotten_where_a_copy_fails_or_does_not_come(
    device, hosts, staged, loader, may_begin, monkeypatch
):
    def fails(target, host):
        raise MemoryError

    monkeypatch.setattr(staged, "copy_in", fails)
    target = torch.empty_like(hosts[0], device=device.torch_device)
    started = [loader.load(target, host, after=REACHED) for host in hosts[::2]]
    may_begin.set()
    for each in started:
        with pytest.raises(MemoryError):
            each()
    assert [host if host is None else int(host[0]) for host in staged.expected] == [2, None, None]
    loader.load(target, hosts[0], after=REACHED)
    staged.expected.clear()
    loader.close()
    assert staged.expected[-1] is None
