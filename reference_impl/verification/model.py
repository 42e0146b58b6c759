# SPDX-License-Identifier: Apache-2.0
"""A Llama-style decoder, the one model that verify, the tests and the benchmarks train, and adapters for it.

It is plain PyTorch without an offload idea in it, so that every mechanism is attached from outside, as users
attach it to theirs. It does not tie weights, rotate positions or cache keys: none of these changes the tensors saved
for backward. The low-rank adapters are plain and minimal, so that tests and benchmarks need no adapter library; they do
not merge, scale or save.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder: `hidden` and `ffn` widths, `layers` blocks, attention `heads`, `vocab` ids.

    `kv_heads` keys and values serve all heads (grouped-query attention); 0 means one for each head.
    """

    hidden: int = 64
    ffn: int = 176
    layers: int = 4
    heads: int = 4
    vocab: int = 512
    kv_heads: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError when the heads do not divide the width, or the groups the heads."""
        if self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}; try a divisor of it")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; try a divisor of it"
            )

    @property
    def split_heads(self) -> tuple[int, int, int]:
        """How many heads of the fused projection are queries, keys and values."""
        groups = self.kv_heads or self.heads
        return self.heads, groups, groups


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention of a fused (batch, tokens, query + key + value) projection."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.split_heads = shape.split_heads

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return (batch, tokens, hidden)."""
        batch, tokens, _ = qkv.shape
        heads = qkv.view(batch, tokens, sum(self.split_heads), -1).transpose(1, 2)
        q, k, v = heads.split(self.split_heads, dim=1)
        grouped = k.shape[1] != q.shape[1]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        merged: torch.Tensor = attended.transpose(1, 2).reshape(batch, tokens, -1)
        return merged


class Block(nn.Module):
    """RMSNorm, attention, residual; RMSNorm, SwiGLU, residual."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        fused = shape.hidden // shape.heads * sum(shape.split_heads)
        self.qkv = nn.Linear(shape.hidden, fused, bias=False)
        self.core_attention = CoreAttention(shape)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        x = x + self.out(self.core_attention(self.qkv(self.attention_norm(x))))
        normed = self.mlp_norm(x)
        result: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


class Decoder(nn.Module):
    """Token embedding, `layers` blocks, final norm and an untied head."""

    def __init__(self, shape: DecoderShape) -> None:
        """Initialise as torch does; seed before for the same weights twice."""
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, tokens, vocab) of int64 `ids` (batch, tokens)."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def decoder_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in fp32 over all tokens, each its own label."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


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
