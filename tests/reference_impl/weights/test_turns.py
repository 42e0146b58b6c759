# SPDX-License-Identifier: Apache-2.0
"""A second thread that runs the model through streamed layers waits for its turn, and finds the weights there."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interrupts import counted
from layers_trainee import batches, decoder

from reference_impl import FrozenLayerStreamer, TrainableLayerStreamer
from reference_impl.device import Device
from reference_impl.verification.model import decoder_loss
from reference_impl.weights.turns import Turns

WAYS = ("frozen", "gradients", "update")
# The test's limit for a thread that does not go on.
MOST_S = 60.0


@contextmanager
def streamed(model: torch.nn.Module, way: str, lr: float) -> Iterator[Any]:
    """Yield the optimizer of streamed layers."""
    if way == "frozen":
        for layer in model.layers:
            layer.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    plain = torch.optim.AdamW(trained, fused=True, lr=lr, weight_decay=0.0)
    if way == "frozen":
        with FrozenLayerStreamer(model):
            yield plain
    else:
        with TrainableLayerStreamer(model, plain, max_grad_norm=None, backward_overlap=way) as streamer:
            yield streamer.optimizer


@contextmanager
def reading(read: Callable[[], torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Read in another thread, over and over, and at least three times; raise the thread's exception."""
    found: list[torch.Tensor] = []
    raised: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            while not over.is_set() or len(found) < 3:
                found.append(read())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(MOST_S)
    assert not thread.is_alive(), "the reader hangs"
    assert not raised, raised


def losses(model: torch.nn.Module, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
    found = []
    for ids in data:
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_second_thread_finds_the_weights_of_the_model(device: Device, way: str) -> None:
    """With a rate of zero all readings are those of the plain model."""
    model, data = decoder(device), batches(device, 4)
    with torch.no_grad():
        expected = model(data[0])

    @torch.no_grad()
    def read() -> torch.Tensor:
        return model(data[0])

    with streamed(model, way, 0.0) as optimizer, reading(read) as found:
        losses(model, optimizer, data)
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("way", WAYS)
def test_training_beside_a_second_thread_is_the_same_to_the_bit(device: Device, way: str) -> None:
    model, data = decoder(device), batches(device, 4)
    with streamed(model, way, 1e-2) as optimizer:
        expected = losses(model, optimizer, data)
    model = decoder(device)

    @torch.no_grad()
    def read() -> torch.Tensor:
        return model(data[0])

    with streamed(model, way, 1e-2) as optimizer, reading(read) as found:
        assert losses(model, optimizer, data) == expected
    assert all(each.isfinite().all() for each in found)


class Stopped(BaseException):
    """As KeyboardInterrupt, behind which torch calls no forward hook."""


def stop(*_: Any) -> None:
    raise Stopped


@pytest.mark.parametrize("fails", ["backward", "forward"])
def test_a_turn_that_has_failed_comes_back(device: Device, fails: str) -> None:
    """A failed backward is dropped with all that waits for its end; an interrupted thread has ended."""
    model, ids = decoder(device), batches(device, 1)[0]
    with streamed(model, "frozen", 0.0):
        inside = next(model.layers[1].children())
        register = inside.register_forward_hook if fails == "forward" else inside.register_full_backward_hook
        hook = register(stop)

        def fail() -> None:
            with pytest.raises(Stopped):
                decoder_loss(model(ids), ids).backward()

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join(MOST_S)
        hook.remove()
        with reading(lambda: model(ids).detach()) as found:
            pass
        assert len(found) >= 3


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_backward_gives_its_turn_back_while_its_error_is_kept() -> None:
    """An error keeps its frames, and whatever these hold, as long as somebody keeps it: a notebook its last one."""
    model, ids = decoder(Device.of("cpu")), batches(Device.of("cpu"), 1)[0]
    kept: list[KeyboardInterrupt] = []
    for layer in model.layers:
        layer.requires_grad_(False)
    with FrozenLayerStreamer(model) as streamer:
        turns = streamer._turns
        for nth in itertools.count(1):
            loss = decoder_loss(model(ids), ids)
            try:
                with counted(nth, interrupt, of=lambda path: path.endswith("weights/turns.py")):
                    loss.backward()
            except KeyboardInterrupt as error:
                kept.append(error)
            assert not turns._is_in_backward(), f"interrupted before bytecode {nth}"
            if len(kept) < nth:
                break
    assert len(kept) > 50


def test_an_interrupted_forward_gives_its_turn_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread would wait for it, as long as the interrupted one runs no other."""
    model, ids = decoder(device), batches(device, 1)[0]
    with streamed(model, "frozen", 0.0):
        monkeypatch.setattr(Turns, "_hand_over", stop)
        with pytest.raises(Stopped):
            model(ids)
        monkeypatch.undo()
        with reading(lambda: model(ids).detach()) as found:
            pass
        assert len(found) >= 3
