# SPDX-License-Identifier: Apache-2.0
"""The optimizers of torch that `OptimizerStateOffloader` can wrap, and how their states are taken over and given back.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from reference_impl.optimizers import checks
from reference_impl.optimizers.algorithms import (
    BY_TORCH_CLASS,
    SGD,
    Adam,
    Algorithm,
    AnyAlgorithm,
    MatrixAlgorithm,
    Muon,
)
from reference_impl.optimizers.formulas import GroupFormulas
from reference_impl.optimizers.saved_checks import check_document


class Wrapped(NamedTuple):
    """The replaced optimizers, the formula of the elementwise ones, and all groups.

    `matrices` has the formula of each group that is updated in matrices.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    algorithm: Algorithm
    matrices: list[MatrixAlgorithm | None]
    groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    @property
    def group_counts(self) -> list[int]:
        """How many groups each optimizer has."""
        return [len(each.param_groups) for each in self.optimizers]

    @property
    def matrices_by_param(self) -> dict[torch.Tensor, MatrixAlgorithm]:
        """The formulas of parameters that are updated in matrices."""
        return self.formulas.by_param(self.groups)

    @property
    def formulas(self) -> GroupFormulas:
        """The formula of each group, and of groups that come later."""
        formulas = GroupFormulas(self.algorithm, self.matrices[0] if all(self.matrices) else None)
        formulas.matrices = self.matrices
        return formulas


def wrapped_in(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> Wrapped:
    """Return the formulas and groups of one optimizer, or of several that are stepped together.

    Raises TypeError and ValueError for optimizers that cannot be wrapped, or not together.
    """
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    others = [each for each in optimizers if type(each) is not torch.optim.Muon]
    algorithms = list(dict.fromkeys(map(algorithm_of, others)))
    if not optimizers or len(algorithms) > 1:
        raise ValueError(
            f"given were {', '.join(type(each).__name__ for each in optimizers) or 'no optimizers'}; expected "
            "torch.optim.Muon, one other whose formula is of elements, or both; try [Muon, AdamW]"
        )
    matrices: list[MatrixAlgorithm | None] = []
    for each in optimizers:
        matrices += [None if each in others else Muon()] * len(each.param_groups)
    groups = [group for each in optimizers for group in each.param_groups]
    for formula, group in zip(matrices, groups, strict=True):
        if formula is not None:
            check_group(formula, group)
    if len(optimizers) == 1:
        groups, defaults = optimizers[0].param_groups, optimizers[0].defaults
    else:
        # No option holds for all groups.
        defaults = {}
    return Wrapped(optimizers, algorithms[0] if algorithms else Adam(), matrices, groups, defaults)


def algorithm_of(optimizer: torch.optim.Optimizer) -> Algorithm:
    """Return the formula of a wrapped optimizer that updates elements.

    Raises TypeError for a class that is not in `BY_TORCH_CLASS` itself, and as `check_group`.
    """
    formula = BY_TORCH_CLASS.get(type(optimizer))
    if formula is None:
        names = ", ".join(each.__name__ for each in BY_TORCH_CLASS)
        raise TypeError(
            f"the formula of {type(optimizer).__name__} is not among those that update offloaded states here; expected "
            f"{names} or Muon of torch.optim, and none of their subclasses; try AdamW(fused=True)"
        )
    algorithm = formula(optimizer.defaults)
    for group in optimizer.param_groups:
        check_group(algorithm, group)
    return algorithm


def check_group(algorithm: AnyAlgorithm, group: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the update in chunks does not have, or a parameter it cannot take."""
    if algorithm.kernels and group.get("fused") is not True:
        raise ValueError(
            f"the optimizer's fused is {group.get('fused')}; expected True, the update whose bits are kept; "
            "try fused=True where it is made"
        )
    checks.check_group(algorithm, group)
    if algorithm == SGD() and group["momentum"] == 0:
        raise ValueError("momentum is 0; expected a positive one, without which SGD has no state to offload")


def divided(document: Mapping[str, Any], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Return the parts of a state_dict that have so many groups each, numbered as torch numbers one optimizer's."""
    parts, groups = [], iter(document["param_groups"])
    for count in counts:
        listed = list(islice(groups, count))
        keys = {key: number for number, key in enumerate(key for group in listed for key in group["params"])}
        parts.append(
            {
                "state": {keys[key]: state for key, state in document["state"].items() if key in keys},
                "param_groups": [
                    {**group, "params": [keys[key] for key in group["params"]]} for group in listed
                ],
            }
        )
    return parts


def joined(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state_dict of several, as `divided` takes it apart; none of them is changed."""
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for document in documents:
        listed, saved = check_document(document)
        first = sum(len(group["params"]) for group in groups)
        keys = {key: first + n for n, key in enumerate(key for group in listed for key in group["params"])}
        groups += ({**group, "params": [keys[key] for key in group["params"]]} for group in listed)
        # A key of no group stays, and is refused as one of a single document is.
        state |= {keys.get(key, f"{key} of no group"): value for key, value in saved.items()}
    return {"state": state, "param_groups": groups}
