# SPDX-License-Identifier: Apache-2.0
"""A failing step: it happened or it did not, and the optimizer tells."""

import copy
import gc
import re
import threading
import time
from contextlib import suppress

import pytest
import torch
from failing_device import FailAt
from optimizer_reference import batches
from optimizer_training import assert_same_weights, hybrid, streaming, train, twins

from reference_impl import CpuUpdate
from reference_impl.memory.host import HostMemoryError, host_book
from reference_impl.optimizers import Adam
from reference_impl.optimizers.cpu.publish import Publisher
from reference_impl.optimizers.cpu.update import CpuKernel
from reference_impl.optimizers.cpu.workers import DeadlineWorkers
from reference_impl.optimizers.parameter_state import OptimizerState
from reference_impl.optimizers.step import WorkLostError


def fail_once(monkeypatch, owner, name, error, *, at=1):
    """Let the `at`-th call of a method raise before it does anything; returns a list of the remaining failures."""
    real, left, calls = getattr(owner, name), [error], []

    def failing(*args, **options):
        calls.append(1)
        if left and len(calls) >= at:
            raise left.pop()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, failing)
    return left


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory")


def states(optimizer):
    return [value for state in optimizer.state_dict()["state"].values() for value in state.values()]


def assert_same_states(one, other):
    for left, right in zip(states(one), states(other), strict=True):
        assert torch.equal(left.cpu(), right.cpu())


@pytest.mark.parametrize("split", [(1, 0, 0), (0, 0.5, 0.5)])
@pytest.mark.parametrize("following", ["state_dict", "step", "load_state_dict"])
def test_a_load_that_an_error_has_cut_short_is_finished_by_the_next_call(
    device, make, monkeypatch, split, following
):
    model, plain = twins(device)
    optimizer, other = (make(net, split=split) for net in (model, plain))
    data = batches(device.torch_device, 4)
    train(model, optimizer, data[:1])
    train(plain, other, data[:1])
    saved = copy.deepcopy(other.state_dict())
    train(model, optimizer, data[1:3])
    model.load_state_dict(plain.state_dict())
    fail_once(monkeypatch, OptimizerState, "write", out_of_memory(), at=3)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        optimizer.load_state_dict(saved)
    assert optimizer.status == "begun"
    assert "'begun'" in "".join(raised.value.__notes__)
    if following == "load_state_dict":
        optimizer.load_state_dict(saved)
    if following == "step":
        train(model, optimizer, data[3:])
        train(plain, other, data[3:])
    assert_same_states(optimizer, other)
    assert_same_weights(model, plain)
    assert optimizer.status == "untouched"


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("build", [hybrid, streaming])
def test_a_kernel_that_finds_no_memory_to_be_loaded_into_is_launched_again(
    device, monkeypatch, attached, fraction, build
):
    """As CUDA loads it with its first launch; nothing is done twice."""
    model, plain = twins(device)
    share = {"offload_fraction": fraction} if build is hybrid else {"fraction": 1 - fraction}
    data = batches(device.torch_device, 3)
    with (
        build(model, max_grad_norm=0.1, **share) as optimizer,
        build(plain, max_grad_norm=0.1, **share) as other,
    ):
        if attached:
            optimizer.attach(model)
        train(plain, other, data)
        for owner, name in ((Adam, "update"), (torch, "_foreach_add_"), (torch, "_foreach_copy_")):
            left = fail_once(monkeypatch, owner, name, out_of_memory())
            train(model, optimizer, [data.pop(0)])
            assert not left
        assert_same_states(optimizer, other)
        assert_same_weights(model, plain)


