# SPDX-License-Identifier: Apache-2.0
"""A decoder that trains under a plan, and one plan of each kind of optimizer."""

import torch

from reference_impl.verification.model import Decoder, DecoderShape

# One of each kind of optimizer under a plan: offloading, of streamed layers, and the user's own.
STEPPED = [
    {"optimizer": {"offload_fraction": 0.7, "split": {"resident": 0.3, "streamed": 0.5, "cpu": 0.2}}},
    {"trained_layers": {}},
    {"activations": {"mode": "checkpoint"}},
]


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderShape())


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def losses(model: Decoder, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 512, (2, 32), generator=generator)
        logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found
