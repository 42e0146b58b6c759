# SPDX-License-Identifier: Apache-2.0
"""The peak of a step with `CheckpointOffloader` while every copy is late, against blocking copies of the same inputs.

The host runs ahead of a GPU, so its allocator counts whatever a copy may still be reading. Here no copy is made before
somebody waits for it.
"""

import pytest
import torch
from late_device import LateTwin
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl.activations import CheckpointOffloader
from reference_impl.activations.attach import wrap_forward
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger, note_on_host
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss


class LatestTwin(LateTwin):
    """Nothing is copied before somebody waits for it."""

    def go_on(self):
        pass


@pytest.fixture(autouse=True)
def late_copies(monkeypatch):
    monkeypatch.setitem(Device.classes, "cpu", LatestTwin)


class WithLoss(nn.Module):
    """Computes the loss in its own forward, as Transformers' models do."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, ids):
        logits = self.decoder(ids)
        return {"loss": decoder_loss(logits, ids), "logits": logits}


def blocking(decoder):
    """Recompute each layer from a copy of its input on the host, made and brought back while everything waits."""

    def around(forward, layer, args, kwargs):
        moved = args[0].untyped_storage().data_ptr()

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() != moved:
                return tensor, False
            host = torch.empty_like(tensor)
            note_on_host(host)
            return host.copy_(tensor.detach()), True

        def unpack(packed):
            tensor, is_on_host = packed
            return tensor.clone() if is_on_host else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for layer in decoder.layers:
        wrap_forward(layer, around)


def trained(attach, tokens, *, is_inside, steps=4):
    """Return losses and peak device bytes of each step, and the bytes that each backward leaves behind."""
    torch.manual_seed(0)
    decoder = Decoder(DecoderShape(layers=8, vocab=4096))
    model = WithLoss(decoder) if is_inside else decoder
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(4096, (1, tokens))
    losses, peaks, left = [], [], []

    def loss_of():
        return model(ids)["loss"] if is_inside else decoder_loss(model(ids), ids)

    attached = attach(decoder if attach is blocking else model)
    with Ledger(Device.of("cpu"), track=[*model.parameters(), ids]) as ledger:
        for _ in range(steps):
            ledger.reset_peak()
            loss = loss_of()
            loss.backward()
            losses.append(loss.item())
            del loss
            left.append(ledger.device_bytes)
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(ledger.peak_device_bytes)
    if attached is not None:
        attached.close()
    return losses, peaks, left


@pytest.mark.parametrize("is_inside", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(512, id="at the logits", marks=pytest.mark.slow),
        pytest.param(64, id="in the optimizer"),
    ],
)
def test_late_copies_take_no_more_than_blocking_ones(tokens, is_inside):
    losses, peaks, left = trained(blocking, tokens, is_inside=is_inside)
    offloaded = trained(
        lambda model: CheckpointOffloader(model, min_bytes=2**14), tokens, is_inside=is_inside
    )
    assert offloaded[0] == losses
    assert all(ours <= theirs for ours, theirs in zip(offloaded[1], peaks, strict=True)), (
        offloaded[1],
        peaks,
    )
    assert offloaded[2] == left
