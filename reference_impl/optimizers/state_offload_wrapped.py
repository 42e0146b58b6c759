"""The optimizers of torch that `OptimizerStateOffloader` wraps: which ones, and their states in both directions.

It knows states only by name, as anything that has `NamedStates`.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from reference_impl.optimizers.algorithms import SGD, Adam, Algorithm
from reference_impl.optimizers.checks import check_param
from reference_impl.optimizers.layout import MASTER, Member

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


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the update in chunks does not have, or a parameter it cannot take."""
    for option, needed in _NEEDED.items():
        if group.get(option, needed) != needed:
            raise ValueError(f"{option} is {group[option]}; expected {needed}; try {option}={needed}")
    if group.get("momentum") == 0:
        raise ValueError("momentum is 0; expected a positive one, without which SGD has no state to offload")
    for param in group["params"]:
        check_param(param)


class NamedStates(Protocol):
    """The states of members by name: the moments and `master_param`."""

    moments: tuple[str, ...]
    steps: dict[Member, torch.Tensor]

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part of a state."""

    def write(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace a state by `value`, of the parameter's shape or one number."""


def saved_states(states: NamedStates, member: Member) -> dict[str, torch.Tensor]:
    """Return copies of a member's states on the CPU, in the parameter's shape; nothing before the first step."""
    step = states.steps[member]
    if step.item() == 0:
        return {}
    # SGD saves no step.
    counted = {"step": step.cpu().clone()} if "exp_avg" in states.moments else {}
    return {**counted, **{name: _gather(states, member, name) for name in _names(states, member)}}


def check_states(states: NamedStates, index: int, member: Member, saved: Mapping[str, Any]) -> None:
    """Raise ValueError when a saved state of parameter `index` has another shape than the parameter."""
    for name in _names(states, member):
        value = saved.get(name)
        if value is not None and value.shape != member.param_local.shape:
            raise ValueError(
                f"{name} of parameter {index} has shape {tuple(value.shape)}; expected "
                f"{tuple(member.param_local.shape)}; try the checkpoint of this model"
            )


def load_states(states: NamedStates, member: Member, saved: Mapping[str, Any]) -> None:
    """Replace the states of a member; moments that are not in `saved` become 0, the master the parameter."""
    # SGD saves no step: having a moment says that there was one.
    states.steps[member].fill_(float(saved.get("step", bool(saved))))
    for name in _names(states, member):
        value = saved.get(name)
        if value is None:
            value = member.param_local if name == MASTER else torch.zeros(())
        states.write(member, name, value)


def _names(states: NamedStates, member: Member) -> tuple[str, ...]:
    """Return the states that a state_dict has: the moments, and the master unless the parameter is one itself."""
    return states.moments if member.param.dtype == torch.float32 else (*states.moments, MASTER)


def _gather(states: NamedStates, member: Member, name: str) -> torch.Tensor:
    whole = torch.empty_like(member.param_local, dtype=torch.float32, device="cpu")
    flat = member.flat(whole)
    for start, part in states.parts(member, name):
        flat[start : start + part.numel()].copy_(part)
    return whole
