"""Which optimizers `OptimizerStateOffloader` can wrap, and with which budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reference_impl.optimizers.algorithms import SGD, Adam, Algorithm
from reference_impl.optimizers.checks import check_param
from reference_impl.optimizers.layout import ALIGNMENT

_NEEDED: Mapping[str, Any] = {
    "fused": True,
    "amsgrad": False,
    "capturable": False,
    "differentiable": False,
    "dampening": 0,
}


def algorithm_of(optimizer: torch.optim.Optimizer) -> Algorithm:
    """Return the formula of a wrapped optimizer.

    Raises TypeError for anything but `torch.optim.AdamW`, `Adam` and `SGD` themselves.
    """
    if type(optimizer) is torch.optim.AdamW:
        return Adam()
    if type(optimizer) is torch.optim.Adam:
        return Adam(decoupled=optimizer.defaults.get("decoupled_weight_decay", False))
    if type(optimizer) is torch.optim.SGD:
        return SGD()
    raise TypeError(
        f"{type(optimizer).__name__} cannot be updated in chunks; expected torch.optim.AdamW, Adam or SGD, whose "
        "update treats each element by itself; try AdamW(fused=True)"
    )


def check_wrapped_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the chunked update does not have, or a parameter it cannot take."""
    for option, needed in _NEEDED.items():
        if group.get(option, needed) != needed:
            raise ValueError(f"{option} is {group[option]}; expected {needed}; try {option}={needed}")
    if group.get("momentum") == 0:
        raise ValueError("momentum is 0; expected a positive one, without which SGD has no state to offload")
    for param in group["params"]:
        check_param(param)


def check_sizes(*, fraction: float, chunk_bytes: int, state_bytes: int) -> None:
    """Raise ValueError for a fraction outside [0, 1] or a chunk that is too small."""
    if not 0 <= fraction <= 1:
        raise ValueError(
            f"fraction is {fraction}; expected a share of bytes in [0, 1]; try {min(max(fraction, 0.0), 1.0)}"
        )
    check_chunk(chunk_bytes, state_bytes=state_bytes)


def check_chunk(chunk_bytes: int, *, state_bytes: int) -> None:
    """Raise ValueError for a chunk below `ALIGNMENT` elements of `state_bytes`."""
    if chunk_bytes < ALIGNMENT * state_bytes:
        raise ValueError(
            f"chunk_bytes is {chunk_bytes}; expected {ALIGNMENT * state_bytes} or more, {ALIGNMENT} elements of "
            f"{state_bytes} bytes; try {96 * 2**20}"
        )
