# SPDX-License-Identifier: Apache-2.0
"""Which formula updates a parameter group: the optimizer's own of elements, or one of whole matrices.

A group says it with `algorithm`, or as Muon's reference implementation spells it with `use_muon`. Explained in
docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from reference_impl.optimizers.algorithms import (
    Adam,
    Algorithm,
    AnyAlgorithm,
    MatrixAlgorithm,
    Muon,
    group_defaults,
)


def matrices_of(group: Mapping[str, Any], default: MatrixAlgorithm | None = None) -> MatrixAlgorithm | None:
    """Return the formula of matrices of a group, or `default` if it names none.

    Raises ValueError for `use_muon` that is no bool or contradicts `algorithm`, TypeError for no such formula.
    """
    named, use_muon = group.get("algorithm"), group.get("use_muon")
    if use_muon is not None and not isinstance(use_muon, bool):
        raise ValueError(f"use_muon is {use_muon!r}; expected True or False")
    if named is None:
        return default if use_muon is None else Muon() if use_muon else None
    if not is_of_matrices(named):
        raise TypeError(
            f"algorithm of a group is {named!r}; expected a formula of matrices, as Muon(), because that of elements "
            "is one for the whole optimizer; try leaving it out"
        )
    if use_muon is not None and use_muon != isinstance(named, Muon):
        raise ValueError(
            f"use_muon is {use_muon} beside {named!r}; expected one of them; try algorithm alone"
        )
    matrices: MatrixAlgorithm = named
    return matrices


def is_of_matrices(algorithm: Algorithm | MatrixAlgorithm | object) -> bool:
    """Return whether a formula updates whole matrices."""
    return hasattr(algorithm, "update_matrix") and not isinstance(algorithm, type)


def known_options(algorithm: AnyAlgorithm, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `options` of a formula."""
    known = {*algorithm.defaults, *algorithm.fixed, *algorithm.kernels}
    return {name: value for name, value in options.items() if name in known}


def formulas_in(
    params: Any, algorithm: Algorithm | MatrixAlgorithm | None
) -> tuple[Any, Sequence[Any], MatrixAlgorithm | None]:
    """Return `params` (read only once), all formulas, and the default formula of matrices.

    The first formula is that of elements: `algorithm`, or AdamW if that is None or a formula of matrices.
    """
    params = params if isinstance(params, torch.Tensor | dict) else list(params)
    default: Any = algorithm if is_of_matrices(algorithm) else None
    elements = Adam() if algorithm is None or default is not None else algorithm
    groups = [group for group in params if isinstance(group, Mapping)] if isinstance(params, list) else []
    named = [matrices_of(group, default) for group in groups] or [default]
    return params, list(dict.fromkeys([elements, *filter(None, named)])), default


class GroupFormulas:
    """The formula of each parameter group of one optimizer, in the order of its groups.

    Args:
        elements: updates groups that no formula of matrices updates.
        default: the default formula of matrices of groups; None if `elements` updates them.
    """

    def __init__(self, elements: Algorithm, default: MatrixAlgorithm | None) -> None:
        self.elements, self.default = elements, default
        self.matrices: list[MatrixAlgorithm | None] = []

    def __iter__(self) -> Iterator[AnyAlgorithm]:
        """Iterate over the formula of each group."""
        return (matrices or self.elements for matrices in self.matrices)

    @property
    def last(self) -> AnyAlgorithm:
        """The formula of the group that was added last."""
        return self.matrices[-1] or self.elements

    def names_default(self, group: Mapping[str, Any]) -> bool:
        """Return whether a new group gets the default formula."""
        return matrices_of(group, self.default) == self.default

    def complete(
        self, group: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[MatrixAlgorithm | None, dict[str, Any]]:
        """Return a new group's formula of matrices (None without one), and the group with all its keys.

        A group has the hyper-parameters of its formula alone, as in torch's class; `options` fill groups that lack
        them.
        """
        matrices = matrices_of(group, self.default)
        algorithm = matrices or self.elements
        # Another optimizer may be made of the same groups.
        completed = {name: value for name, value in group.items() if name != "algorithm"}
        for name, value in {**group_defaults(algorithm), **known_options(algorithm, options)}.items():
            completed.setdefault(name, value)
        return matrices, completed

    def by_param(self, groups: Iterable[Mapping[str, Any]]) -> dict[torch.Tensor, MatrixAlgorithm]:
        """Return the formulas of parameters of `groups` that are updated in matrices."""
        return {
            param: matrices
            for group, matrices in zip(groups, self.matrices, strict=True)
            for param in group["params"]
            if matrices is not None
        }
