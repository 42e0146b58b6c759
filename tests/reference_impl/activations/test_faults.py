# SPDX-License-Identifier: Apache-2.0
"""Whatever fails inside forward or backward, the next step has the same bits and nothing stays taken."""

import gc
from contextlib import nullcontext, suppress

import pytest
import torch
from failing_device import FailAt

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.device import Device
from reference_impl.memory.disk import DiskSpace
from reference_impl.memory.ledger import Ledger
from reference_impl.memory.spill_file import DiskError

MIB = 2**20


def layers(model, tmp_path):
    return ActivationOffloader(model, min_bytes=1024)


def half_of_it(model, tmp_path):
    return ActivationOffloader(model, min_bytes=1024, fraction=0.5, double_buffering=False)


def with_disk(model, tmp_path):
    space = DiskSpace(path=tmp_path, limit_bytes=64 * MIB, staging_bytes=4 * MIB)
    return ActivationOffloader(model, min_bytes=1024, host_limit_bytes=MIB, disk=space)


def with_weights(model, tmp_path):
    return ActivationOffloader(model, min_bytes=1024, weights=True)


def checkpoint(model, tmp_path):
    return CheckpointOffloader(model, min_bytes=1024)


def budget(model, tmp_path):
    return ActivationOffloader(model, min_bytes=1024, budget_bytes="least")


MODES = [layers, half_of_it, with_disk, with_weights, checkpoint, budget]
ERRORS = [torch.OutOfMemoryError, KeyboardInterrupt, RuntimeError]


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture(autouse=True)
def on_the_twin(trainee):
    if trainee.ids.is_cuda:
        pytest.skip("the seams are the CPU twin's")


def counted(trainee, mode):
    """Return a context that counts device bytes for a budget."""
    return Ledger(Device.of(trainee.ids.device)) if mode is budget else nullcontext()


SEAMS = ["copy out", "copy in", "host block", "event", "wait"]
# Every seam under one mode, and every mode but the longest at one seam; the campaign of tests/faults draws from all.
FAST = {*((layers, seam) for seam in SEAMS), *((mode, "copy in") for mode in MODES if mode is not budget)}


@pytest.mark.parametrize(
    "after", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["before", "after"]
)
@pytest.mark.parametrize(
    ("mode", "seam"),
    [
        pytest.param(mode, seam, marks=() if (mode, seam) in FAST else pytest.mark.slow)
        for mode in MODES
        for seam in SEAMS
    ],
)
def test_a_failed_call_costs_its_step_alone(trainee, tmp_path, monkeypatch, mode, seam, after):
    if seam == "host block" and after:
        pytest.skip("the arena undoes an interrupt itself: memory/test_interrupted.py")
    expected = trainee.step()
    with counted(trainee, mode), mode(trainee.model, tmp_path) as offloader:
        # A budget's plan is there by now.
        for _ in range(4 if mode is budget else 1):
            assert trainee.step() == expected
        failing = FailAt(monkeypatch, seam, after=after)
        assert trainee.step() == expected
        calls = failing.calls
        numbers = {1, calls // 2, calls - 1} & set(range(1, calls + 1))
        if mode is with_disk and seam == "host block":
            # How many more there are depends on how soon the disk has made room.
            numbers = {1}
        for trial, number in enumerate(sorted(numbers)):
            failing.at(number, ERRORS[trial % len(ERRORS)]("injected"))
            with pytest.raises((RuntimeError, KeyboardInterrupt), match="injected"):
                trainee.step()
            assert trainee.step() == expected
        trainee.model.zero_grad()
        gc.collect()
        if mode is not with_weights:
            assert offloader.arena.live_bytes == 0
    assert trainee.step() == expected


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_host_memory_that_cannot_be_pinned(trainee, tmp_path, monkeypatch, mode, number):
    expected = trainee.step()
    for error in ERRORS:
        with counted(trainee, mode), mode(trainee.model, tmp_path):
            failing = FailAt(monkeypatch, "pinning")
            failing.at(number, error("injected"))
            with suppress(error):
                trainee.step()
            assert trainee.step() == expected
            monkeypatch.undo()
    gc.collect()
    assert trainee.step() == expected


@pytest.mark.parametrize(
    "error",
    [
        *(pytest.param(error, marks=pytest.mark.slow) for error in (torch.OutOfMemoryError, RuntimeError)),
        KeyboardInterrupt,
        lambda text: OSError(5, text),
        pytest.param(MemoryError, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seam", ["disk write", "disk read"])
def test_a_disk_that_fails_for_a_while(trainee, tmp_path, monkeypatch, seam, error):
    expected = trainee.step()
    with with_disk(trainee.model, tmp_path) as offloader:
        failing = FailAt(monkeypatch, seam)
        for number in (1, 2, 5):
            failing.at(number, error("injected"))
            # A failed write is reported by the next store, which may be in the next step.
            with suppress(DiskError, RuntimeError, KeyboardInterrupt, MemoryError):
                trainee.step()
                trainee.step()
            assert failing.has_failed
            assert trainee.step() == expected
        trainee.model.zero_grad()
        gc.collect()
        tier = offloader.engine.tier.disk
        tier.sweep()
        assert (tier.staging.live_bytes, tier.file.live_bytes) == (0, 0)
    assert trainee.step() == expected


def test_what_closing_raises_does_not_hide_the_users_exception(trainee, tmp_path, monkeypatch):
    expected = trainee.step()
    offloader = with_weights(trainee.model, tmp_path)
    failing = FailAt(monkeypatch, "copy in")

    def train():
        with offloader:
            kept.append(trainee.loss())
            failing.at(1, torch.OutOfMemoryError("injected"))
            raise ZeroDivisionError("the user's own")

    kept = []
    with pytest.raises(ZeroDivisionError, match="own") as raised:
        train()
    assert "closing has failed too: OutOfMemoryError: injected" in raised.value.__notes__[0]
    kept.clear()
    offloader.close()
    assert trainee.step() == expected


def test_closing_can_be_tried_again(trainee, tmp_path, monkeypatch):
    expected = trainee.step()
    offloader = with_weights(trainee.model, tmp_path)
    loss = trainee.loss()
    failing = FailAt(monkeypatch, "copy in")
    failing.at(2, torch.OutOfMemoryError("injected"))
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        offloader.close()
    offloader.close()
    del loss
    assert trainee.step() == expected
