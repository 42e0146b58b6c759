"""The states of an optimizer in the layout of `torch.optim.AdamW`, both ways, at any split.

Parameters are known by a key: running numbers in `torch.optim`, names of parameters in distributed checkpoints.
Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reference_impl.optimizers.layout import MASTER, STEP
from reference_impl.optimizers.parameter_state import OptimizerState, ParameterState

Groups = Sequence[Mapping[str, Any]]


def pack(state: Mapping[Any, ParameterState]) -> dict[Any, dict[str, torch.Tensor]]:
    """Return copies of states, under the same keys."""
    return {key: {name: each.copied(name) for name in each} for key, each in state.items()}


def check(state: OptimizerState, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError when `state_dict` is not one of the parameters in `groups`, those of `state`."""
    theirs = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in theirs]:
        raise ValueError(
            f"the state_dict has groups of {[len(g['params']) for g in theirs]} parameters; expected "
            f"{[len(g['params']) for g in groups]}; try constructing with the same groups"
        )
    if any(group.get("amsgrad") for group in theirs):
        raise ValueError(
            "the state_dict is of amsgrad=True; expected amsgrad=False, whose maximum is not kept here; try training "
            "on without offload"
        )
    for key, param in _keyed(state, groups, theirs):
        names = set(state[param]) - {STEP}
        for name, value in state_dict["state"].get(key, {}).items():
            expected = param.shape if isinstance(value, DTensor) else state.members[param].param_local.shape
            if name in names and value.shape != expected:
                raise ValueError(
                    f"{name} of parameter {key} has shape {tuple(value.shape)}; expected "
                    f"{tuple(expected)}; try the checkpoint of this model"
                )


@torch.no_grad()
def unpack(state: OptimizerState, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Write the states of `state_dict`, which `check` has passed; parameters without one start anew."""
    for key, param in _keyed(state, groups, state_dict["param_groups"]):
        saved, target = state_dict["state"].get(key, {}), state[param]
        # An fp32 parameter is its own master, so its checkpoint has none: the copy on the host follows it.
        anew = {STEP: torch.tensor(0.0), MASTER: param.detach()}
        for name in (STEP, *state.moments, MASTER):
            value = saved.get(name)
            target[name] = anew.get(name, torch.zeros(())) if value is None else value


def _keyed(state: OptimizerState, groups: Groups, saved_groups: Groups) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each trained parameter with its key; frozen ones have a key but no state."""
    params = [param for group in groups for param in group["params"]]
    keys = [key for group in saved_groups for key in group["params"]]
    for key, param in zip(keys, params, strict=True):
        if param in state.members:
            yield key, param
