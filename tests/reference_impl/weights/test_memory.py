# SPDX-License-Identifier: Apache-2.0
"""Where the bytes are: really freed, never copied back, fetched no more often than needed."""

import gc
import math
import threading

import pytest
import torch
from lora_trainee import Trainee
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl import limit_pinned_memory
from reference_impl.memory.ledger import Ledger
from reference_impl.memory.staged import Ring
from reference_impl.verification.model import Decoder, DecoderShape, add_lora
from reference_impl.weights import FrozenLayerStreamer


def all_tensors(model):
    return (*model.parameters(), *model.buffers())


def peak_bytes(trainee, device, **options):
    """The peak of a second step, with gradients there already."""
    # An earlier test's reference cycles must not be collected in the middle of this.
    gc.collect()
    with (
        FrozenLayerStreamer(trainee.model, **options) as streamer,
        Ledger(device, track=all_tensors(trainee.model)) as ledger,
    ):
        trainee.step()
        ledger.reset_peak()
        trainee.step()
        return ledger.peak_device_bytes, streamer.report


@pytest.mark.parametrize(
    ("prefetch", "resident_layers"),
    [
        (2, 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(0, 0), (1, 0), (2, 0), (0, 3), (1, 3)]),
    ],
)
def test_the_peak_falls_by_what_is_not_in_the_window(trainee, device, prefetch, resident_layers):
    resident, _ = peak_bytes(trainee, device, resident_layers=6)
    streamed, report = peak_bytes(trainee, device, resident_layers=resident_layers, prefetch=prefetch)
    saved = report.streamed_bytes - report.window_bytes
    assert saved >= (6 - resident_layers - 1 - prefetch) * trainee.layer_bytes
    assert resident - streamed == pytest.approx(saved, abs=trainee.layer_bytes / 10)


def test_weights_are_freed_although_autograd_saved_views_of_them(trainee):
    with FrozenLayerStreamer(trainee.model, prefetch=0):
        loss = trainee.loss()
        alive = [layer.qkv.base.weight.untyped_storage().nbytes() > 0 for layer in trainee.layers]
        assert alive == [False] * 5 + [True]
        loss.backward()
        alive = [layer.qkv.base.weight.untyped_storage().nbytes() > 0 for layer in trainee.layers]
        assert alive == [True] + [False] * 5


def test_weights_are_freed_under_checkpointing_too(trainee, device):
    """Each backward block is recomputed first; the window bounds both its forward and its backward."""
    layers = trainee.layers
    for layer in layers:
        forward = layer.forward
        layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    trainee.model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    resident, _ = peak_bytes(trainee, device, resident_layers=6)
    streamed, report = peak_bytes(trainee, device, prefetch=1)
    saved = report.streamed_bytes - report.window_bytes
    assert saved >= 4 * trainee.layer_bytes
    assert resident - streamed == pytest.approx(saved, abs=trainee.layer_bytes / 10)


def test_what_trains_stays_where_it_is(trainee, device):
    trained = {name: p for name, p in trainee.model.named_parameters() if p.requires_grad}
    before = {name: p.data_ptr() for name, p in trained.items()}
    with FrozenLayerStreamer(trainee.model, prefetch=0):
        trainee.step()
        assert {name: p.data_ptr() for name, p in trained.items()} == before
        assert all(p.device == device.torch_device and p.grad is not None for p in trained.values())


@pytest.mark.cuda
def test_what_copies_read_is_pinned(trainee, device, monkeypatch):
    if not device.pins_host_memory:
        pytest.skip("the CPU twin does not pin")
    sources, copy_in = [], type(device).copy_in

    def watched(self, target, host, *, after):
        sources.append((host.data_ptr(), host.is_pinned()))
        return copy_in(self, target, host, after=after)

    monkeypatch.setattr(type(device), "copy_in", watched)
    for limit in (None, 3 * trainee.layer_bytes):
        sources.clear()
        with FrozenLayerStreamer(trainee.model, prefetch=1, host_limit_bytes=limit):
            trainee.step()
        # A block that is pinned has memory of its own; the others pass through two buffers.
        assert len({place for place, _ in sources}) == (6 if limit is None else 1 + 2)
        assert all(is_pinned for _, is_pinned in sources)


