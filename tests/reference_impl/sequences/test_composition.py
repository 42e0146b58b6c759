# SPDX-License-Identifier: Apache-2.0
"""Tiles beside every mechanism that moves a layer's tensors: bitwise the results of tiles alone."""

import pytest
import torch
from long_decoder import TILED, LongDecoder
from optimizer_reference import MasterAdamW
from torch import nn

from reference_impl import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    HybridDeviceOptimizer,
    TrainableLayerStreamer,
)
from reference_impl.memory.ledger import Ledger
from reference_impl.sequences import SequenceTiles
from reference_impl.trained_layers.segments import recompute_in_slices, sum_in_fp32
from reference_impl.verification.model import LoraLinear, decoder_loss

TOKENS, TILE = 160, 64
ADAMW = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def decoder(device, *, dtype=torch.bfloat16, lora=False, **sizes):
    torch.manual_seed(0)
    model = LongDecoder(**{"hidden": 64, "ffn": 192, **sizes}).to(device.torch_device, dtype)
    if lora:
        model.requires_grad_(False)
        for layer in model.layers:
            layer.mlp.up = LoraLinear(layer.mlp.up, 4)
            layer.attention.q = LoraLinear(layer.attention.q, 4)
        model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    return model


def batches(device, count=3, sequences=2):
    generator = torch.Generator().manual_seed(1)
    shape = (count, sequences, TOKENS)
    return list(torch.randint(64, shape, generator=generator).to(device.torch_device))


def gradients(model, ids):
    """Return the loss and the gradients of one batch."""
    model.zero_grad()
    loss = decoder_loss(model(ids), ids)
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


OFFLOADERS = {
    "checkpoint": lambda model: CheckpointOffloader(model, min_bytes=1),
    "attention kept": lambda model: CheckpointOffloader(model, keep_attention=True, min_bytes=1),
    "products kept": lambda model: CheckpointOffloader(model, keep=["mlp.up", "attention.q"], min_bytes=1),
    "activations": lambda model: ActivationOffloader(model, min_bytes=1),
    "activations and weights": lambda model: ActivationOffloader(model, weights=True, min_bytes=1),
}


