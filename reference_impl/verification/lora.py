"""Low-rank adapters for the small decoder: the training that frozen-layer streaming is for.

Plain and minimal, so that tests and benchmarks need no adapter library. It does not merge, scale or save.
"""

from __future__ import annotations

import torch
from torch import nn


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained product of rank `rank` beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        """Freeze `base`; the adapter starts random, not at zero, so that its gradients are all non-zero."""
        super().__init__()
        self.base = base.requires_grad_(False)
        like = base.weight
        self.a = nn.Parameter(torch.randn(rank, base.in_features, dtype=like.dtype, device=like.device) / 64)
        self.b = nn.Parameter(torch.randn(base.out_features, rank, dtype=like.dtype, device=like.device) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        adapted: torch.Tensor = self.base(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return adapted


def add_lora(model: nn.Module, rank: int = 16) -> None:
    """Freeze `model` and put an adapter beside every linear layer but the head."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child_name != "head" and not isinstance(module, LoraLinear):
                setattr(module, child_name, LoraLinear(child, rank))
