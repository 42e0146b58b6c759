# SPDX-License-Identifier: Apache-2.0
"""Faults as they were found: each was a short program that trained on with wrong states, or hung."""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from matrices import shards_settings
from settings import Trainee, differing, needs_recovery
from torch import nn

from reference_impl import CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.memory.host import host_book
from reference_impl.optimizers import engine
from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.step import as_one
from reference_impl.trained_layers.shards import ShardBlock

TOO_LONG_S = 10


@pytest.fixture
def kernel_fails(monkeypatch):
    """A function: let the calls of the update kernel of these numbers (from 1) run out of memory."""
    real, count = Adam.update, [0]

    def choose(*numbers):
        def update(*args, **options):
            count[0] += 1
            if count[0] in numbers:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return real(*args, **options)

        count[0] = 0
        monkeypatch.setattr(Adam, "update", update)

    return choose


def in_time(function):
    """Return the result or the error of `function`; fails when it takes too long."""
    outcome = []

    def run():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TOO_LONG_S)
    if not outcome:
        pytest.fail("it waits for ever")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def states(optimizer):
    state = optimizer.state_dict()["state"]
    return {f"{key}.{name}": value.clone() for key, each in state.items() for name, value in each.items()}


def layers(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(count)])


class TestStepRetried:
    """`step()` again after an out-of-memory error takes the batch once, in all shares."""

    def trained(self, kernel_fails, *numbers):
        a, b = (nn.Parameter(torch.full((64,), 5.0, dtype=torch.bfloat16)) for _ in range(2))
        kernel_fails(*numbers)
        with HybridDeviceOptimizer([a, b], offload_filter=lambda p: p is a, lr=1e-3) as optimizer:
            ((a + b) * 0.001).sum().backward()
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                assert numbers
                optimizer.step()
            return states(optimizer) | {"a": a.detach().clone(), "b": b.detach().clone()}

    def test_it(self, kernel_fails):
        expected = self.trained(kernel_fails)
        assert expected["0.step"] == expected["1.step"] == 1
        assert differing(self.trained(kernel_fails, 1), expected) == []


class TestStaleDecision:
    """A failed step leaves no clip decision behind, neither its factor nor its skip."""

    def trained(self, kernel_fails, sizes, *numbers):
        b = nn.Parameter(torch.zeros(64))
        kernel_fails(*numbers)
        with HybridDeviceOptimizer([b], offload_fraction=0.0, lr=1e-3, max_grad_norm=1.0) as optimizer:
            for size in sizes:
                b.grad = None
                (b * size).sum().backward()
                try:
                    optimizer.step()
                except torch.OutOfMemoryError:
                    optimizer.zero_grad()
            return states(optimizer) | {"b": b.detach().clone()}

    @pytest.mark.parametrize("failed", [1e-3, float("inf")])
    def test_it(self, kernel_fails, failed):
        after = self.trained(kernel_fails, [failed, 1e6], 1)
        taken, skipped = (self.trained(kernel_fails, sizes) for sizes in ([failed, 1e6], [1e6]))
        assert differing(after, taken) == [] or differing(after, skipped) == []


class TestStatesTorn:
    """No part of a tensor misses an update."""

    def trained(self, kernel_fails, batches, *numbers):
        p = nn.Parameter(torch.ones(3 * 4096))
        kernel_fails(*numbers)
        wrapped = torch.optim.AdamW([p], lr=1e-2, fused=True)
        with OptimizerStateOffloader(wrapped, chunk_bytes=3 * 4 * 4096) as optimizer:
            for _ in range(batches):
                p.grad = torch.ones_like(p)
                try:
                    optimizer.step()
                except torch.OutOfMemoryError:
                    optimizer.zero_grad()
            return states(optimizer) | {"p": p.detach().clone()}

    def test_it(self, kernel_fails):
        after = self.trained(kernel_fails, 2, 2)
        assert any(differing(after, self.trained(kernel_fails, count)) == [] for count in (1, 2))


@pytest.mark.parametrize("place", [(engine, "noted_of"), (as_one, "__enter__")], ids=["noted", "begun"])
@pytest.mark.parametrize("fraction", [None, 0.0, 1.0])
def test_a_step_begins_whole(monkeypatch, fraction, place):
    """Where a step's gradients cannot be noted, it has not begun, and is taken once when taken again."""

    def trained(fails, *, skips=False):
        model = layers(2)
        with monkeypatch.context() as patched, optimizer_of(model, fraction) as optimizer:
            model(torch.ones(2, 64)).sum().backward()
            if fails:
                patched.setattr(*place, raises)
                with pytest.raises(MemoryError) as caught:
                    optimizer.step()
                assert "untouched" in caught.value.__notes__[-1]
                assert optimizer.status == "untouched"
                patched.undo()
            if skips:
                optimizer.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            return states(optimizer) | {name: p.detach().clone() for name, p in model.named_parameters()}

    def raises(*_, **__):
        raise MemoryError("injected")

    assert differing(trained(True), trained(False)) == []
    assert differing(trained(True, skips=True), trained(False)) == []


