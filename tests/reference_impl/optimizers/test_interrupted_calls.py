# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any bytecode: gradient mode comes back, no turn stays taken, and another `close()` goes on."""

import gc
import signal
import sys
import threading

import pytest
import torch
from interrupted import interrupted
from layers_trainee import batches as ids_of
from layers_trainee import decoder, streamed
from optimizer_reference import batches
from optimizer_training import hybrid, streaming, twins

from reference_impl.memory.absent import storage_of
from reference_impl.memory.host import host_book
from reference_impl.optimizers.step import as_steps_run
from reference_impl.optimizers.writes.awaited import AwaitedParameter
from reference_impl.verification.model import decoder_loss

pytestmark = pytest.mark.usefixtures("host_memory_comes_back", "raises_keyboard_interrupt")
BUILDS = {
    "hybrid": hybrid,
    "three ways": lambda model: hybrid(model, split=(0.3, 0.4, 0.3)),
    "wrapped": streaming,
}


@pytest.fixture
def raises_keyboard_interrupt():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def is_free(turn):
    found = []
    other = threading.Thread(target=lambda: found.append(turn.acquire(blocking=False) and not turn.release()))
    other.start()
    other.join()
    return found == [True]


CALLS = {
    "step": lambda optimizer: optimizer.step(),
    "closure": lambda optimizer: optimizer.step(lambda: None),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "refresh_masters": lambda optimizer: optimizer.refresh_masters(),
    "add_param_group": lambda optimizer: optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones_like(optimizer.param_groups[0]["params"][0]))]}
    ),
}


def spread(bytecodes, places):
    """So many of the bytecodes."""
    return range(1, bytecodes, max(bytecodes // places, 1))


PLACES = pytest.mark.parametrize("places", [4, pytest.param(100, marks=pytest.mark.slow)])


@pytest.mark.parametrize("build", [hybrid, streaming])
@pytest.mark.parametrize("call", CALLS)
@PLACES
def test_gradient_mode_and_the_turn_come_back(device, build, call, places):
    model, _ = twins(device)
    (data,) = batches(device.torch_device, 1)

    def run(nth):
        model.zero_grad()
        with build(model) as optimizer:
            if call not in ("load_state_dict", "refresh_masters"):
                model(data).backward()
            reached = interrupted(
                nth,
                lambda: CALLS[call](optimizer),
                ("torch/autograd/grad_mode.py", "optimizers/step.py"),
                ("call", "__enter__", "__exit__", "__init__", "set_grad_enabled"),
            )
            computes = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            assert computes, nth
            assert is_free(optimizer._failures.turn), nth
        return reached

    bytecodes = run(0)
    assert bytecodes > 20
    for nth in spread(bytecodes, places):
        run(nth)


@pytest.mark.parametrize("infers", [False, True])
def test_the_mode_of_steps_is_left_again(infers):
    """Behind an interrupted call, and once its traceback is gone: this may hold torch's guard."""

    def run(nth):
        call = as_steps_run(lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        with torch.inference_mode(infers):
            found = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
            reached = interrupted(nth, lambda: modes.append(call()), ("optimizers/step.py", "grad_mode.py"))
            gc.collect()
            assert [torch.is_grad_enabled(), torch.is_inference_mode_enabled()] == found, nth
        return reached

    modes = []
    bytecodes = run(0)
    assert modes == [(False, False)]
    assert bytecodes > 20
    for nth in range(1, bytecodes + 1):
        run(nth)


def test_classes_of_tensors_go_on_to_answer(device):
    """Otherwise nobody in this thread waits for weights on their way, of any optimizer."""

    def run(nth):
        param = torch.nn.Parameter(torch.ones(2, device=device.torch_device))
        param.__class__ = AwaitedParameter
        reached = interrupted(
            nth, lambda: (param.shape, storage_of(param)), ("writes/awaited.py", "memory/absent.py")
        )
        answer = torch._C._is_torch_function_enabled()
        torch._C.DisableTorchFunctionSubclass().__exit__(None, None, None)
        assert answer, nth
        return reached

    bytecodes = run(0)
    assert bytecodes > 20
    for nth in range(1, bytecodes + 1):
        run(nth)


def opened(device, build):
    """A model, its loss, and the objects to close."""
    if build in BUILDS:
        model, (data,) = twins(device)[0], batches(device.torch_device, 1)
        optimizer = BUILDS[build](model)
        optimizer.attach(model)
        return model, lambda: model(data), optimizer, optimizer
    model, ids = decoder(device), ids_of(device, 1)[0]
    streamer = streamed(model, max_grad_norm=None, backward_overlap=build)
    return model, lambda: decoder_loss(model(ids), ids), streamer.optimizer, streamer


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


CLOSING = (
    *(
        "optimizers/hosted.py",
        "optimizers/hybrid.py",
        "optimizers/engine.py",
        "optimizers/step.py",
    ),
    *("trained_layers/optimizer.py", "trained_layers/in_backward.py", "trained_layers/streamer.py"),
    "torch/utils/hooks.py",
)


@pytest.mark.parametrize("build", [*BUILDS, "gradients", "update"])
@PLACES
def test_closing_again_finishes_what_an_interrupt_has_left(device, build, places):
    model, loss, optimizer, closes = opened(device, build)
    loss().backward()
    optimizer.step()
    bytecodes = interrupted(0, closes.close, CLOSING)
    new, reserved_bytes = weights(model), host_book.reserved_bytes
    threads = threading.active_count()
    assert bytecodes > 100
    for nth in spread(bytecodes, places):
        model, loss, optimizer, closes = opened(device, build)
        loss().backward()
        optimizer.step()
        interrupted(nth, closes.close, CLOSING)
        closes.close()
        assert all(map(torch.equal, weights(model), new)), nth
        assert optimizer.status == "closed"
        assert host_book.reserved_bytes == reserved_bytes, nth
        assert threading.active_count() == threads, nth
        assert not any(module._forward_pre_hooks for module in model.modules()), nth
        model.zero_grad()
        loss().backward()
        del model, loss, optimizer, closes
        gc.collect()


def with_frames_left(left, call):
    """Call where Python still has room for so many frames; return whether that was enough."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back

    def down(more):
        return call() if more <= 0 else down(more - 1)

    try:
        # Itself, `down` and its callees are frames, too.
        down(sys.getrecursionlimit() - depth - left - 1)
    except RecursionError:
        return False
    return True


@pytest.mark.parametrize("build", [*BUILDS, "gradients"])
def test_closing_with_too_little_room_for_calls_drops_no_step(device, build):
    """As in a library that closes its resources while it hands on a RecursionError."""
    model, loss, optimizer, closes = opened(device, build)
    loss().backward()
    optimizer.step()
    closes.close()
    new, enough = weights(model), []
    for left in range(3, 60, 4):
        model, loss, optimizer, closes = opened(device, build)
        loss().backward()
        optimizer.step()
        enough.append(with_frames_left(left, closes.close))
        closes.close()
        assert all(map(torch.equal, weights(model), new)), left
        assert optimizer.status == "closed"
    assert not enough[0]
    assert enough[-1]
