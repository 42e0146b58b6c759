# SPDX-License-Identifier: Apache-2.0
"""Activations that go on to disk when pinned memory is full."""

import errno
import os
import shutil
import time

import pytest
import torch
from torch import nn

from reference_impl.activations import ActivationOffloader
from reference_impl.memory.disk import DiskSpace
from reference_impl.memory.spill_file import DiskError

MIB = 2**20
SMALL = {"min_bytes": 1024, "host_limit_bytes": 2 * MIB}


def space(path, **changes):
    return DiskSpace(**({"path": path, "limit_bytes": 64 * MIB, "staging_bytes": 4 * MIB} | changes))


def test_every_step_is_bitwise_the_same(trainee, tmp_path):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, disk=space(tmp_path), **SMALL) as offloader:
        for _ in range(4):
            assert trainee.step() == expected
        assert offloader.arena.reserved_bytes == 2 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_only_takes_time(trainee, tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: (time.sleep(0.002), real(*args))[1])
    expected = trainee.step()
    with ActivationOffloader(trainee.model, disk=space(tmp_path, staging_bytes=2 * MIB), **SMALL):
        for _ in range(2):
            assert trainee.step() == expected


@pytest.mark.parametrize("eighths", range(8, 33, 2))
def test_staging_memory_of_any_size_that_holds_the_largest_storage_suffices(tmp_path, eighths):
    """Read-ahead leaves it in pieces, each perhaps too small for the next request."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
    ]
    model, inputs = nn.Sequential(*blocks), torch.randn(512, 32)
    largest_bytes = 512 * 64 * 4

    def gradients():
        model.zero_grad()
        model(inputs).square().mean().backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = gradients()
    disk = space(tmp_path, staging_bytes=largest_bytes * eighths // 8)
    with ActivationOffloader(model, layers=blocks, min_bytes=1, host_limit_bytes=1, disk=disk):
        for _ in range(4):
            assert all(map(torch.equal, gradients(), expected))


def ten_steps(trainee):
    for _ in range(10):
        trainee.step()


def test_a_full_disk_is_a_clear_error_and_the_model_goes_on(trainee, tmp_path, monkeypatch):
    expected = trainee.step()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ActivationOffloader(trainee.model, disk=space(tmp_path), **SMALL):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(DiskError, match=r"cannot write in .*No space left.*fewer layers"):
                ten_steps(trainee)
        assert trainee.step() == expected
    assert trainee.step() == expected


def test_a_limit_that_is_reached_is_named(trainee, tmp_path):
    with (
        ActivationOffloader(trainee.model, disk=space(tmp_path, limit_bytes=MIB), **SMALL),
        pytest.raises(DiskError, match="try a larger limit_bytes or fewer layers"),
    ):
        trainee.step()


def test_the_directory_may_be_deleted_meanwhile(trainee, tmp_path):
    directory = tmp_path / "spill"
    directory.mkdir()
    expected = trainee.step()
    with ActivationOffloader(trainee.model, disk=space(directory), **SMALL):
        shutil.rmtree(directory)
        assert trainee.step() == expected


def test_a_retained_graph_reads_twice(trainee, tmp_path):
    trainee.model.zero_grad()
    trainee.loss().backward()
    trainee.loss().backward()
    expected = [p.grad.clone() for p in trainee.model.parameters()]
    trainee.model.zero_grad()
    with ActivationOffloader(trainee.model, disk=space(tmp_path), **SMALL):
        loss = trainee.loss()
        loss.backward(retain_graph=True)
        loss.backward()
    for wanted, parameter in zip(expected, trainee.model.parameters(), strict=True):
        assert wanted.equal(parameter.grad)


def test_an_exception_leaves_no_room_taken(trainee, tmp_path):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, disk=space(tmp_path), **SMALL) as offloader:
        hook = trainee.model.layers[2].down.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainee.step()
        hook.remove()
        assert trainee.step() == expected
        assert offloader.arena.live_bytes == 0


@pytest.mark.parametrize("size", ["limit_bytes", "staging_bytes"])
def test_a_disk_that_holds_nothing_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match=f"{size}=0; expected at least a page"):
        space(tmp_path, **{size: 0})


def test_a_disk_that_cannot_be_used_is_refused_before_the_model_is_touched(trainee, tmp_path):
    before = dict(trainee.model.__dict__)
    with pytest.raises(DiskError, match="expected a writable directory; try another path"):
        ActivationOffloader(trainee.model, disk=space(tmp_path / "missing"), **SMALL)
    with pytest.raises(DiskError, match="try a smaller limit_bytes or another disk"):
        ActivationOffloader(trainee.model, disk=space(tmp_path, limit_bytes=2**60), **SMALL)
    assert trainee.model.__dict__ == before


def test_many_small_storages(trainee, tmp_path):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, disk=space(tmp_path), min_bytes=1, host_limit_bytes=2 * MIB):
        for _ in range(2):
            assert trainee.step() == expected
