# SPDX-License-Identifier: Apache-2.0
"""Trainers' habits all at once, parked in their middle: autocast, scaled gradients, ties, recomputation."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl import park

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")

TOKENS, WIDTH = 32, 16


class Tied(nn.Module):
    """An embedding that is the head too, two recomputed blocks, and a frozen adapter's base."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)
        )
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.head(self.base(hidden))


def trained(device, *, dtype, compiles, pause):
    """Losses, weights, and the scaler's state after six micro-batches of which two make a step."""
    torch.manual_seed(0)
    model = Tied().to(device.torch_device)
    run = torch.compile(model, backend="eager") if compiles else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    kind = device.torch_device.type
    # Overflows at first, in fp16: the scaler leaves steps out, and remembers it.
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**20, growth_interval=2, enabled=dtype is torch.float16)
    losses, pause = [], pause(run, optimizer, scaler)
    for batch in range(6):
        ids = torch.randint(TOKENS, (4, 8), generator=torch.Generator().manual_seed(batch))
        ids = ids.to(device.torch_device)
        with torch.autocast(kind, dtype=dtype):
            logits = run(ids)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        scaler.scale(loss).backward()
        losses.append(loss.item())
        pause()
        if batch % 2:
            scaler.unscale_(optimizer)
            pause()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            pause()
    return losses, [param.detach().clone() for param in model.parameters()], scaler.state_dict()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_is_the_same(device, dtype, compiles):
    parked = []

    def parking(model, optimizer, scaler):
        parked.append(park(model, optimizer, also=[vars(scaler)]))

        def pause():
            with parked[0]:
                assert not any(param.untyped_storage().nbytes() for param in model.parameters())

        return pause

    found = trained(device, dtype=dtype, compiles=compiles, pause=parking)
    expected = trained(device, dtype=dtype, compiles=compiles, pause=lambda *_: lambda: None)
    parked[0].close()
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    assert found[2] == expected[2]
