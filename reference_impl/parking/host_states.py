"""What is parked as `state_dict()` has it, read and written on the host, where nothing moves.

Explained in docs/parking.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
from torch.utils._pytree import tree_flatten, tree_map

from reference_impl.parking.storage import ParkedStorage


def states_on_host(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], parked: Sequence[ParkedStorage]
) -> dict[str, Any]:
    """Return `{"model": ..., "optimizer": ...}`, each a list where there are several.

    What is parked is a view of its host memory; what is not is the tensor itself. A shard is a DTensor whose part is on
    the host, as those of torch's `StateDictOptions(cpu_offload=True)`.
    """
    by_storage = {each.storage_key: each for each in parked}

    def read(leaf: Any) -> Any:
        # A DTensor has its mesh for a part, too.
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if is_traceable_wrapper_subclass(leaf):
            return transform_subclass(leaf, lambda _, part: read(part))
        found = by_storage.get(leaf.untyped_storage()._cdata)
        return leaf if found is None else found.on_host(leaf)

    states = {
        "model": tree_map(read, [each.state_dict() for each in models]),
        "optimizer": tree_map(read, [each.state_dict() for each in optimizers]),
    }
    return {key: value[0] if len(value) == 1 else value for key, value in states.items()}


def copied(states: dict[str, Any]) -> dict[str, Any]:
    """Return `states` with a copy of each tensor."""
    return tree_map(  # type: ignore[no-any-return]
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, states
    )


def write_states(mine: dict[str, Any], theirs: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Write `theirs` into the tensors of `mine`, which `states_on_host` has made, and into groups of `optimizers`.

    Raises ValueError for another structure, shape or dtype, before anything is written.
    """
    into, structure = tree_flatten(mine)
    values, other = tree_flatten(theirs)
    if not isinstance(theirs, Mapping) or structure != other:
        raise ValueError(
            f"the states have another structure than this training ({len(values)} entries for {len(into)}); expected "
            "what state_dict() returned of the same one; try load_state_dict() of each after restore()"
        )
    for target, value in zip(into, values, strict=True):
        if isinstance(target, torch.Tensor) and (
            not isinstance(value, torch.Tensor) or value.shape != target.shape or value.dtype != target.dtype
        ):
            found = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
            raise ValueError(
                f"a state is {found}; expected {(target.shape, target.dtype)}; try the checkpoint of this model"
            )
    with torch.no_grad():
        for target, value in zip(into, values, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(value)
    listed = theirs["optimizer"] if isinstance(theirs["optimizer"], list) else [theirs["optimizer"]]
    for optimizer, saved in zip(optimizers, listed, strict=True):
        for group, loaded in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