def test_nothing_is_ever_copied_back(trainee, device, monkeypatch):
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        monkeypatch.setattr(type(device), "copy_out", None)
        trainee.step()
        trainee.step()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_both_turns_keep_what_is_there(trainee, prefetch):
    with FrozenLayerStreamer(trainee.model, prefetch=prefetch) as streamer:
        trainee.step()
        before = streamer.report
        for _ in range(3):
            trainee.step()
        after = streamer.report
    assert after.loads - before.loads == 3 * 2 * (6 - (prefetch + 1))
    assert (
        after.loaded_bytes - before.loaded_bytes == (after.loads - before.loads) * after.streamed_bytes // 6
    )
    if prefetch:
        assert after.late_loads == before.late_loads


def test_a_budget_holds_what_it_says(trainee, device):
    everything = 6 * trainee.layer_bytes
    for budget in (3 * trainee.layer_bytes, 4 * trainee.layer_bytes, everything):
        with FrozenLayerStreamer(trainee.model, budget_bytes=budget, prefetch=1) as streamer:
            report = streamer.report
            assert report.resident_bytes + report.window_bytes <= budget
            assert report.resident_bytes + report.streamed_bytes == everything
            assert report.resident_bytes + report.window_bytes > budget - trainee.layer_bytes


def test_weights_come_from_the_host_and_return_to_it(trainee, device):
    expected = trainee.step()
    trainee.layers.cpu()
    with FrozenLayerStreamer(trainee.model, device=device.torch_device):
        assert trainee.step() == expected
    assert trainee.layers[0].qkv.base.weight.device.type == "cpu"
    trainee.model.to(device.torch_device)
    assert trainee.step() == expected


class Recurrent(nn.Linear):
    """A linear layer that uses its weight under two names."""

    def __init__(self):
        super().__init__(64, 64)
        self.again = self.weight

    def forward(self, x):
        return super().forward(x) + x @ self.again


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Recurrent() if index == 1 else nn.Linear(64, 64) for index in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.head = nn.Linear(64, 64)
        self.head.weight = self.layers[3].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_tied_weights_are_handled_once(device):
    model = Tied().to(device.torch_device).requires_grad_(False)
    x = torch.randn(2, 64, device=device.torch_device, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    with FrozenLayerStreamer(model, prefetch=0) as streamer:
        assert streamer.report.streamed_bytes == model.layers[1].weight.nbytes
        assert model.layers[1].again is model.layers[1].weight
        assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], expected)
    assert model.layers[2].weight is model.layers[0].weight
    assert model.head.weight is model.layers[3].weight


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_weight_that_two_modules_of_a_block_hold_is_placed_once(trainee, prefetch):
    trainee.layers[1].up.base.weight = trainee.layers[1].gate.base.weight
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=prefetch):
        assert trainee.step() == expected


def test_packed_weights_stream_as_they_are(device):
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed = nn.Parameter(torch.randint(255, (128, 128), dtype=torch.uint8), requires_grad=False)
            self.register_buffer("scale", torch.rand(128, 64))

        def forward(self, x):
            low, high = (self.packed & 15).float(), (self.packed >> 4).float()
            return x @ ((low + high) * self.scale.repeat(1, 2) / 512)

    model = nn.ModuleList(Quantised() for _ in range(4)).to(device.torch_device)
    x = torch.randn(2, 128, device=device.torch_device, requires_grad=True)

    def gradient():
        y = x
        for layer in model:
            y = layer(y).tanh()
        return torch.autograd.grad(y.sum(), x)[0]

    expected = gradient()
    with FrozenLayerStreamer(model, prefetch=0) as streamer:
        assert streamer.report.streamed_bytes == 4 * (128 * 128 + 128 * 64 * 4)
        for _ in range(2):
            assert torch.equal(gradient(), expected)


