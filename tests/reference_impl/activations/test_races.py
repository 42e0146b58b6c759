# SPDX-License-Identifier: Apache-2.0
"""Copies against computation on CUDA, with the windows for races widened by sleeps."""

import random

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss

pytestmark = pytest.mark.cuda
CYCLES = 2_000_000  # about a millisecond


class Wide(nn.Module):
    """Little computation for many bytes: copies are always behind."""

    def __init__(self, width=32768):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 32)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Wide().cuda()


@pytest.fixture
def batches():
    return [torch.randn(64, 32, device="cuda") for _ in range(8)]


def gradients(model, batch):
    model.zero_grad()
    model(batch).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def references(model, batches):
    expected = [gradients(model, batch) for batch in batches]
    torch.cuda.synchronize()
    return expected


def assert_equal(got, expected):
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def sleeping(stream=None):
    with torch.cuda.stream(stream) if stream is not None else torch.cuda.stream(torch.cuda.current_stream()):
        torch.cuda._sleep(random.randrange(CYCLES))


@pytest.mark.parametrize("where", ["D2H stream", "H2D stream", "compute stream", "all"])
@pytest.mark.parametrize("in_flight_bytes", [0, 2**26])
def test_sleeps_change_nothing(model, batches, where, in_flight_bytes):
    random.seed(0)
    expected = references(model, batches)
    with ActivationOffloader(model, min_bytes=1024, in_flight_bytes=in_flight_bytes) as offloader:
        streams = {
            "D2H stream": [offloader.device.d2h],
            "H2D stream": [offloader.device.h2d],
            "compute stream": [None],
            "all": [offloader.device.d2h, offloader.device.h2d, None],
        }[where]

        def sleep(*_):
            for stream in streams:
                sleeping(stream)

        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(sleep)
                module.register_full_backward_pre_hook(sleep)
        for _ in range(6):
            for batch, wanted in zip(batches, expected, strict=True):
                assert_equal(gradients(model, batch), wanted)


def test_two_hundred_steps_with_random_sleeps(model, batches):
    random.seed(1)
    expected = references(model, batches)
    with ActivationOffloader(model, min_bytes=1024, in_flight_bytes=2**22) as offloader:
        for index in range(200):
            sleeping(random.choice([offloader.device.d2h, offloader.device.h2d, None]))
            which = index % len(batches)
            assert_equal(gradients(model, batches[which]), expected[which])


def test_memory_that_is_used_again_at_once_does_not_reach_the_copies(model, batches):
    """The code behind the layer overwrites freed memory while copies still sleep."""
    expected = references(model, batches)
    with ActivationOffloader(model, min_bytes=1024) as offloader:
        for batch, wanted in zip(batches, expected, strict=True):
            model.zero_grad()
            sleeping(offloader.device.d2h)
            loss = model(batch).square().mean()
            for _ in range(8):
                torch.full((64, 32768), float("nan"), device="cuda")
            sleeping(offloader.device.h2d)
            loss.backward()
            for _ in range(8):
                torch.full((64, 32768), float("nan"), device="cuda")
            assert_equal([p.grad.clone() for p in model.parameters()], wanted)


def test_work_on_a_stream_that_is_not_the_default(model, batches):
    expected = references(model, batches)
    side = torch.cuda.Stream()
    with ActivationOffloader(model, min_bytes=1024):
        for batch, wanted in zip(batches, expected, strict=True):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                got = gradients(model, batch)
            torch.cuda.current_stream().wait_stream(side)
            assert_equal(got, wanted)


def test_another_stream_for_each_forward(model, batches):
    expected = references(model, batches)
    streams = [torch.cuda.Stream() for _ in range(3)]
    with ActivationOffloader(model, min_bytes=1024):
        for index, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
            stream = streams[index % 3]
            torch.cuda.synchronize()
            model.zero_grad()
            with torch.cuda.stream(stream):
                sleeping(stream)
                loss = model(batch).square().mean()
            torch.cuda.current_stream().wait_stream(stream)
            loss.backward()
            torch.cuda.synchronize()
            assert_equal([p.grad.clone() for p in model.parameters()], wanted)


class OnThirdStream(torch.autograd.Function):
    """Runs its backward on a stream of its own."""

    stream = None

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        stream = OnThirdStream.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x, weight = ctx.saved_tensors
            sleeping(stream)
            results = gradient * weight, (gradient * x).sum(0)
        torch.cuda.current_stream().wait_stream(stream)
        return results


def test_a_backward_on_a_third_stream(batches):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4096))

        def forward(self, x):
            return OnThirdStream.apply(x.tanh(), self.weight)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Scaled() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    OnThirdStream.stream = torch.cuda.Stream()
    model = Model().cuda()
    batches = [torch.randn(256, 4096, device="cuda") for _ in range(4)]
    expected = references(model, batches)
    with ActivationOffloader(model, min_bytes=1024):
        for _ in range(10):
            for batch, wanted in zip(batches, expected, strict=True):
                assert_equal(gradients(model, batch), wanted)


def test_checkpointed_inputs_with_sleeps(model, batches):
    random.seed(2)
    expected = references(model, batches)
    with CheckpointOffloader(model, min_bytes=1024) as offloader:
        for _ in range(5):
            for batch, wanted in zip(batches, expected, strict=True):
                sleeping(random.choice([offloader.device.d2h, offloader.device.h2d]))
                assert_equal(gradients(model, batch), wanted)


def test_host_blocks_are_pinned(model, batches):
    with ActivationOffloader(model, min_bytes=1024) as offloader:
        gradients(model, batches[0])
        block = offloader.arena.allocate(2**20)
        assert block.view(torch.uint8, (2**20,)).is_pinned()
        offloader.arena.free(block)


def test_copies_run_beside_computation():
    """Where the computation is long enough, at least four fifths of the copying is hidden behind it."""
    torch.manual_seed(0)
    shape = DecoderShape(hidden=2048, ffn=4096, layers=6, heads=16, vocab=512)
    model = Decoder(shape).to(device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(512, (1, 16384), device="cuda")
    with CheckpointOffloader(model):
        for _ in range(3):
            decoder_loss(model(ids), ids).backward()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            decoder_loss(model(ids), ids).backward()
            torch.cuda.synchronize()
    kernels, copies = [], []
    for event in profiler.events():
        span = (event.time_range.start, event.time_range.end)
        if "Memcpy DtoH" in event.name or "Memcpy HtoD" in event.name:
            if event.time_range.elapsed_us() > 100:
                copies.append(span)
        elif "Memcpy" not in event.name and "Memset" not in event.name:
            kernels.append(span)
    assert copies
    hidden = sum(
        max(0, min(stop, end) - max(start, begin)) for start, stop in copies for begin, end in kernels
    )
    assert hidden >= 0.8 * sum(stop - start for start, stop in copies)
