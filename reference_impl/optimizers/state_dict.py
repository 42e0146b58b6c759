# SPDX-License-Identifier: Apache-2.0
"""Saves and loads states in the layout of `torch.optim.AdamW`, both ways, at any split.

Parameters are known by a key: running numbers in `torch.optim`, names of parameters in distributed checkpoints.
Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from reference_impl.optimizers.algorithms import AnyAlgorithm, group_defaults
from reference_impl.optimizers.parameter_state import OptimizerState
from reference_impl.optimizers.saved_checks import Groups, check_document, check_groups, check_state


def saved(groups: Groups, algorithms: Iterable[AnyAlgorithm], state: OptimizerState) -> dict[str, Any]:
    """Return the state_dict of `groups`, each updated by its formula of `algorithms`, with copies of their `state`."""
    keys: dict[torch.Tensor, int] = {}
    listed = []
    for group, algorithm in zip(groups, algorithms, strict=True):
        for param in group["params"]:
            keys.setdefault(param, len(keys))
        listed.append(
            {
                **group_defaults(algorithm),
                **{name: value for name, value in group.items() if name != "params"},
                # Whatever the user's group says.
                **algorithm.kernels,
                "params": [keys[param] for param in group["params"]],
            }
        )
    packed = {keys[param]: state.packed(param) for param in state}
    waiting = {keys[param]: copy.deepcopy(values) for param, values in state.waiting.items() if param in keys}
    return {"state": {**packed, **waiting}, "param_groups": listed}


def checked(
    document: Any,
    groups: Groups,
    formulas: Iterable[AnyAlgorithm],
    state: OptimizerState,
) -> tuple[list[dict[str, Any]], dict[torch.Tensor, Any], dict[torch.Tensor, Any]]:
    """Return the groups of a state_dict, to be taken over under `formulas`, and the states to write by parameter.

    States of frozen parameters come last: they wait for a gradient.

    Raises ValueError with the name of an entry that cannot be loaded exactly.
    """
    saved_groups, states = check_document(document)
    formulas = list(formulas)
    check_groups(saved_groups, groups, formulas)
    params = dict(_keyed(groups, saved_groups))
    for key in states:
        if key not in params:
            raise ValueError(
                f"state[{key!r}] belongs to no parameter of param_groups; expected one of {len(params)} keys; try the "
                "checkpoint of this model"
            )
    waiting = {
        param: copy.deepcopy(states[key])
        for theirs, ours, algorithm in zip(saved_groups, groups, formulas, strict=True)
        for key, param in zip(theirs["params"], ours["params"], strict=True)
        if param not in state.members
        and check_state(f"state[{key!r}]", states.get(key, {}), param, algorithm)
    }
    found = {
        param: state.checked(f"state[{key!r}]", param, states.get(key, {}))
        for key, param in params.items()
        if param in state.members
    }
    taken_over = [
        {**copy.deepcopy({**theirs, "params": []}), "params": ours["params"]}
        for theirs, ours in zip(saved_groups, groups, strict=True)
    ]
    for group, ours in zip(taken_over, groups, strict=True):
        if "param_names" in ours:
            group.setdefault("param_names", ours["param_names"])
    return taken_over, found, waiting


def take_over(groups: Sequence[dict[str, Any]], loaded: Groups, algorithms: Iterable[AnyAlgorithm]) -> None:
    """Give `groups` the hyper-parameters of `loaded` ones.

    The dicts stay the same objects: another optimizer may share them, see `HostedOptimizer.take_place_of`.
    """
    for ours, group, algorithm in zip(groups, loaded, algorithms, strict=True):
        options = {**group_defaults(algorithm), **group, **algorithm.kernels}
        # At once: a scheduler finds each rate, whenever a signal comes.
        ours.update(options)
        for name in ours.keys() - options.keys():
            del ours[name]


def passed_through(
    hooks: Mapping[int, Callable[..., Any]], optimizer: object, document: dict[str, Any]
) -> dict[str, Any]:
    """Return `document`, or another one by which a hook of torch's has replaced it."""
    for hook in hooks.values():
        replaced = hook(optimizer, document)
        document = document if replaced is None else replaced
    return document


def makes_states_only(groups: Groups, state: OptimizerState) -> bool:
    """Return whether a first step only shows states, as torch.distributed.checkpoint.state_dict takes one.

    It may have loaded the model before: its weights are to stay, so that no master of before may come back.
    """
    return all(float(group["lr"]) == 0 for group in groups) and not state


def _keyed(groups: Groups, saved_groups: Groups) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each key with its parameter."""
    for group, theirs in zip(groups, saved_groups, strict=True):
        yield from zip(theirs["params"], group["params"], strict=True)


class StateWrites:
    """Writes that a load, or a refresh of masters, has begun; after an error or a signal the next call goes on.

    Each may be made twice. None waits for updates: whoever waits makes these writes first.
    """

    def __init__(self) -> None:
        self._writes: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        """Return whether there are writes to make."""
        return bool(self._writes)

    def replace(self, writes: Iterable[Callable[[], None]]) -> None:
        """Make `writes`, in place of others that an error has kept from being made."""
        self._writes = deque(writes)
        self.go_on()

    def make(self, write: Callable[[], None]) -> None:
        """Make one write, behind the ones left by an error."""
        self._writes.append(write)
        self.go_on()

    def go_on(self) -> None:
        """Make the pending writes: one that an error or a signal has cut short is made again from its start."""
        while self._writes:
            self._writes[0]()
            self._writes.popleft()

    def clear(self) -> None:
        """Forget all writes."""
        self._writes.clear()
