"""The update formulas, as torch's own fused kernels.

An `Algorithm` turns lists of views (parameters, gradients, moments, steps) into one fused kernel call, on the
CPU or on the GPU alike. Because it calls the kernel that `torch.optim` calls with `fused=True`, its results
are bitwise those of `torch.optim` on the same device. It owns no state and knows no buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from reference_impl.optimizers import formulas
from reference_impl.optimizers.cpu.kernels import adam_blocks, scripted, sgd_blocks
from reference_impl.optimizers.formulas import Formula

Tensors = list[torch.Tensor]


class Algorithm(Protocol):
    """One optimizer formula; `defaults` names its hyper-parameters, `moments` its fp32 states."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Hyper-parameters of a parameter group and their defaults."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the per-element states, as `torch.optim` writes them in a state_dict."""

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a hyper-parameter outside its range."""

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """Return a group's hyper-parameters as `cpu_kernel` reads them."""

    def cpu_kernel(self) -> Callable[..., None]:
        """Return the scripted update of blocks; see `cpu_kernels`."""

    @property
    def formula(self) -> Formula:
        """The same, element by element; see `formulas`."""

    def numbers_by_step(self, group: Mapping[str, Any], steps: torch.Tensor) -> torch.Tensor:
        """Return what `formula` takes, a row (fp32) for each of `steps` (fp32, one dimension)."""

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
        """Update `params` and `moments` in place, all fp32 on one device.

        `steps` are the counters after this step; gradients are divided by `grad_scale`; nothing changes when
        `found_inf` is 1.
        """


def _check_learning_rate(group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        raise ValueError(f"lr is a tensor on {lr.device}; expected a float or a CPU tensor; try lr.item()")
    if lr < 0:
        raise ValueError(f"lr is {lr}; expected 0 or more")
    if group["weight_decay"] < 0:
        raise ValueError(f"weight_decay is {group['weight_decay']}; expected 0 or more")


@dataclass(frozen=True)
class Adam:
    """Adam, with decoupled weight decay (AdamW) or with weight decay added to the gradient."""

    decoupled: bool = True

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Those of `torch.optim.AdamW` or `torch.optim.Adam`."""
        return {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2 if self.decoupled else 0.0,
            "maximize": False,
        }

    @property
    def moments(self) -> tuple[str, ...]:
        """The first and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError as `torch.optim.AdamW` does."""
        _check_learning_rate(group)
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas are {group['betas']}; expected two numbers in [0, 1)")
        if group["eps"] < 0:
            raise ValueError(f"eps is {group['eps']}; expected 0 or more")

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
        """`formulas.adam`."""
        return formulas.adam

    def numbers_by_step(self, group: Mapping[str, Any], steps: torch.Tensor) -> torch.Tensor:
        """Return what `formulas.adam` takes."""
        return formulas.adam_numbers(group, steps, decoupled=self.decoupled)

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


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, without dampening."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Those of `torch.optim.SGD` less `dampening`."""
        return {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}

    @property
    def moments(self) -> tuple[str, ...]:
        """The momentum buffer, kept also when momentum is 0 so that it may be raised later."""
        return ("momentum_buffer",)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError as `torch.optim.SGD` does."""
        _check_learning_rate(group)
        if group["momentum"] < 0:
            raise ValueError(f"momentum is {group['momentum']}; expected 0 or more")
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
        """`formulas.sgd`."""
        return formulas.sgd

    def numbers_by_step(self, group: Mapping[str, Any], steps: torch.Tensor) -> torch.Tensor:
        """Return what `formulas.sgd` takes."""
        return formulas.sgd_numbers(group, steps)

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