def optimizer_of(model, fraction):
    if fraction is None:
        return OptimizerStateOffloader(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    return HybridDeviceOptimizer(model.parameters(), offload_fraction=fraction, lr=1e-2)


@pytest.fixture
def no_group_stays():
    """A sharded model makes a process group of its own; the next test of this process makes another."""
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("has_left", [False, True])
def test_shards_come_back_where_one_was_interrupted_as_it_left(monkeypatch, no_group_stays, has_left):
    needs_recovery("shards")
    trainee = Trainee(shards_settings()[0], lambda _: None, is_built=False)
    before, left, real = trainee.weights(), [], ShardBlock.leave

    def leave(block, *args, **options):
        left.append(block)
        if has_left or len(left) < 3:
            real(block, *args, **options)
        if len(left) == 3:
            # As the handler of a signal does at the end of the region inside.
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardBlock, "leave", leave)
    with pytest.raises(KeyboardInterrupt):
        trainee.build()
    assert differing(trainee.weights(), before) == []


def test_slots_come_back(kernel_fails):
    def trained(batches, *numbers):
        model, lost = layers(), 0
        wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        kernel_fails(*numbers)
        with OptimizerStateOffloader(wrapped, chunk_bytes=2**15) as optimizer:
            for _ in range(batches):
                model(torch.ones(2, 64)).square().mean().backward()
                try:
                    optimizer.step()
                except torch.OutOfMemoryError:
                    lost += optimizer.status == "untouched"
                optimizer.zero_grad()
            return lost, states(optimizer) | {
                name: p.detach().clone() for name, p in model.named_parameters()
            }

    lost, after = trained(6, 3, 9, 15, 21)
    assert differing(after, trained(6 - lost)[1]) == []


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_close_after_a_skipped_batch(kernel_fails, fraction):
    model = layers()
    optimizer = HybridDeviceOptimizer(model.parameters(), offload_fraction=fraction, lr=1e-2)
    optimizer.attach(model)

    def train():
        kernel_fails(1)
        for _ in range(2):
            try:
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
            except torch.OutOfMemoryError:
                pass
            model.zero_grad(set_to_none=True)
        optimizer.close()

    in_time(train)


def test_an_error_in_backward_leaves_the_with_block():
    def train():
        model = layers()
        options = {"backward_overlap": "update", "cpu": CpuUpdate(bucket_elements=4096)}
        with HybridDeviceOptimizer(model.parameters(), lr=1e-2, **options):
            model[0].weight.register_hook(raises)
            model(torch.ones(2, 64)).sum().backward()

    def raises(gradient):
        raise LookupError("the user's")

    with pytest.raises(LookupError, match="the user's"):
        in_time(train)


def accumulated(overlap):
    model = layers()
    optimizer = HybridDeviceOptimizer(model.parameters(), backward_overlap=overlap, lr=1e-2)
    optimizer.attach(model)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    return [param.grad for param in model.parameters()]


def test_a_forgotten_accumulate_is_named_where_the_update_has_begun():
    with pytest.raises(RuntimeError, match=r"accumulate\(\)"):
        in_time(lambda: accumulated("update"))


def test_a_forgotten_accumulate_is_made_up_for():
    with pytest.warns(UserWarning, match=r"accumulate\(\)"):
        gradients = accumulated("gradients")
    assert all(map(torch.equal, gradients, accumulated("nothing")))


@pytest.mark.parametrize("overlap", ["nothing", "gradients", "update"])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("split", [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.3, 0.4, 0.3), (0.0, 1.0, 0.0)])
def test_gradients_stay_after_step(split, overlap, attached):
    model = layers(2)
    with HybridDeviceOptimizer(
        model.parameters(), split=split, backward_overlap=overlap, lr=1e-2
    ) as optimizer:
        if attached:
            optimizer.attach(model)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("attached", [False, True])
def test_gradients_stay_after_a_step_on_states(attached):
    model = layers(2)
    with OptimizerStateOffloader(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)) as optimizer:
        if attached:
            optimizer.attach(model)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())


def clipped(optimizer_of, *, foreach):
    model = layers(2)
    optimizer = optimizer_of(model)
    norms = []
    for size in (1.0, 8.0, 0.01):
        (model(torch.ones(2, 64)) * size).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach))
        optimizer.step()
        optimizer.zero_grad()
    found = states(optimizer) | {name: p.detach().clone() for name, p in model.named_parameters()}
    if hasattr(optimizer, "close"):
        optimizer.close()
    return norms, found


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("overlap", ["nothing", "gradients"])
def test_clip_grad_norm(fraction, overlap, foreach):
    plain = clipped(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), foreach=foreach)
    options = {"offload_fraction": fraction, "backward_overlap": overlap, "lr": 1e-2}
    ours = clipped(lambda model: HybridDeviceOptimizer(model.parameters(), **options), foreach=foreach)
    assert all(torch.equal(one, other) for one, other in zip(ours[0], plain[0], strict=True))
    assert differing(ours[1], plain[1]) == []


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_of_dropped_optimizers_end(threads):
    before, reserved_bytes = threading.active_count(), host_book.reserved_bytes
    for _ in range(10):
        HybridDeviceOptimizer([nn.Parameter(torch.zeros(1 << 12))], cpu=CpuUpdate(threads=threads), lr=1e-3)
    gc.collect()
    deadline = time.monotonic() + 6
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
    assert host_book.reserved_bytes <= reserved_bytes
