# SPDX-License-Identifier: Apache-2.0
"""The arguments of `park`, checked before anything is made: models, their optimizers, and more to park.

Explained in docs/parking.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from reference_impl.parking.tensors import is_followed


def given(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    also: Sequence[object],
) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return the models, and the optimizers without trainers' wrappers.

    Raises ValueError for other objects, for an optimizer of other parameters, and where `also` leads to no tensors.
    """
    models = [model] if isinstance(model, nn.Module) else _listed(model)
    if not models or not all(isinstance(each, nn.Module) for each in models):
        raise ValueError(
            f"model is {model!r}; expected a module, or a list of some; try the model that is trained"
        )
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else _listed(optimizer)
    if optimizers is None or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise ValueError(
            f"optimizer is {optimizer!r}; expected a torch.optim.Optimizer, or a list of some; try the one that "
            "trains the model"
        )
    optimizers = [_unwrapped(each) for each in optimizers]
    for each in optimizers:
        _check_trains(each, models)
    if not isinstance(also, list | tuple):
        raise ValueError(f"also is a {type(also).__name__}; expected a list; try also=[...]")
    for index, root in enumerate(also):
        if not is_followed(root):
            raise ValueError(
                f"also[{index}] is a {type(root).__name__}, in which nobody looks for tensors; expected tensors, "
                "containers, modules, optimizers, or streamers and offloaders of this package; try its tensors"
            )
    return models, optimizers


def check_ranges(*, host_limit_bytes: int | None, timeout_s: float) -> None:
    """Raise ValueError for numbers that are out of range."""
    if host_limit_bytes is not None and (not isinstance(host_limit_bytes, int) or host_limit_bytes < 1):
        raise ValueError(
            f"host_limit_bytes is {host_limit_bytes!r}; expected a whole number of bytes above 0; try None"
        )
    check_timeout(timeout_s)


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError for a value that is no time to wait, as NaN."""
    if not isinstance(timeout_s, Real) or not timeout_s >= 0:
        raise ValueError(f"timeout_s is {timeout_s!r}; expected seconds, 0 or more; try 60.0")


def _listed(several: object) -> list[Any] | None:
    return list(several) if isinstance(several, Iterable) and not isinstance(several, str) else None


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a trainer's wrapper, such as Accelerate's: the wrapper has no hooks of its own."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _check_trains(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
    """Raise ValueError unless `optimizer` has parameters of `models`, or as many elements, as masters of them have."""
    owned = {id(param): param for each in models for param in each.parameters()}
    listed = [param for group in optimizer.param_groups for param in group["params"]]
    trained = sum(param.numel() for param in owned.values() if param.requires_grad)
    if not any(id(param) in owned for param in listed) and sum(p.numel() for p in listed) != trained:
        raise ValueError(
            f"{type(optimizer).__name__} trains no parameter of the model, nor masters of them; expected its own "
            "optimizer; try park([model, the other model], optimizer)"
        )
