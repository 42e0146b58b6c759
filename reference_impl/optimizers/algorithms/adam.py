# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW."""

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
    is_number,
    rows,
    scripted,
    sign_of,
    widen,
)


@dataclass(frozen=True)
class Adam:
    """Adam, with decoupled weight decay (AdamW) or with weight decay added to the gradient."""

    decoupled: bool = True

    @property
    def kernels(self) -> Mapping[str, Any]:
        """The fused one."""
        return FUSED

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options of `torch.optim.AdamW` or `torch.optim.Adam`."""
        return {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2 if self.decoupled else 0.0,
            "maximize": False,
        }

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Options that this formula lacks, and its weight decay."""
        return {
            "amsgrad": False,
            "capturable": False,
            "differentiable": False,
            "decoupled_weight_decay": self.decoupled,
        }

    @property
    def counts_steps(self) -> bool:
        """Its bias correction needs them."""
        return True

    @property
    def moments(self) -> tuple[str, ...]:
        """The first and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError as `torch.optim.AdamW` does, and for a value that is no number."""
        check_learning_rate(group)
        betas = group["betas"]
        listed = list(betas) if isinstance(betas, tuple | list) else []
        if len(listed) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in listed):
            raise ValueError(f"betas are {betas!r}; expected two numbers in [0, 1)")
        check_numbers(group, "eps")
        check_switches(group, "maximize")

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """Learning rate, betas, weight decay, eps and whether decay is decoupled."""
        return [
            float(group["lr"]),
            *group["betas"],
            float(group["weight_decay"]),
            float(group["eps"]),
            float(self.decoupled),
        ]

    def cpu_kernel(self) -> Callable[..., None]:
        """Blocks of `_fused_adamw_` or `_fused_adam_`."""
        return scripted(adam_blocks)  # type: ignore[no-any-return]

    @property
    def formula(self) -> Formula:
        """`adam_formula`."""
        return adam_formula

    def numbers_by_step(self, group: Mapping[str, Any], steps: torch.Tensor) -> torch.Tensor:
        """Return the rows of `adam_formula`; `steps` are 0 where the step is skipped."""
        (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), float(group["weight_decay"])
        l2, kept = (0.0, 1 - lr * decay) if self.decoupled else (decay, 1.0)
        counted = steps.double()
        return rows(
            [sign_of(group), l2, kept, beta1, 1 - beta1, beta2, 1 - beta2, float(group["eps"])],
            lr / (1 - beta1**counted),
            (1 - beta2**counted).rsqrt(),
        )

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
        """One `_fused_adamw_` or `_fused_adam_` call."""
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        beta1, beta2 = group["betas"]
        kernel(
            params,
            grads,
            moments[0],
            moments[1],
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


def adam_blocks(
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
    """Adam or AdamW; `numbers` are lr, beta1, beta2, weight_decay, eps, and 1 for decoupled decay."""
    for i in range(len(staging)):
        grads = widen(staging[i], scratch, masters[i], begins[i], factors)
        if numbers[5] == 1.0:
            torch._fused_adamw_(
                masters[i],
                grads,
                moments[0][i],
                moments[1][i],
                [],
                steps[i],
                lr=numbers[0],
                beta1=numbers[1],
                beta2=numbers[2],
                weight_decay=numbers[3],
                eps=numbers[4],
                amsgrad=False,
                maximize=maximize,
                grad_scale=grad_scale,
                found_inf=None,
            )
        else:
            torch._fused_adam_(
                masters[i],
                grads,
                moments[0][i],
                moments[1][i],
                [],
                steps[i],
                lr=numbers[0],
                beta1=numbers[1],
                beta2=numbers[2],
                weight_decay=numbers[3],
                eps=numbers[4],
                amsgrad=False,
                maximize=maximize,
                grad_scale=grad_scale,
                found_inf=None,
            )
        staging[i].copy_(wholes[i])


def adam_formula(
    master: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor], numbers: Numbers
) -> Sequence[torch.Tensor]:
    """Return the new master, `exp_avg` and `exp_avg_sq` of Adam or AdamW."""
    sign, l2, kept, beta1, rest1, beta2, rest2, eps, step_size, scale = numbers
    gradient = sign * gradient + l2 * master
    average = beta1 * moments[0] + rest1 * gradient
    square = beta2 * moments[1] + rest2 * gradient * gradient
    return kept * master - step_size * average / (scale * root(square) + eps), average, square


def root(values: torch.Tensor) -> torch.Tensor:
    """Return the square root (fp32) of fp32, rounded correctly: torch's on the CPU may be off in the last place."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()