# A seam, and the call of it that fails.
AFTER_THE_BEGIN = {
    "a kernel, twice": (Adam, "update", torch.OutOfMemoryError("CUDA out of memory")),
    "a new weight's copy": (Publisher, "publish", torch.OutOfMemoryError("CUDA out of memory")),
    "a worker's task": (DeadlineWorkers, "run_job", MemoryError("no memory")),
    "inside a worker's update": (CpuKernel, "update", ValueError("inside")),
}


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("seam", AFTER_THE_BEGIN)
def test_what_fails_once_a_step_has_begun_breaks_the_optimizer_and_says_so(
    device, monkeypatch, attached, seam
):
    owner, name, error = AFTER_THE_BEGIN[seam]
    model, _ = twins(device)
    optimizer = hybrid(model, offload_fraction=0.5)
    if attached:
        optimizer.attach(model)
    model(batches(device.torch_device, 1)[0]).backward()

    def failing(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        with pytest.raises(WorkLostError, match=r"try .*loading the last checkpoint into a new") as caught:
            (optimizer.step(), optimizer.synchronize())
    assert str(error) in str(caught.value)
    assert "'broken'" in caught.value.__notes__[-1]
    assert optimizer.status == "broken"
    calls = (
        optimizer.step,
        optimizer.state_dict,
        optimizer.synchronize,
        optimizer.zero_grad,
        optimizer.state_dict,
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            call()
    optimizer.close()
    assert optimizer.status == "closed"


@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients"])
@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_has_not_begun_may_be_repeated_or_left_out(
    device, make, monkeypatch, backward_overlap, again
):
    model, plain = twins(device)
    options = {"offload_fraction": 0.5, "max_grad_norm": 0.1, "backward_overlap": backward_overlap}
    optimizer, other = make(model, **options), make(plain, **options)
    data = batches(device.torch_device, 3)
    train(plain, other, data if again else [data[0], data[2]])
    train(model, optimizer, data[:1])
    model(data[1]).backward()
    with monkeypatch.context() as failing:
        fail_once(failing, torch, "stack", out_of_memory())
        with pytest.raises(torch.OutOfMemoryError) as caught:
            optimizer.step()
    assert optimizer.status == "untouched"
    assert any("untouched" in note for note in caught.value.__notes__)
    if again:
        optimizer.step()
    model.zero_grad()
    train(model, optimizer, data[2:])
    assert_same_states(optimizer, other)
    assert_same_weights(model, plain)


def test_a_gradient_that_cannot_be_sent_leaves_the_batch_to_be_left_out(device, make, monkeypatch):
    model, plain = twins(device)
    optimizer, other = make(model, offload_fraction=0.5), make(plain, offload_fraction=0.5)
    data = batches(device.torch_device, 3)
    train(plain, other, [data[0], data[2]])
    train(model, optimizer, data[:1])
    error = HostMemoryError(needed_bytes=2, available_bytes=1, remedy="try less")
    with monkeypatch.context() as failing:
        fail_once(failing, type(device), "copy", error, at=2)
        with pytest.raises(HostMemoryError):
            model(data[1]).backward()
    assert optimizer.status == "untouched"
    model.zero_grad()
    train(model, optimizer, data[2:])
    assert_same_states(optimizer, other)


def test_a_lost_device_breaks_it(device, monkeypatch):
    model, _ = twins(device)
    optimizer = hybrid(model, offload_fraction=0.5)
    model(batches(device.torch_device, 1)[0]).backward()
    fail_once(
        monkeypatch, Adam, "update", RuntimeError("CUDA error: an illegal memory access was encountered")
    )
    with pytest.raises(RuntimeError, match="illegal memory access") as first:
        optimizer.step()
    for call in (optimizer.step, optimizer.state_dict, optimizer.zero_grad):
        with pytest.raises(RuntimeError, match="illegal memory access") as later:
            call()
        assert later.value.__cause__ is first.value
    optimizer.close()


def test_leaving_the_block_with_an_error_returns_and_keeps_that_error(device):
    model, _ = twins(device)

    def fails(_):
        raise ZeroDivisionError("the user's own")

    def run():
        with hybrid(model, backward_overlap="update", cpu=CpuUpdate(bucket_elements=448)):
            model.first.weight.register_hook(fails)
            model(batches(device.torch_device, 1)[0]).backward()

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        run()
    assert time.monotonic() - started < 5


def test_closing_between_a_backward_that_updates_and_its_step_says_so(device):
    model, _ = twins(device)
    optimizer = hybrid(model, backward_overlap="update")
    model(batches(device.torch_device, 1)[0]).backward()
    assert optimizer.status == "begun"
    with pytest.raises(RuntimeError, match="update"):
        optimizer.state_dict()
    optimizer.close()
    assert optimizer.status == "closed"


def test_accumulation_that_was_forgotten_is_named_also_where_backward_updates(device):
    model, _ = twins(device)
    data = batches(device.torch_device, 3)
    with hybrid(model, backward_overlap="update") as optimizer:
        optimizer.attach(model)
        model(data[0]).backward()
        with pytest.raises(RuntimeError, match="accumulate"):
            model(data[1]).backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match="accumulate"):
            model(data[1]).backward()
        # Gradients that the update has begun to use were dropped by the model.
        with pytest.raises(RuntimeError, match=r"dropped or replaced before step\(\).*try step\(\) again"):
            optimizer.step()
        optimizer.step()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_of_a_dropped_optimizer_end(device, threads):
    def alive():
        return sum(thread.name == "offload-update" for thread in threading.enumerate())

    gc.collect()
    before = alive()
    model, _ = twins(device)
    optimizer = hybrid(model, cpu=CpuUpdate(bucket_elements=1024, threads=threads))
    train(model, optimizer, batches(device.torch_device, 1))
    assert alive() >= before + threads
    del optimizer, model
    gc.collect()
    stop = time.monotonic() + 5
    while alive() > before and time.monotonic() < stop:
        time.sleep(0.01)
    assert alive() <= before


def raises_out_of_memory(*_):
    raise out_of_memory()


@pytest.mark.parametrize("fails", ["step", "hook"])
@pytest.mark.parametrize("then", ["again", "left out"])
@pytest.mark.parametrize("wrapper", [hybrid, streaming])
def test_the_scale_of_a_failed_step_is_not_used_again(device, monkeypatch, wrapper, then, fails):
    """GradScaler multiplies its scale by the optimizer's `grad_scale`, and removes that only after a step."""
    # CUDA's GradScaler has no kernel for gradients in bf16.
    model, plain = twins(device, torch.float32)
    options = {"backward_overlap": "nothing", "offload_fraction": 0.0} if wrapper is hybrid else {}
    scalers = [torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**8) for _ in range(2)]
    optimizer, other = wrapper(model, **options), wrapper(plain, **options)
    data = batches(device.torch_device, 3)

    def scaled(net, taken, scaler, batch):
        scaler.scale(net(batch)).backward()
        scaler.step(taken)
        scaler.update()
        taken.zero_grad()

    hook = None
    with monkeypatch.context() as failing:
        if fails == "hook":
            hook = optimizer.register_step_pre_hook(raises_out_of_memory)
        else:
            fail_once(failing, torch, "_foreach_norm", out_of_memory())
        with pytest.raises(torch.OutOfMemoryError):
            scaled(model, optimizer, scalers[0], data[0])
    if hook is not None:
        hook.remove()
    assert optimizer.status == "untouched"
    if then == "again":
        # The scaler has looked for infinities already.
        scalers[0].step(optimizer)
        scalers[0].update()
    # Not the optimizer's, because it forgets a scale too.
    model.zero_grad()
    taken = data if then == "again" else data[1:]
    for batch in data[1:]:
        scaled(model, optimizer, scalers[0], batch)
    for batch in taken:
        scaled(plain, other, scalers[1], batch)
    assert_same_states(optimizer, other)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("at", [1, 4, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 6))])
