# SPDX-License-Identifier: Apache-2.0
"""States of `state_dict()`, read and written in place: nothing moves, and parked states are on the host.

Explained in docs/parking.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map

from reference_impl.memory.absent import describes, own_class
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.parking.storage import ParkedStorage

_Read = Callable[[Any], Any]


class HostStates:
    """The states of `models` and `optimizers`; the bytes of `parked` are on the host."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        parked: Iterable[ParkedStorage],
        *,
        follow: Sequence[Callable[[], None]],
    ) -> None:
        """`follow` makes masters follow weights written before they were parked."""
        self._models, self._optimizers, self._follow = models, optimizers, follow
        self._read = _reader(parked)

    def copied(self) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ...}`, each a list where there are several, as copies on the CPU.

        A shard is a DTensor with its part on the CPU, as with torch's `StateDictOptions(cpu_offload=True)`.
        """
        copies = {key: tree_map(_copied, states) for key, states in self._where_they_are().items()}
        return {key: each[0] if len(each) == 1 else each for key, each in copies.items()}

    def write(self, theirs: object) -> None:
        """Write `theirs`, a result of `copied` for the same training, into tensors and groups.

        Raises ValueError for another structure, shape or dtype, before anything is written.
        """
        if not isinstance(theirs, Mapping) or set(theirs) != {"model", "optimizer"}:
            raise _other_structure(theirs)
        several = {"model": len(self._models), "optimizer": len(self._optimizers)}
        listed = {key: [theirs[key]] if count == 1 else theirs[key] for key, count in several.items()}
        mine = self._where_they_are()
        pairs = _checked(mine["model"], listed["model"])
        _checked(mine["optimizer"], listed["optimizer"])
        ours, others = [], []
        for optimizer, states, loaded in zip(
            self._optimizers, mine["optimizer"], listed["optimizer"], strict=True
        ):
            if isinstance(optimizer, HostedOptimizer):
                ours.append(partial(optimizer.load_state_dict, loaded))
            else:
                pairs += _checked(states, loaded)
                others.append(partial(_take_over_groups, optimizer, loaded))
        with _OnHost(self._read):
            # Once in front of the weights, because it checks; once behind, because masters of fp32 are their weights.
            for load in ours:
                load()
            _write(pairs)
            for load in (*ours, *others):
                load()

    def _where_they_are(self) -> dict[str, list[Any]]:
        """Return the states: of parked tensors views of their host memory, of others themselves.

        Our optimizers put theirs together, so theirs are copies.
        """
        with _OnHost(self._read):
            for follow in self._follow:
                follow()
            ours = {
                index: each.state_dict()
                for index, each in enumerate(self._optimizers)
                if isinstance(each, HostedOptimizer)
            }
        optimizers = [
            ours[index] if index in ours else each.state_dict() for index, each in enumerate(self._optimizers)
        ]
        return {
            "model": tree_map(self._read, [each.state_dict() for each in self._models]),
            "optimizer": tree_map(self._read, optimizers),
        }


class _OnHost(TorchFunctionMode):
    """Inside, a tensor that is parked is computed with as it is on the host; its shape and dtype it says itself."""

    def __init__(self, read: _Read) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give `func` the tensors on the host."""
        kwargs = kwargs or {}
        if not describes(func):
            args = [self._given(each) for each in args]
            kwargs = {name: self._given(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)

    def _given(self, argument: Any) -> Any:
        # Most calls have only numbers, calls of grad mode nothing else; a walk of a tree costs ten times as much.
        if isinstance(argument, torch.Tensor):
            return self._read(argument)
        return tree_map(self._read, argument) if isinstance(argument, list | tuple | dict) else argument


def _reader(parked: Iterable[ParkedStorage]) -> _Read:
    by_storage = {each.storage_key: each for each in parked}

    def read(leaf: Any) -> Any:
        # A DTensor has its mesh for a part, too.
        if not _is_tensor(leaf):
            return leaf
        if is_traceable_wrapper_subclass(leaf):
            return _of_parts(leaf, read)
        if leaf.layout is not torch.strided:
            return leaf
        found = by_storage.get(leaf.untyped_storage()._cdata)
        return leaf if found is None else found.on_host(leaf)

    return read


def _of_parts(wrapper: Any, made_of: _Read) -> Any:
    """Return a copy of `wrapper`, of its computing class, with parts made by `made_of` from its own."""
    names, context = wrapper.__tensor_flatten__()
    parts = {name: made_of(getattr(wrapper, name)) for name in names}
    cls: Any = own_class(wrapper)
    return cls.__tensor_unflatten__(parts, context, wrapper.size(), wrapper.stride())


def _copied(leaf: Any) -> Any:
    """Return a copy of `leaf` on the CPU, part by part: quantized states do not copy from the CPU to itself."""
    if not _is_tensor(leaf):
        return leaf
    if is_traceable_wrapper_subclass(leaf):
        return _of_parts(leaf, _copied)
    return leaf.detach().to("cpu", copy=True)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _checked(mine: object, theirs: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor of `mine` with that of `theirs`. Raises ValueError where they are not alike."""
    into, structure = tree_flatten(mine)
    values, other = tree_flatten(theirs)
    if structure != other:
        raise _other_structure(theirs)
    pairs = [(target, value) for target, value in zip(into, values, strict=True) if _is_tensor(target)]
    for target, value in pairs:
        if not _is_tensor(value) or value.shape != target.shape or value.dtype != target.dtype:
            found = (value.shape, value.dtype) if _is_tensor(value) else value
            raise ValueError(
                f"a state is {found}; expected {(target.shape, target.dtype)}; try the checkpoint of this model"
            )
    return pairs


def _other_structure(theirs: object) -> ValueError:
    return ValueError(
        f"the states have another structure than this training ({len(tree_flatten(theirs)[0])} entries); expected "
        "those of state_dict() of the same one; try load_state_dict() of each after restore()"
    )


def _take_over_groups(optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


@torch.no_grad()
def _write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, value in pairs:
        target.copy_(value)
