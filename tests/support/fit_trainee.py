# SPDX-License-Identifier: Apache-2.0
"""A model for `fit` to plan, its training, and the training's bytes."""

import torch
from torch.nn import functional

from reference_impl import apply_plan
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.model import Decoder, DecoderShape

IDS = torch.arange(4 * 64).reshape(4, 64) % 300


class Model(Decoder):
    """Random numbers in forward, and a buffer that training changes."""

    def __init__(self, layers=3, hidden=64, dtype=torch.float32):
        super().__init__(DecoderShape(hidden=hidden, ffn=2 * hidden, layers=layers, vocab=300))
        self.to(dtype)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids):
        self.calls.add_(1)
        return functional.dropout(super().forward(ids), 0.1, training=True)


def loss_of(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def make(**options):
    torch.manual_seed(0)
    model = Model(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def train(model, optimizer, steps=3):
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        losses.append(loss_of(model, IDS))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    getattr(optimizer, "synchronize", lambda: None)()
    return torch.stack(losses).detach(), [param.detach().clone() for param in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def peak_of(plan, **options):
    """The most bytes of a training under `plan` that nobody limits."""
    model, optimizer = make(**options)
    device = Device.of("cpu")
    with Ledger(device, track=[*model.parameters(), *model.buffers(), IDS]) as ledger:
        with apply_plan(model, optimizer, plan) as applied:
            train(model, applied.optimizer)
        return ledger.peak_device_bytes


def whole_peak(**options):
    """The peak where nothing is offloaded."""
    return peak_of({"execute": {"optimizer": {"offload_fraction": 0.0}}}, **options)
