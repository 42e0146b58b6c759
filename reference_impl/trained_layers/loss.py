# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a large vocabulary, a few tokens at a time: logits never exist for a whole batch.

Forward computes the gradients of the hidden states and of the head's weight too, chunk by chunk, while the logits
exist; backward only scales them. So the head runs three matrix products in all, as without chunks.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from reference_impl.activations.attach import Forward, wrap_forward

_IGNORED = -100


def chunked_cross_entropy(
    head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor, *, chunk_tokens: int = 1024
) -> torch.Tensor:
    """Return the mean cross entropy (0-dim fp32) of `head(hidden)` against `labels`, at most `chunk_tokens` at a time.

    Args:
        head: a linear layer without bias, whose weight is (vocabulary, features).
        hidden: (..., features), in the head's dtype.
        labels: int64 of the other dimensions of `hidden`; -100 is left out of the mean, as in torch and transformers.
        chunk_tokens: the logits of so many tokens exist at once, in the head's dtype and in fp32.

    Labels stand beside the hidden states that predict them: shift before, as `labels[:, 1:]` beside `hidden[:, :-1]`.
    Each chunk's logits are made in the head's dtype and its loss in fp32. The gradient of the weight adds up in the
    weight's dtype, as the gradients of micro-batches do in torch.

    Raises ValueError for a head with a bias, shapes that do not match, or fewer than one token; its backward raises
    RuntimeError a second time.
    """
    if head.bias is not None:
        raise ValueError("the head has a bias; expected none; try the model's own loss")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} beside hidden states of {tuple(hidden.shape)}; expected "
            f"{tuple(hidden.shape[:-1])}, one label a token; try cutting both alike"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}; expected at least 1; try 1024")

    def instead(_: Forward, module: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> torch.Tensor:
        (states,) = args
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(
            states.flatten(0, -2), module.weight, labels.flatten(), chunk_tokens
        )
        return loss

    # Within the head's own call: hooks on it that bring or free its weight hear of its use.
    undo = wrap_forward(head, instead)
    try:
        found: torch.Tensor = head(hidden)
    finally:
        undo()
    return found


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int
    ) -> torch.Tensor:
        counted = (labels != _IGNORED).sum().clamp(min=1)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            # A function of its own, so that a chunk's memory is free before the next one's is taken.
            loss += _chunk(
                hidden[chunk],
                weight,
                labels[chunk],
                counted,
                None if for_hidden is None else for_hidden[chunk],
                for_weight,
            )
        # Not saved for backward: they are scaled in place, and nobody else has them.
        ctx.gradients = for_hidden, for_weight
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "a second backward went through chunked_cross_entropy, whose gradients are used up; expected one; try "
                "calling it again"
            )
        for_hidden, for_weight = ctx.gradients
        ctx.gradients = None
        for each in (for_hidden, for_weight):
            if each is not None:
                each.mul_(gradient)
        return for_hidden, for_weight, None, None


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    counted: torch.Tensor,
    for_hidden: torch.Tensor | None,
    for_weight: torch.Tensor | None,
) -> torch.Tensor:
    """Return the part of the mean loss that `hidden` (tokens, features) make; write or add up their gradients."""
    counts = (labels != _IGNORED).float()
    label = labels.clamp(min=0)[:, None]
    # All in one fp32 buffer: logits, then their exponentials, probabilities and the loss's gradient.
    buffer = (hidden @ weight.T).float()
    buffer -= buffer.amax(-1, keepdim=True)
    at_label = buffer.gather(1, label)
    sums = buffer.exp_().sum(-1, keepdim=True)
    loss = ((sums.log() - at_label).squeeze(1) * counts).sum() / counted
    if for_hidden is None and for_weight is None:
        return loss
    buffer /= sums
    buffer.scatter_add_(1, label, torch.full_like(at_label, -1))
    buffer *= (counts / counted)[:, None]
    made = buffer.to(weight.dtype)
    if for_hidden is not None:
        torch.mm(made, weight, out=for_hidden)
    if for_weight is not None:
        for_weight.addmm_(made.T, hidden)
    return loss
