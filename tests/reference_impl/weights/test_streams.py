# SPDX-License-Identifier: Apache-2.0
"""Copies and kernels in each other's way: late copies, late kernels, other streams. The bits stay the same."""

import pytest
import torch
from lora_trainee import Trainee
from one_step import run_step

from reference_impl.device.cuda import CudaDevice
from reference_impl.verification.model import Decoder, DecoderShape, add_lora
from reference_impl.weights import FrozenLayerStreamer

pytestmark = pytest.mark.cuda
LONG = 20_000_000  # clock cycles, about ten milliseconds


@pytest.fixture
def trainee() -> Trainee:
    torch.manual_seed(0)
    model = Decoder(DecoderShape(hidden=256, ffn=704, layers=6)).cuda()
    add_lora(model, rank=4)
    return Trainee(model, torch.randint(512, (2, 64), device="cuda"))


def check_steps(trainee, expected, steps=3, **options):
    with FrozenLayerStreamer(trainee.model, **options):
        for _ in range(steps):
            assert trainee.step() == expected


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_copies_that_come_late(trainee, monkeypatch, prefetch):
    expected = trainee.step()
    copy_in = CudaDevice.copy_in

    def late(self, target, host, *, after):
        with self.on_h2d():
            torch.cuda._sleep(LONG)
        return copy_in(self, target, host, after=after)

    monkeypatch.setattr(CudaDevice, "copy_in", late)
    check_steps(trainee, expected, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_kernels_that_come_late(trainee, prefetch):
    """The host runs far ahead, so memory is handed on long before its last kernel has run."""

    def sleep(*_):
        torch.cuda._sleep(LONG)

    expected = trainee.step()
    for layer in trainee.layers:
        layer.qkv.register_forward_pre_hook(sleep)
        layer.down.register_full_backward_pre_hook(sleep)
    check_steps(trainee, expected, prefetch=prefetch)


def test_another_stream(trainee):
    expected = trainee.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check_steps(trainee, expected, prefetch=1)
    torch.cuda.current_stream().wait_stream(stream)


def test_a_new_stream_in_every_step(trainee):
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        for _ in range(4):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                assert trainee.step() == expected
            torch.cuda.current_stream().wait_stream(stream)


def test_staged_weights_that_come_late(trainee, monkeypatch):
    expected = trainee.step()
    copy_in = CudaDevice.copy_in

    def late(self, target, host, *, after):
        with self.on_h2d():
            torch.cuda._sleep(LONG)
        return copy_in(self, target, host, after=after)

    monkeypatch.setattr(CudaDevice, "copy_in", late)
    limit = 3 * trainee.layer_bytes
    check_steps(trainee, expected, prefetch=1, host_limit_bytes=limit)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_loss_beside_a_blocks_output_waits_for_its_copy(trainee, monkeypatch, prefetch):
    """Backward enters in the middle of a block whose weights may be on their way."""
    seen = []
    trainee.layers[3].gate.register_forward_hook(lambda _, __, output: seen.append(output))

    def loss():
        seen.clear()
        trainee.loss()
        return seen[0].square().mean()

    expected = run_step(trainee.model, loss)
    copy_in = CudaDevice.copy_in

    def late(self, target, host, *, after):
        with self.on_h2d():
            torch.cuda._sleep(LONG)
        return copy_in(self, target, host, after=after)

    monkeypatch.setattr(CudaDevice, "copy_in", late)
    with FrozenLayerStreamer(trainee.model, prefetch=prefetch):
        for _ in range(3):
            assert run_step(trainee.model, loss) == expected


def test_nothing_is_copied_back(trainee):
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        trainee.step()
        trainee.model.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            trainee.loss().backward()
            torch.cuda.synchronize()
    copied = [event.name for event in profiler.events() if "Memcpy" in event.name]
    assert any("HtoD" in name for name in copied)
    assert not any("DtoH" in name for name in copied)


def test_peak_memory_on_the_allocator(trainee):
    def peak():
        torch.cuda.reset_peak_memory_stats()
        trainee.step()
        return torch.cuda.max_memory_allocated()

    trainee.step()
    resident = peak()
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        trainee.step()
        streamed = peak()
    assert resident - streamed == pytest.approx(4 * trainee.layer_bytes, rel=0.02)
