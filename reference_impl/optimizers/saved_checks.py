# SPDX-License-Identifier: Apache-2.0
"""Checks that a saved optimizer can be loaded exactly; any other is refused before anything changes.

Explained in docs/optimizer-offloading.md. Every error is a ValueError that names the entry, as `state[3]["exp_avg"]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reference_impl.distributed.mesh import local_of
from reference_impl.optimizers.algorithms import AnyAlgorithm, group_defaults
from reference_impl.optimizers.checks import check_group
from reference_impl.optimizers.layout import MASTER, STEP

Groups = Sequence[Mapping[str, Any]]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Counters are fp32, and fp32 counts no further.
_MOST_STEPS = 2**24


def check_document(document: Any) -> tuple[Groups, Mapping[Any, Any]]:
    """Return the groups and the states by key of a state_dict; their entries are not checked yet."""
    if not isinstance(document, Mapping):
        raise ValueError(
            f"the state_dict is of type {type(document).__name__}; expected a mapping with 'state' and 'param_groups'; "
            "try the result of state_dict()"
        )
    for name, kind in (("param_groups", list | tuple), ("state", Mapping)):
        if not isinstance(document.get(name), kind):
            raise ValueError(
                f"{name} is of type {type(document.get(name)).__name__}; expected a "
                f"{'mapping' if name == 'state' else 'list'}; try the result of state_dict()"
            )
    return document["param_groups"], document["state"]


def check_groups(saved: Groups, groups: Groups, algorithms: Sequence[AnyAlgorithm]) -> None:
    """Refuse saved groups of other sizes than `groups`, and with hyper-parameters that its formula cannot use."""
    for index, group in enumerate(saved):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(
                f"param_groups[{index}] is {type(group).__name__} without a list of 'params'; expected a group; try "
                "the result of state_dict()"
            )
    sizes, expected = [[len(group["params"]) for group in each] for each in (saved, groups)]
    if sizes != expected:
        raise ValueError(
            f"the state_dict has groups of {sizes} parameters; expected {expected}; try constructing with the same "
            "groups"
        )
    keys = [key for group in saved for key in group["params"]]
    if not all(isinstance(key, int | str) for key in keys):
        raise ValueError(
            "params of param_groups are neither numbers nor names; try the result of state_dict()"
        )
    if len(set(keys)) != len({id(param) for group in groups for param in group["params"]}):
        raise ValueError("params of param_groups name a parameter twice; expected each one once")
    for index, (group, algorithm) in enumerate(zip(saved, algorithms, strict=True)):
        try:
            check_group(algorithm, {**group_defaults(algorithm), **group, "params": []})
        except ValueError as error:
            raise ValueError(f"in param_groups[{index}]: {error}") from None


def check_state(label: str, saved: Any, param: torch.Tensor, algorithm: AnyAlgorithm) -> dict[str, Any]:
    """Return the states of one parameter as they are to be written; nothing for a parameter without a step."""
    if not isinstance(saved, Mapping):
        raise ValueError(
            f"{label} is of type {type(saved).__name__}; expected a mapping of names to tensors; try the result "
            "of state_dict()"
        )
    # torch's SGD without momentum saves a buffer that is None.
    if all(value is None for value in saved.values()):
        return {}
    needed = (STEP, *algorithm.moments) if algorithm.counts_steps else algorithm.moments
    known = (STEP, *algorithm.moments, MASTER)
    for name in saved:
        if name not in known:
            raise ValueError(
                f"{label}[{name!r}] is not known; expected {', '.join(known)}; try a checkpoint of the same algorithm"
            )
    for name in needed:
        if name not in saved:
            raise ValueError(
                f"{label} has no {name!r}; expected {', '.join(needed)}; try a checkpoint of the same algorithm"
            )
    for name in (*algorithm.moments, MASTER):
        if name in saved:
            check_values(f"{label}[{name!r}]", saved[name], param)
    if MASTER in saved and saved[MASTER].dtype != torch.float32:
        raise ValueError(
            f"{label}[{MASTER!r}] is of dtype {saved[MASTER].dtype}; expected float32, which torch's own optimizers "
            "cast to the parameter's dtype as they load it; try loading into the offloading optimizer itself"
        )
    step = _checked_step(f"{label}[{STEP!r}]", saved.get(STEP, 1))
    if step == 0:
        for name in algorithm.moments:
            if bool(_local(saved[name]).count_nonzero()):
                raise ValueError(
                    f"{label}[{name!r}] is not zero before the first step; expected zeros or a step"
                )
    return {**saved, STEP: step}


def check_values(label: str, value: Any, param: torch.Tensor) -> None:
    """Refuse all but a dense floating-point tensor of a parameter's shape, or of its shard."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{label} is of type {type(value).__name__}; expected a tensor")
    if value.dtype not in _DTYPES:
        raise ValueError(
            f"{label} is of dtype {value.dtype}; expected bfloat16, float16 or float32; try a checkpoint of torch's "
            "own optimizer, whose states are not quantized"
        )
    if value.is_meta or value.layout != torch.strided:
        raise ValueError(f"{label} is a tensor without dense values; expected its values")
    shape, expected = value.shape, local_of(param).shape
    if isinstance(value, DTensor):
        if not isinstance(param, DTensor) or value.placements != param.placements:
            raise ValueError(
                f"{label} is sharded as {value.placements}; expected the parameter's own placement; try "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
        if value.shape == param.shape:
            shape = value.to_local().shape
        else:
            expected = param.shape
    if shape != expected:
        raise ValueError(
            f"{label} has shape {tuple(shape)}; expected {tuple(expected)}; try the checkpoint of this model"
        )


def _checked_step(label: str, value: Any) -> float:
    number = value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        number = _local(value).item()
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{label} is {number!r}; expected a number of steps")
    # NaN and infinity fail the first comparison.
    if not 0 <= number <= _MOST_STEPS or number != int(number):
        raise ValueError(f"{label} is {number}; expected a whole number between 0 and {_MOST_STEPS}")
    return float(number)


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