@pytest.mark.parametrize("seam", ["host block", "copy out"])
def test_a_group_that_cannot_be_added_leaves_nothing(device, monkeypatch, seam, at):
    if device.is_accelerator and seam == "copy out":
        pytest.skip("the seam is the CPU twin's")
    model, plain = twins(device)
    kept, new = (list(model.parameters())[i::2] for i in (0, 1))
    data = batches(device.torch_device, 2)
    optimizer = hybrid(kept, split=(0.3, 0.4, 0.3))
    gc.collect()
    live_bytes = host_book.live_bytes
    with monkeypatch.context() as patched:
        failing = FailAt(patched, seam)
        failing.at(at, torch.OutOfMemoryError("out of memory"))
        with suppress(torch.OutOfMemoryError):
            optimizer.add_param_group({"params": new})
        if not failing.has_failed:
            pytest.skip("fewer calls than that")
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.members) == set(kept)
    gc.collect()
    assert host_book.live_bytes == live_bytes
    optimizer.add_param_group({"params": new})
    train(model, optimizer, data)
    other_kept, other_new = (list(plain.parameters())[i::2] for i in (0, 1))
    other = hybrid(other_kept, split=(0.3, 0.4, 0.3))
    other.add_param_group({"params": other_new})
    train(plain, other, data)
    assert_same_states(optimizer, other)
    assert_same_weights(model, plain)


def test_what_others_keep_in_a_group_is_not_compared(device):
    model, _ = twins(device)
    optimizer = hybrid(model, backward_overlap="update")
    optimizer.param_groups[0]["scores"] = torch.ones(3)
    model(batches(device.torch_device, 1)[0]).backward()
    optimizer.param_groups[0]["scores"] = torch.zeros(3)
    optimizer.step()
    optimizer.close()


def test_an_optimizer_that_a_backward_has_broken_closes_quietly(device, monkeypatch):
    model, _ = twins(device)
    optimizer = hybrid(model, backward_overlap="update", cpu=CpuUpdate(bucket_elements=448))
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    with monkeypatch.context() as failing:
        fail_once(failing, type(device), "on_d2h_for_threads", lost, at=5)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            model(batches(device.torch_device, 1)[0]).backward()
    assert optimizer.status == "broken"
    optimizer.close()
    assert optimizer.status == "closed"
