"""The update formulas element by element, in fp32, for states that are not kept in fp32.

torch's fused kernels take every state as an fp32 tensor. `algorithms` calls them wherever results must be bitwise
torch's. Where moments are rounded to bf16, these formulas are part of one kernel that also unpacks and rounds
(`streamed.packing`). `numbers` are one row of what `Algorithm.numbers_by_step` returns.

Explained in docs/optimizer-state-offloading.md, "Fewer bytes".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
Formula = Callable[[torch.Tensor, torch.Tensor, Tensors, torch.Tensor], Tensors]


def adam(master: torch.Tensor, gradient: torch.Tensor, moments: Tensors, numbers: torch.Tensor) -> Tensors:
    """Return the new master, `exp_avg` and `exp_avg_sq` of Adam or AdamW."""
    sign, l2, kept, beta1, rest1, beta2, rest2, eps, step_size, scale = numbers.unbind()
    gradient = sign * gradient + l2 * master
    average = beta1 * moments[0] + rest1 * gradient
    square = beta2 * moments[1] + rest2 * gradient * gradient
    return kept * master - step_size * average / (scale * square.sqrt() + eps), average, square


def adam_numbers(group: Mapping[str, Any], steps: torch.Tensor, *, decoupled: bool) -> torch.Tensor:
    """Return what `adam` takes for each of `steps` (0 in a step that is skipped)."""
    (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), float(group["weight_decay"])
    l2, kept = (0.0, 1 - lr * decay) if decoupled else (decay, 1.0)
    return _rows(
        [_sign(group), l2, kept, beta1, 1 - beta1, beta2, 1 - beta2, float(group["eps"])],
        lr / (1 - beta1 ** steps.double()),
        (1 - beta2 ** steps.double()).rsqrt(),
    )


def sgd(master: torch.Tensor, gradient: torch.Tensor, moments: Tensors, numbers: torch.Tensor) -> Tensors:
    """Return the new master and `momentum_buffer` of SGD; without momentum the buffer stays as it is."""
    sign, l2, momentum, lr, nesterov = numbers.unbind()
    gradient = sign * gradient + l2 * master
    average = momentum * moments[0] + gradient
    direction = torch.where(nesterov != 0, gradient + momentum * average, average)
    return master - lr * direction, torch.where(momentum != 0, average, moments[0])


def sgd_numbers(group: Mapping[str, Any], steps: torch.Tensor) -> torch.Tensor:
    """Return what `sgd` takes, the same for each of `steps`."""
    l2, momentum, lr = (float(group[name]) for name in ("weight_decay", "momentum", "lr"))
    return _rows([_sign(group), l2, momentum, lr, float(group["nesterov"])], like=steps)


def _sign(group: Mapping[str, Any]) -> float:
    return -1.0 if group["maximize"] else 1.0


def _rows(same: Sequence[float], *by_step: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a row for each step, fp32. No number is copied from the host, for which a stream would wait."""
    like = by_step[0] if like is None else like
    columns = [*(torch.full_like(like, value) for value in same), *by_step]
    return torch.stack(columns, dim=1).float()
