"""State in the layout of `torch.optim.AdamW`, both ways, at any fraction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from reference_impl.optimizers.live_state import MASTER, STEP, MemberState

if TYPE_CHECKING:
    from reference_impl.optimizers.hybrid import HybridDeviceOptimizer


def pack(optimizer: HybridDeviceOptimizer, packed: Mapping[str, Any]) -> dict[Any, dict[str, torch.Tensor]]:
    """Return the states as copies, under the keys that the groups of `packed` give to parameters."""
    listed = set(optimizer.state)
    return {
        key: {name: member.copied(name) for name in member}
        for key, param, member in _keyed(optimizer, packed)
        if param in listed
    }


def check(optimizer: HybridDeviceOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError when `state_dict` is not one of this optimizer's parameters."""
    ours, theirs = optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
        raise ValueError(
            f"the state_dict has groups of {[len(g['params']) for g in theirs]} parameters; expected "
            f"{[len(g['params']) for g in ours]}; try constructing with the same groups"
        )
    if any(group.get("amsgrad") for group in theirs):
        raise ValueError(
            "the state_dict is of amsgrad=True; expected amsgrad=False, whose maximum is not kept here; try training "
            "on without offload"
        )
    for key, param, member in _keyed(optimizer, state_dict):
        for name, value in state_dict["state"].get(key, {}).items():
            expected = (
                param.shape if isinstance(value, DTensor) else optimizer._members[param].param_local.shape
            )
            if name in set(member) - {STEP} and value.shape != expected:
                raise ValueError(
                    f"{name} of parameter {key} has shape {tuple(value.shape)}; expected "
                    f"{tuple(expected)}; try the checkpoint of this model"
                )


@torch.no_grad()
def unpack(optimizer: HybridDeviceOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Write states into their homes; parameters without one start anew."""
    for key, param, member in _keyed(optimizer, state_dict):
        saved = state_dict["state"].get(key, {})
        # An fp32 parameter is its own master, so its checkpoint has none: the copy on the host follows it.
        anew = {STEP: torch.tensor(0.0), MASTER: param.detach()}
        for name in (STEP, *optimizer._algorithm.moments, MASTER):
            value = saved.get(name)
            member[name] = anew.get(name, torch.zeros(())) if value is None else value


def _keyed(
    optimizer: HybridDeviceOptimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, torch.Tensor, MemberState]]:
    """Yield each parameter with its key in `state_dict`; frozen ones have a key but no member.

    Keys are running numbers in `torch.optim`, and names of parameters in distributed checkpoints.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, param in zip(keys, params, strict=True):
        if param in optimizer._members:
            yield key, param, optimizer.state[param]
