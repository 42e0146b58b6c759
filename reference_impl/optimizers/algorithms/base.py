# SPDX-License-Identifier: Apache-2.0
"""The protocol of an update formula, and helpers that its forms share.

An algorithm of elements says one formula in three forms, all over fp32 (`matrices` has algorithms of whole matrices):

- `update`: lists of views in one call of torch's fused kernel, on any device. It is the kernel that `torch.optim`
  calls with `fused=True`, so results are bitwise torch's on the same device.
- `cpu_kernel`: the same call in a loop over cache-sized blocks of a bucket. `torch.jit.script` turns the loop into a
  program that runs with the interpreter lock released, so that a dozen threads update while the training thread
  launches kernels; it changes the result of no operator.
- `formula`: element by element, for states that are not kept in fp32 anyway; it becomes part of one kernel that also
  unpacks and rounds.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from reference_impl.memory.interrupts import with_room

Tensors = list[torch.Tensor]
Numbers = torch.Tensor | Sequence[torch.Tensor]
Formula = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Numbers], Sequence[torch.Tensor]]


class AnyAlgorithm(Protocol):
    """One optimizer formula; `defaults` names its hyper-parameters, `moments` its fp32 states."""

    @property
    def kernels(self) -> Mapping[str, Any]:
        """Options of torch's class that choose among its kernels, with the values that give the same bits as ours."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Hyper-parameters of a parameter group and their defaults."""

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Options of torch's class that would change the formula, each with its only supported value."""

    @property
    def counts_steps(self) -> bool:
        """Whether torch's class keeps a `step` among its states."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the per-element states, as `torch.optim` writes them in a state_dict."""

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a hyper-parameter outside its range, or a parameter that the formula cannot update."""


class Algorithm(AnyAlgorithm, Protocol):
    """A formula that updates each element by itself, so that its states may be cut anywhere."""

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """Return a group's hyper-parameters as `cpu_kernel` reads them."""

    def cpu_kernel(self) -> Callable[..., None]:
        """Return the scripted update of many blocks.

        Its arguments: `scratch` is one block of fp32; per block the `staging` buffers and the masters as `wholes`; per
        block and member the `masters`, their `begins` in the block and their `steps`; `moments` likewise, one list a
        moment; then `factors`, `numbers`, `maximize` and `grad_scale` (0-dim on the CPU, or None for exactly 1).
        Gradients are read from `staging`, multiplied by each of `factors` in their own dtype, and the new weights are
        left there.
        """

    @property
    def formula(self) -> Formula:
        """Return the formula element by element.

        It maps master, gradient, moments and a row of `numbers_by_step`, all fp32, to the new master and moments. Each
        number of the row may be one for each element.
        """

    def numbers_by_step(self, group: Mapping[str, Any], steps: torch.Tensor) -> torch.Tensor:
        """Return the numbers of `formula`, a row (fp32) for each of `steps` (fp32, one dimension)."""

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


# Of torch's classes that have a fused kernel.
FUSED: Mapping[str, Any] = {"foreach": None, "fused": True}


def group_defaults(algorithm: AnyAlgorithm) -> dict[str, Any]:
    """Return every key that a group of torch's class has, so that its checkpoints and ours have the same."""
    return {**algorithm.defaults, **algorithm.fixed, **algorithm.kernels}


def check_learning_rate(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a learning rate or weight decay that is no number of 0 or more."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor):
        if lr.device.type != "cpu":
            raise ValueError(
                f"lr is a tensor on {lr.device}; expected a float or a CPU tensor; try lr.item()"
            )
        lr = lr.item() if lr.numel() == 1 else lr
    check_numbers({"lr": lr, "weight_decay": group["weight_decay"]}, "lr", "weight_decay")


def check_numbers(group: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options `names` are finite numbers of 0 or more."""
    for name in names:
        if not is_number(group[name]) or not 0 <= group[name] < float("inf"):
            raise ValueError(f"{name} is {group[name]!r}; expected 0 or more, a finite number")


def is_number(value: Any) -> bool:
    """Return whether `value` is a number; tensors, True and False are none here."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_switches(group: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options `names` are True or False."""
    for name in names:
        if not isinstance(group[name], bool):
            raise ValueError(f"{name} is {group[name]!r}; expected True or False")


def widen(
    staging: Tensor, scratch: Tensor, masters: list[Tensor], begins: list[int], factors: list[Tensor]
) -> list[Tensor]:
    """Return each member's gradient in fp32, scaled: views of `staging` itself, or of its copy in `scratch`.

    Each product rounds to the dtype of `staging`, as scaling the gradient in place does. `factors` are 0-dim fp32: a
    number would be rounded to that dtype first.
    """
    for factor in factors:
        staging.mul_(factor)
    source = staging
    if staging.dtype != torch.float32:
        source = scratch[: staging.numel()]
        source.copy_(staging)
    grads: list[Tensor] = []
    for j in range(len(masters)):
        grads.append(source[begins[j] : begins[j] + masters[j].numel()])
    return grads


@cache
def scripted(function: Callable[..., None]) -> Any:
    """Compile a function over blocks; compiling again returns the same program."""
    return _quiet_script(function)


def script_list(values: list[Any]) -> Any:
    """Return a list that scripted functions take as it is; a Python list would be converted at every call."""
    # At the recursion limit torch's own code for it ends the process.
    return with_room(partial(_quiet_script, values))


def _quiet_script(subject: Any) -> Any:
    with warnings.catch_warnings():
        # torch advises other compilers for models; none of them runs a loop of operators without the lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(subject)


def sign_of(group: Mapping[str, Any]) -> float:
    """Return -1 for a group that maximizes, else 1."""
    return -1.0 if group["maximize"] else 1.0


def rows(same: Sequence[float], *by_step: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a row for each step, fp32; no number is copied from the host, which a stream would wait for."""
    like = by_step[0] if like is None else like
    columns = [*(torch.full_like(like, value) for value in same), *by_step]
    return torch.stack(columns, dim=1).float()
