# SPDX-License-Identifier: Apache-2.0
"""Whatever fails while training parks or comes back, it is all parked or all present, and goes on to the bit."""

import itertools
import os
import random
import signal
from functools import cache

import pytest
import torch
from interrupted import PLACES, at_each_bytecode
from interrupts import counted
from small_net import loss_of, net

from reference_impl import HybridDeviceOptimizer, Streaming, park
from reference_impl.memory.arena import HostArena
from reference_impl.memory.slab import Slab
from reference_impl.parking import parked as room
from reference_impl.parking import storage as parked_storage
from reference_impl.parking import transfer
from reference_impl.parking.views import UnnamedViews

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")

# `make test-faults` runs more.
TIMES = int(os.environ.get("FAULT_SEEDS_TIMES", "1"))
ERRORS = (MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, RuntimeError, RecursionError)
OF_DEVICE = ("copy", "synchronize", "pin")
SEAMS = [
    *((HostArena, name) for name in ("allocate", "reserve_blocks", "free")),
    *((parked_storage, name) for name in ("resize_storage", "mark_absent", "mark_present")),
    (Slab, "__init__"),
    (room, "find"),
    (room, "guard_gradients"),
    (transfer, "set_versions"),
    (UnnamedViews, "add_to"),
]


class Failing:
    """Counts the calls of all seams; the one that is chosen raises, before or after it has happened."""

    def __init__(self, monkeypatch, device):
        self.calls, self.fail_at, self.error, self.after = 0, None, None, False
        for owner, name in (*((type(device), name) for name in OF_DEVICE), *SEAMS):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, real):
        def call(*args, **kwargs):
            self.calls += 1
            fails = self.calls == self.fail_at
            if fails and not self.after:
                raise self.error("injected")
            result = real(*args, **kwargs)
            if fails:
                raise self.error("injected")
            return result

        return call


def training(kind, device):
    model = net(device)
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = HybridDeviceOptimizer(
            model.parameters(), lr=1e-2, split=(0.3, 0.4, 0.3), streaming=Streaming(chunk_bytes=8192)
        )
        optimizer.attach(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model, optimizer


def finished(model, optimizer):
    """The weights after two more steps."""
    for step in range(2, 4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    if hasattr(optimizer, "close"):
        optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


KINDS = ("AdamW", "ours")


@cache
def weights_without_faults(kind, device):
    return finished(*training(kind, device))


def all_or_nothing(model, parked):
    sizes = {param.untyped_storage().nbytes() > 0 for param in model.parameters()}
    assert sizes == {"weights" not in parked.parked_kinds}, (sizes, parked)


WAYS = {
    "whole": (lambda parked: parked.park(), lambda parked: parked.restore()) * 2,
    "parts": (
        lambda parked: parked.park(weights=False),
        lambda parked: parked.park(),
        lambda parked: parked.restore("weights"),
        lambda parked: parked.restore(),
    ),
}


def with_one_fault(device, kind, way, fail, choose, reached=()):
    """Train, park and restore with one fault; return the calls that could have failed, kinds away, and weights.

    `reached` are the kinds that are away after each of the acts.
    """
    model, optimizer = training(kind, device)
    parked = park(model, optimizer, timeout_s=0.0)
    fail.calls = 0
    choose(fail)
    away = []
    for number, act in enumerate(WAYS[way]):
        try:
            act(parked)
        except ERRORS:
            all_or_nothing(model, parked)
            # The remedy: the same call again, unless it has happened.
            if parked.parked_kinds != reached[number]:
                act(parked)
        away.append(parked.parked_kinds)
        all_or_nothing(model, parked)
    assert not reached or tuple(away) == reached
    calls, fail.fail_at = fail.calls, None
    parked.close()
    return calls, tuple(away), finished(model, optimizer)


def run(seeds, device):
    want = {kind: weights_without_faults(kind, device) for kind in KINDS}
    with pytest.MonkeyPatch.context() as patch:
        fail = Failing(patch, device)
        plain = {
            (kind, way): with_one_fault(device, kind, way, fail, lambda fail: None)[:2]
            for kind, way in itertools.product(want, WAYS)
        }
        for seed in seeds:
            drawn = random.Random(seed)
            kind, way = drawn.choice(list(plain))
            calls, reached = plain[kind, way]
            place, error, after = (
                drawn.randrange(1, calls + 1),
                drawn.choice(ERRORS),
                drawn.random() < 0.5,
            )

            def choose(fail, place=place, error=error, after=after):
                fail.fail_at, fail.error, fail.after = place, error, after

            weights = with_one_fault(device, kind, way, fail, choose, reached)[2]
            assert all(map(torch.equal, weights, want[kind])), (seed, kind, way, place, error, after)


def test_a_fault_leaves_all_or_nothing_and_training_goes_on(device):
    run(range(20), device)


@pytest.mark.slow
def test_many_faults(device):
    run(range(20, 20 + 100 * TIMES), device)


def interrupted(places, device):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for place in places:
            model, optimizer = training("AdamW", device)
            parked = park(model, optimizer)
            for act in (parked.park, parked.restore):
                try:
                    with counted(place, lambda: signal.raise_signal(signal.SIGINT)):
                        act()
                except KeyboardInterrupt:
                    all_or_nothing(model, parked)
                if (parked.status == "parked") != (act == parked.park):
                    act()
                all_or_nothing(model, parked)
            parked.close()
            weights = finished(model, optimizer)
            assert all(map(torch.equal, weights, weights_without_faults("AdamW", device))), place
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("most", [6, pytest.param(PLACES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moves", ["park", "restore"])
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_within_a_transfer(device, kind, moves, most):
    """All is parked or all is present, the same call goes on, and host memory is taken once."""

    def begin():
        model, optimizer = training(kind, device)
        parked = park(model, optimizer)
        if moves == "restore":
            parked.park()
        return model, optimizer, parked

    def check(subject, where):
        model, optimizer, parked = subject
        all_or_nothing(model, parked)
        if (parked.status == "parked") != (moves == "park"):
            getattr(parked, moves)()
        if moves == "park":
            arena = parked._transfer._arena
            assert arena.live_bytes == sum(each._block.size_bytes for each in parked._transfer.parked), where
            parked.restore()
        parked.close()
        assert all(map(torch.equal, finished(model, optimizer), weights_without_faults(kind, device))), where

    for file in ("parking/transfer.py", "parking/storage.py"):
        at_each_bytecode(begin, lambda subject: getattr(subject[2], moves)(), check, files=(file,), most=most)


def bytecodes(device):
    model, optimizer = training("AdamW", device)
    parked = park(model, optimizer)
    with counted(None, lambda: None) as count:
        parked.park()
    parked.close()
    return count[0]


def test_ctrl_c_leaves_all_or_nothing(device):
    places = bytecodes(device)
    interrupted(range(1, places, max(places // 25, 1)), device)


@pytest.mark.slow
def test_ctrl_c_before_many_bytecodes(device):
    places = bytecodes(device)
    interrupted(range(3, places, max(places // 150, 1)), device)
