# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference_impl.optimizers.algorithms.base import (
    FUSED,
    Formula,
    Numbers,
    Tensors,
    check_learning_rate,
    check_numbers,
    check_switches,
    rows,
    scripted,
    sign_of,
    widen,
)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, without dampening."""

    @property
    def kernels(self) -> Mapping[str, Any]:
        """The fused one."""
        return FUSED

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Hyper-parameters of `torch.optim.SGD` less `dampening`."""
        return {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Options that this formula lacks."""
        return {"dampening": 0, "differentiable": False}

    @property
    def counts_steps(self) -> bool:
        """It needs none: having a momentum buffer says that there was a step."""
        return False

    @property
    def moments(self) -> tuple[str, ...]:
        """The momentum buffer, kept also when momentum is 0 so that it may be raised later."""
        return ("momentum_buffer",)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError as `torch.optim.SGD` does, and for a value that is no number."""
        check_learning_rate(group)
        check_numbers(group, "momentum")
        check_switches(group, "nesterov", "maximize")
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("nesterov is True with momentum 0; expected a positive momentum")

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """Learning rate, momentum, weight decay and whether momentum is Nesterov's."""
        return [float(group[name]) for name in ("lr", "momentum", "weight_decay", "nesterov")]

    def cpu_kernel(self) -> Callable[..., None]:
        """Blocks of `_fused_sgd_`."""
        return scripted(sgd_blocks)  # type: ignore[no-any-return]

    @property
    def formula(self) -> Formula:
        """`sgd_formula`."""
        return sgd_formula

    def numbers_by_step(self, group: Mapping[str, Any], steps: torch.Tensor) -> torch.Tensor:
        """Return the rows of `sgd_formula`, the same for each of `steps`."""
        l2, momentum, lr = (float(group[name]) for name in ("weight_decay", "momentum", "lr"))
        return rows([sign_of(group), l2, momentum, lr, float(group["nesterov"])], like=steps)

    def update(
        self,
        params: Tensors,
        grads: Tensors,
        moments: Sequence[Tensors],
        steps: Tensors,
        group: Mapping[str, Any],
        *,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """One `_fused_sgd_` call; a buffer of zeros makes the first step equal to torch's."""
        torch._fused_sgd_(
            params,
            grads,
            moments[0] if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


def sgd_blocks(
    scratch: Tensor,
    staging: list[Tensor],
    wholes: list[Tensor],
    masters: list[list[Tensor]],
    begins: list[list[int]],
    moments: list[list[list[Tensor]]],
    steps: list[list[Tensor]],
    factors: list[Tensor],
    numbers: list[float],
    maximize: bool,
    grad_scale: Tensor | None,
) -> None:
    """SGD; `numbers` are lr, momentum, weight_decay, and 1 for Nesterov."""
    for i in range(len(staging)):
        torch._fused_sgd_(
            masters[i],
            widen(staging[i], scratch, masters[i], begins[i], factors),
            moments[0][i] if numbers[1] != 0.0 else [],
            weight_decay=numbers[2],
            momentum=numbers[1],
            lr=numbers[0],
            dampening=0.0,
            nesterov=numbers[3] == 1.0,
            maximize=maximize,
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=None,
        )
        staging[i].copy_(wholes[i])


def sgd_formula(
    master: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor], numbers: Numbers
) -> Sequence[torch.Tensor]:
    """Return the new master and `momentum_buffer` of SGD; without momentum the buffer stays."""
    sign, l2, momentum, lr, nesterov = numbers
    gradient = sign * gradient + l2 * master
    average = momentum * moments[0] + gradient
    direction = torch.where(nesterov != 0, gradient + momentum * average, average)
    return master - lr * direction, torch.where(momentum != 0, average, moments[0])
