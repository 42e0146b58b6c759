"""Which formula updates a parameter group: the optimizer's own of elements, or one of whole matrices.

A group says it with `algorithm`, or as Muon's reference implementation spells it with `use_muon`. Explained in
docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reference_impl.optimizers.algorithms import Adam, Algorithm, AnyAlgorithm, MatrixAlgorithm, Muon


def matrices_of(group: Mapping[str, Any], default: MatrixAlgorithm | None = None) -> MatrixAlgorithm | None:
    """Return the formula of matrices that a group names, or `default` where it names none.

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
    """Return those of `options` that a formula has."""
    known = {*algorithm.defaults, *algorithm.fixed, *algorithm.kernels}
    return {name: value for name, value in options.items() if name in known}


def formulas_in(
    params: Any, algorithm: Algorithm | MatrixAlgorithm | None
) -> tuple[Any, Sequence[Any], MatrixAlgorithm | None]:
    """Return `params`, which may be read once only, all formulas, and that of matrices for groups that name none.

    The first formula is that of elements: `algorithm`, or AdamW where that is none or one of matrices.
    """
    params = params if isinstance(params, torch.Tensor | dict) else list(params)
    default: Any = algorithm if is_of_matrices(algorithm) else None
    elements = Adam() if algorithm is None or default is not None else algorithm
    groups = [group for group in params if isinstance(group, Mapping)] if isinstance(params, list) else []
    named = [matrices_of(group, default) for group in groups] or [default]
    return params, list(dict.fromkeys([elements, *filter(None, named)])), default
