# SPDX-License-Identifier: Apache-2.0
"""Mixed-precision AdamW with everything on the device: the step that every mechanism is compared with.

It is `torch.optim.AdamW(fused=True)` over fp32 masters and nothing else, so that a comparison does not depend on code
of this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload_arithmetic.sizes import WIDENED_ELEMENTS
from reference_impl.distributed.mesh import local_of


class PlainAdamW:
    """AdamW over fp32 masters of `model`'s trainable parameters, with exact clipping to `max_grad_norm`.

    A parameter in fp32 is its own master.

    Device bytes a bf16 parameter: 4 master and 8 moments between steps, and in `step` 4 for the fp32 gradients of
    one chunk.
    """

    def __init__(self, model: nn.Module, *, max_grad_norm: float | None = None, **options: Any) -> None:
        """Copy the masters; `options` are `torch.optim.AdamW`'s."""
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._max_grad_norm = max_grad_norm
        self._chunks = [_Chunk(params, options) for params in _cut(self._params)]

    @torch.no_grad()
    def step(self) -> None:
        """Update masters with the gradients of the model, and the model's parameters from its masters."""
        scale = None
        if self._max_grad_norm is not None:
            grads = [param.grad for param in self._params if param.grad is not None]
            norms = [norm for grad in grads for norm in torch._foreach_norm([grad], dtype=torch.float32)]
            scale = (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6) / self._max_grad_norm
            scale = scale.clamp(min=1.0)
        for chunk in self._chunks:
            chunk.step(scale)

    def zero_grad(self) -> None:
        """Drop the model's gradients."""
        for param in self._params:
            param.grad = None


class _Chunk:
    """Some parameters with their masters and `torch.optim.AdamW`."""

    def __init__(self, params: Sequence[nn.Parameter], options: Mapping[str, Any]) -> None:
        self._params = params
        self._masters = [
            param if param.dtype == torch.float32 else nn.Parameter(param.detach().float())
            for param in params
        ]
        self._adamw = torch.optim.AdamW(self._masters, fused=True, **options)

    def step(self, scale: torch.Tensor | None) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        # The fused kernel divides by it, as it does for a gradient scaler.
        self._adamw.grad_scale = scale  # type: ignore[attr-defined]
        self._adamw.step()
        for param, master in zip(self._params, self._masters, strict=True):
            if param is not master:
                param.copy_(master)
            master.grad = None


def _cut(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield lists of at most `WIDENED_ELEMENTS`, or one parameter."""
    chunk: list[nn.Parameter] = []
    for param in params:
        if chunk and sum(local_of(each).numel() for each in (*chunk, param)) > WIDENED_ELEMENTS:
            yield chunk
            chunk = []
        chunk.append(param)
    yield chunk