@pytest.mark.parametrize("name", OFFLOADERS)
@pytest.mark.parametrize("comes", ["before", pytest.param("after", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "lora"])
def test_activation_offloaders(device, name, comes, lora):
    """Whichever is attached first; several steps, since only the first tries the modules."""
    ids = batches(device)
    model = decoder(device, lora=lora)
    with SequenceTiles(model, TILED, tile_tokens=TILE):
        expected = [gradients(model, each) for each in ids]
    attach = [lambda: SequenceTiles(model, TILED, tile_tokens=TILE), lambda: OFFLOADERS[name](model)]
    if comes == "after":
        attach.reverse()
    with attach[0](), attach[1]() as offloader:
        for each, wanted in zip(ids, expected, strict=True):
            assert same(gradients(model, each), wanted)
        offloader = offloader if comes == "before" else None
        assert offloader is None or offloader.offloaded_bytes > 0


def test_a_budget(device):
    """It profiles a step in tiles, and keeps, offloads or recomputes its saved tensors."""
    ids = batches(device, 4)
    model = decoder(device)
    with SequenceTiles(model, TILED, tile_tokens=TILE):
        expected = [gradients(model, each) for each in ids]
        with (
            Ledger(device, track=model.parameters()),
            ActivationOffloader(model, budget_bytes="least", min_bytes=1),
        ):
            assert all(
                same(gradients(model, each), wanted) for each, wanted in zip(ids, expected, strict=True)
            )


def test_the_last_module_of_a_layer_is_computed_twice_and_not_three_times(device):
    """A recomputed layer needs only its inputs for backward."""
    model = decoder(device)
    tiles = []
    model.layers[1].mlp.gate.register_forward_hook(lambda *_: tiles.append(1))
    (ids,) = batches(device, 1)
    with SequenceTiles(model, TILED, tile_tokens=TILE), CheckpointOffloader(model, min_bytes=1):
        gradients(model, ids)
        tiles.clear()
        gradients(model, ids)
    assert len(tiles) == 2 * -(-TOKENS // TILE)


def test_frozen_layers_that_stream(device):
    ids = batches(device)
    model = decoder(device, lora=True)
    with SequenceTiles(model, TILED, tile_tokens=TILE):
        expected = [gradients(model, each) for each in ids]
        with FrozenLayerStreamer(model) as streamer:
            assert all(
                same(gradients(model, each), wanted) for each, wanted in zip(ids, expected, strict=True)
            )
            assert streamer.report.loaded_bytes > 0
        with FrozenLayerStreamer(model), CheckpointOffloader(model, keep_attention=True, min_bytes=1):
            assert all(
                same(gradients(model, each), wanted) for each, wanted in zip(ids, expected, strict=True)
            )


def train(model, optimizer, ids):
    losses = []
    for each in ids:
        loss = decoder_loss(model(each), each)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("slices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"inputs": "host"},
        {"inputs": "host", "keep_attention": True},
        {"backward_overlap": "update", "max_grad_norm": None},
    ],
    ids=["device", "host", "attention", "update"],
)
def test_trained_layers_that_stream(device, options, slices):
    """Weights, and losses; slices of the batch and tiles of the sequence add up in fp32 together."""
    options = {"max_grad_norm": 0.5, **options}
    ids = batches(device, 4)
    model, other = decoder(device), decoder(device)
    for layer in other.layers:
        recompute_in_slices(layer, slices)
        if slices > 1:
            sum_in_fp32(layer.parameters())
    reference = MasterAdamW(other, on_cpu=False, max_grad_norm=options["max_grad_norm"], **ADAMW)
    with SequenceTiles(other, TILED, tile_tokens=TILE):
        expected = train(other, reference, ids)
    wrapped = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    with (
        SequenceTiles(model, TILED, tile_tokens=TILE),
        TrainableLayerStreamer(model, wrapped, slices=slices, **options) as streamer,
    ):
        assert train(model, streamer.optimizer, ids) == expected
        streamer.optimizer.synchronize()
        weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    for name, weight in other.state_dict().items():
        assert torch.equal(weights[name], weight.cpu()), name


def test_an_optimizer_is_untouched_by_a_lack_of_memory_in_a_tile(device):
    """And trains on to the bit where the batch is tried again."""
    ids = batches(device, 3)
    losses = []
    for fails in (False, True):
        model = decoder(device)
        optimizer = HybridDeviceOptimizer(model.parameters(), **ADAMW)
        with optimizer, SequenceTiles(model, TILED, tile_tokens=TILE):
            found = train(model, optimizer, ids[:1])
            if fails:
                hook = model.layers[1].mlp.up.register_forward_hook(_lacks_memory_in_backward())
                with pytest.raises(torch.OutOfMemoryError):
                    train(model, optimizer, ids[1:2])
                hook.remove()
                assert optimizer.status == "untouched"
                optimizer.zero_grad()
            losses.append(found + train(model, optimizer, ids[1:]))
    assert losses[0] == losses[1]


def _lacks_memory_in_backward():
    def hook(*_):
        if torch._C._current_graph_task_id() != -1:
            raise torch.OutOfMemoryError("no more")

    return hook


def test_packed_sequences_and_accumulation(device):
    """Several sequences in one row, and gradients of two batches: as without tiles, up to rounding in fp64."""
    model = decoder(device, dtype=torch.float64)
    ids = torch.cat(batches(device, 2, sequences=1), dim=1)

    def accumulated():
        model.zero_grad()
        for each in (ids, ids.flip(1)):
            decoder_loss(model(each), each).backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = accumulated()
    with SequenceTiles(model, TILED, tile_tokens=TILE):
        found = accumulated()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_a_loss_curve_on_top_of_the_other(device, dtype):
    """Twenty steps with and without tiles: in fp64 the same, in bf16 within a rounding of a loss near 4."""
    curves = []
    for in_tiles in (False, True):
        model = decoder(device, dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tiles = SequenceTiles(model, TILED, tile_tokens=TILE) if in_tiles else nn.Identity()
        curves.append(train(model, optimizer, batches(device, 1) * 20))
        if in_tiles:
            tiles.close()
    bound = 1e-9 if dtype == torch.float64 else 4 * 2**-8
    assert curves[0][-1] < curves[0][0] - 0.1
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < bound


def test_with_attention_kept_the_peak_is_attentions(device):
    """Tiles and kept attention together: less than half of the bytes of recomputed whole layers."""
    model = decoder(device, dtype=torch.float32, ffn=1024, layers=2)
    (ids,) = batches(device, 1, sequences=1)
    ids = ids.repeat(1, 8)

    def peak():
        gradients(model, ids)
        with Ledger(device, track=[ids, *model.parameters()]) as ledger:
            model.zero_grad()
            before = ledger.device_bytes
            hidden = model.layers[1](model.layers[0](model.embedding(ids)))
            hidden.sum().backward()
            return ledger.peak_device_bytes - before

    with CheckpointOffloader(model, keep_attention=True, min_bytes=1):
        whole = peak()
        with SequenceTiles(model, TILED, tile_tokens=64):
            assert peak() < whole / 2