@pytest.mark.slow
def test_nothing_grows_over_many_steps(trainee, device):
    with (
        FrozenLayerStreamer(trainee.model, prefetch=1),
        Ledger(device, track=all_tensors(trainee.model)) as ledger,
    ):
        trainee.step()
        gc.collect()
        before = ledger.device_bytes
        for _ in range(20):
            trainee.step()
        gc.collect()
        assert ledger.device_bytes == before


@pytest.mark.parametrize("pinned_layers", [2, 4, 5])
def test_what_exceeds_the_pinned_limit_streams_all_the_same(trainee, pinned_layers):
    expected = trainee.step()
    limit = pinned_layers * trainee.layer_bytes
    with FrozenLayerStreamer(trainee.model, prefetch=1, host_limit_bytes=limit) as streamer:
        for _ in range(3):
            assert trainee.step() == expected
        assert limit - trainee.layer_bytes < streamer.report.pinned_bytes <= limit
        assert streamer.report.streamed_bytes == 6 * trainee.layer_bytes
    assert trainee.step() == expected


def test_weights_in_mapped_files(trainee, device, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    expected = trainee.step()
    safetensors.save_file(trainee.model.state_dict(), tmp_path / "model.safetensors")
    trainee.model.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), assign=True)
    for name, parameter in trainee.model.named_parameters():
        parameter.requires_grad_(name.endswith((".a", ".b")))
    mapped = trainee.layers[3].up.base.weight.data_ptr()
    limit = 2 * trainee.layer_bytes
    with FrozenLayerStreamer(trainee.model, device=device.torch_device, host_limit_bytes=limit):
        for _ in range(3):
            assert trainee.step() == expected
    assert trainee.layers[3].up.base.weight.data_ptr() == mapped


def test_a_file_that_cannot_be_read_is_no_silent_zero(trainee, device, monkeypatch):
    copy_in = type(device).copy_in

    def fail(*args, **options):
        if threading.current_thread().name.startswith("frozen-weights"):
            raise OSError("planted")
        return copy_in(*args, **options)

    with FrozenLayerStreamer(trainee.model, host_limit_bytes=2 * trainee.layer_bytes):
        trainee.step()
        monkeypatch.setattr(type(device), "copy_in", fail)
        with pytest.raises(OSError, match="planted"):
            trainee.step()
        monkeypatch.undo()


def test_under_a_limit_what_is_left_beside_whole_layers_pins_a_part_of_one(device, monkeypatch):
    """Fewer bytes pass through the ring by that; bitwise the results without a streamer."""
    shape = DecoderShape(hidden=512, ffn=1024, layers=6)
    model = Decoder(shape).to(device.torch_device)
    add_lora(model, rank=4)
    trainee = Trainee(model, torch.randint(512, (2, 32), device=device.torch_device))
    expected = trainee.step()
    through_ring = []
    copy_in = Ring.copy_in

    def counted(self, target, host):
        through_ring.append(host.nbytes)
        return copy_in(self, target, host)

    monkeypatch.setattr(Ring, "copy_in", counted)
    # Beside the ring, a quarter of it, nearly three layers.
    limit = math.ceil(2.9 * trainee.layer_bytes * 4 / 3)
    with limit_pinned_memory(limit), FrozenLayerStreamer(trainee.model, prefetch=0) as streamer:
        assert trainee.step() == expected
        assert 2.1 * trainee.layer_bytes < streamer.report.pinned_bytes <= 3 * limit / 4
        through_ring.clear()
        assert trainee.step() == expected
        # Of the layers between the first and the last, which a step copies once, two are pinned and a part of a third.
        assert sum(size < trainee.layer_bytes for size in through_ring) == 2
        assert len(through_ring) == 2 * 2 + 2
