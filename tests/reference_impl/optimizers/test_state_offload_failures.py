# SPDX-License-Identifier: Apache-2.0
"""`OptimizerStateOffloader` after errors; `streamed/test_faults.py` fails every operation."""

import pytest
import torch
from optimizer_reference import MasterAdamW, batches
from optimizer_training import OPTIONS, assert_same_weights, streaming, train, twins

from reference_impl import OptimizerStateOffloader
from reference_impl.memory.host import host_book
from reference_impl.optimizers import engine
from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.streamed.share import StreamedShare

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory (injected)")
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered (injected)")


def fail(patched, owner, name, error, *, at=1):
    """Let the call number `at` raise, and no other."""
    real, count = getattr(owner, name), 0

    def failing(*args, **options):
        nonlocal count
        count += 1
        if count == at:
            raise error
        return real(*args, **options)

    patched.setattr(owner, name, failing)


@pytest.mark.parametrize("attached", [False, True])
def test_status_tells_what_to_do(monkeypatch, device, offload, attached):
    model, _ = twins(device)
    optimizer = offload(model)
    if attached:
        optimizer.attach(model)
    first, second = batches(device.torch_device, 2)
    assert optimizer.status == "untouched"
    model(first).backward()
    with monkeypatch.context() as patched:
        fail(patched, engine, "decide", OUT_OF_MEMORY)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            optimizer.step()
    assert optimizer.status == "untouched"
    assert "untouched" in raised.value.__notes__[-1]
    assert model.first.weight.grad is not None
    optimizer.step()
    assert optimizer.status == "begun"
    # Nothing that reads the weights comes before the step's end, attached or not.
    model(second)
    optimizer.close()
    assert optimizer.status == "closed"


def test_a_lost_device_breaks_it_and_close_still_frees(monkeypatch, device, offload):
    before = host_book.reserved_bytes
    model, _ = twins(device)
    optimizer = offload(model)
    model(batches(device.torch_device, 1)[0]).backward()
    with monkeypatch.context() as patched:
        fail(patched, Adam, "update", LOST, at=2)
        with pytest.raises(torch.AcceleratorError):
            optimizer.step()
    assert optimizer.status == "broken"
    for call in (optimizer.step, optimizer.synchronize, optimizer.state_dict, optimizer.zero_grad):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            call()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.close()
    assert optimizer.status == "closed"
    assert host_book.reserved_bytes == before


def test_leaving_the_block_shows_the_error_of_the_user(monkeypatch, device):
    before = host_book.reserved_bytes
    model, _ = twins(device)
    optimizer = streaming(model)
    optimizer.attach(model)

    def block():
        with optimizer:
            train(model, optimizer, batches(device.torch_device, 1))
            monkeypatch.setattr(StreamedShare, "wait_for", lambda *_: 1 / 0)
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        block()
    assert optimizer.status == "closed"
    assert host_book.reserved_bytes == before


def test_a_constructor_that_raises_leaves_nothing(monkeypatch, device):
    before = host_book.reserved_bytes
    model, _ = twins(device)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    model(batches(device.torch_device, 1)[0]).backward()
    inner.step()
    kept = {param: dict(state) for param, state in inner.state.items()}
    fail(monkeypatch, StreamedShare, "write", OUT_OF_MEMORY, at=3)
    with pytest.raises(torch.OutOfMemoryError):
        OptimizerStateOffloader(inner)
    assert host_book.reserved_bytes == before
    assert inner.state == kept
    OptimizerStateOffloader(inner).close()


@pytest.mark.parametrize("what", ["load", "refresh"])
def test_a_load_that_an_error_has_cut_short_is_finished(monkeypatch, device, offload, what):
    model, _ = twins(device)
    optimizer = offload(model)
    train(model, optimizer, batches(device.torch_device, 1))
    saved = optimizer.state_dict()
    train(model, optimizer, batches(device.torch_device, 2))
    with monkeypatch.context() as patched:
        if what == "load":
            fail(patched, StreamedShare, "write", torch.OutOfMemoryError("CUDA out of memory"), at=4)
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.load_state_dict(saved)
        else:
            fail(patched, StreamedShare, "refresh_masters", torch.OutOfMemoryError("CUDA out of memory"))
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.refresh_masters()
    assert optimizer.status == "begun"
    found = optimizer.state_dict()["state"]
    assert optimizer.status == "untouched"
    if what == "load":
        torch.testing.assert_close(found, saved["state"], rtol=0, atol=0)
    else:
        for index, state in found.items():
            param = optimizer.param_groups[0]["params"][index]
            assert torch.equal(state["master_param"], param.detach().float().cpu())


def test_a_gradient_written_behind_its_parameter_while_the_update_reads_it_is_refused(device, offload):
    model, _ = twins(device)
    optimizer = offload(model)
    optimizer.attach(model)
    first, second = batches(device.torch_device, 2)
    model(first).backward()
    kept = model.first.weight.grad
    optimizer.step()
    kept.mul_(2)
    with pytest.raises(RuntimeError, match=r"written after step\(\).*synchronize"):
        model(second)
    assert optimizer.status == "broken"


@pytest.mark.parametrize("attached", [False, True])
def test_gradients_are_left_as_torch_leaves_them(device, offload, attached):
    """Without `zero_grad` they accumulate, and setting them to zero waits for the update."""
    model, plain = twins(device)
    optimizer, reference = offload(model), MasterAdamW(plain, on_cpu=False, **OPTIONS)
    if attached:
        optimizer.attach(model)
    for index, batch in enumerate(batches(device.torch_device, 4)):
        model(batch).backward()
        plain(batch).backward()
        optimizer.step()
        reference.step()
        if index == 1:
            optimizer.zero_grad(set_to_none=False)
            for param in plain.parameters():
                if param.grad is not None:
                    param.grad.zero_()
    assert_same_weights(model, plain)
