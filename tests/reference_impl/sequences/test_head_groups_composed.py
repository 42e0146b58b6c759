# SPDX-License-Identifier: Apache-2.0
"""`HeadGroups` beside offloaded activations, layers that stream and slices of the batch."""

import pytest
import torch
from for_each import for_each
from grouped_attention import HEADS, HIDDEN, KV_HEADS, SHORT, TOKENS, Adapted, Grouped, Holder
from long_decoder import TILED, LongDecoder

from reference_impl import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    HeadGroups,
    SequenceTiles,
    TrainableLayerStreamer,
)
from reference_impl.device import Device
from reference_impl.verification.model import decoder_loss

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def decoder(device, *, dtype=torch.bfloat16, ffn=96, kv_heads=KV_HEADS):
    torch.manual_seed(0)
    model = LongDecoder(hidden=HIDDEN, ffn=ffn, layers=2).to(dtype)
    for layer in model.layers:
        layer.attention = Holder(Grouped(kv_heads=kv_heads).to(dtype))
    return model.to(device.torch_device)


def step(model, device, optimizer=None):
    ids = torch.randint(64, (2, TOKENS), generator=torch.Generator().manual_seed(1)).to(device.torch_device)
    model.zero_grad()
    loss = decoder_loss(model(ids), ids)
    loss.backward()
    if optimizer is None:
        return [
            loss.detach(),
            *(param.grad.clone() for param in model.parameters() if param.grad is not None),
        ]
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach()]


OFFLOADERS = {
    "checkpoint": lambda model: CheckpointOffloader(model, min_bytes=1),
    "attention kept": lambda model: CheckpointOffloader(model, keep_attention=True, min_bytes=1),
    "attention and products kept": lambda model: CheckpointOffloader(
        model, keep_attention=True, keep=["q_proj", "mlp.up"], min_bytes=1
    ),
    "activations": lambda model: ActivationOffloader(model, min_bytes=1),
    "activations and weights": lambda model: ActivationOffloader(model, weights=True, min_bytes=1),
}


@for_each(OFFLOADERS)
def test_beside_activation_offloaders(name):
    """Bitwise the results of groups alone, in tiles too; attention is found, and its norms are tiled in forward
    alone."""
    device = Device.available()
    model = decoder(device)
    with HeadGroups(model, longer_than=SHORT), SequenceTiles(model, TILED, tile_tokens=SHORT):
        expected = step(model, device)
        with OFFLOADERS[name](model) as offloader:
            for _ in range(2):
                assert all(map(torch.equal, step(model, device), expected))
            assert offloader.offloaded_bytes > 0


def test_what_is_before_kept_attention_is_not_computed_again(device):
    """Queries are made in forward, and of each group in backward."""
    model, calls = decoder(device), []
    for layer in model.layers:
        layer.attention.inner.q_proj.register_forward_hook(lambda *_: calls.append(1))
    with (
        HeadGroups(model, groups=2, longer_than=SHORT),
        CheckpointOffloader(model, keep_attention=True, min_bytes=1),
    ):
        step(model, device)
        calls.clear()
        step(model, device)
    assert len(calls) == 2 * (1 + 2)


@for_each(
    [{}, {"inputs": "host"}, {"inputs": "host", "keep_attention": True}, {"backward_overlap": "update"}]
)
def test_beside_layers_that_stream(options):
    """Losses of three steps, to the bit those of the same layers in groups without streaming."""
    device = Device.available()
    losses = []
    for streams in (False, True):
        model = decoder(device)
        wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        given = {} if streams else {"resident_layers": 2}
        with (
            HeadGroups(model, longer_than=SHORT) as groups,
            TrainableLayerStreamer(model, wrapped, **options, **given) as streamer,
        ):
            losses.append([step(model, device, streamer.optimizer)[0] for _ in range(3)])
            assert groups.modules_in_groups == 2
    assert losses[0] == losses[1]


def test_beside_frozen_layers_that_stream(device):
    model = decoder(device, ffn=192)
    for layer in model.layers:
        layer.requires_grad_(False)
        layer.attention.inner.q_proj = Adapted(layer.attention.inner.q_proj).to(
            device.torch_device, torch.bfloat16
        )
    with HeadGroups(model, longer_than=SHORT):
        expected = step(model, device)
        with FrozenLayerStreamer(model):
            assert all(map(torch.equal, step(model, device), expected))


def test_slices_of_the_batch_and_groups_of_heads(device):
    """Each slice in groups; sums of both in fp32 at least, so that fp32 weights differ by rounding alone."""
    losses = []
    for groups in (None, 2):
        # On a GPU attention has no kernel for grouped heads in fp32.
        model = decoder(device, dtype=torch.float32, kv_heads=HEADS)
        wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with TrainableLayerStreamer(model, wrapped, slices=2) as streamer:
            if groups is None:
                losses.append([step(model, device, streamer.optimizer)[0] for _ in range(3)])
                continue
            with HeadGroups(model, groups=groups, longer_than=SHORT) as attached:
                losses.append([step(model, device, streamer.optimizer)[0] for _ in range(3)])
                assert attached.modules_in_groups == 2
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
