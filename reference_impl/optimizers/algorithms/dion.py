# SPDX-License-Identifier: Apache-2.0
"""Dion: one step of a power iteration makes a low-rank part of the momentum orthonormal.

From the published formula (arXiv 2504.05295, algorithm 1, scaled by the root of rows over columns). A rank below the
full one saves products and not bytes: the right factor is kept in the first rows of a state of the matrix's shape. It
begins as cosines, which are orthogonal, not as noise, so that every run is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any

import torch

from reference_impl.optimizers.algorithms.base import check_learning_rate, check_numbers
from reference_impl.optimizers.algorithms.matrices import MatrixAlgorithm, Work, check_shapes


@dataclass(frozen=True)
class Dion(MatrixAlgorithm):
    """Dion for matrices and stacks of them; embeddings, heads and vectors are AdamW's."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The rank is `rank_fraction` of the shorter side; `eps` is the least norm that a factor is divided by."""
        return {"lr": 1e-2, "weight_decay": 0.0, "momentum": 0.95, "rank_fraction": 1.0, "eps": 1e-8}

    @property
    def counts_steps(self) -> bool:
        """The first step begins the right factor."""
        return True

    @property
    def moments(self) -> tuple[str, ...]:
        """The momentum that is left, and the right factor, transposed, in its first rows."""
        return ("momentum_buffer", "right_factor")

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a number out of range, and for a parameter that is no matrix."""
        check_learning_rate(group)
        check_numbers(group, "momentum", "rank_fraction", "eps")
        if group["momentum"] > 1 or not 0 < group["rank_fraction"] <= 1:
            raise ValueError(
                f"momentum is {group['momentum']} and rank_fraction {group['rank_fraction']}; expected at most 1 each, "
                "and a rank above 0"
            )
        check_shapes("Dion", group, instead="AdamW")

    def update_matrix(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moments: Sequence[torch.Tensor],
        step: torch.Tensor,
        group: Mapping[str, Any],
        work: Work,
    ) -> None:
        """Update master, `momentum_buffer` and `right_factor` of one matrix."""
        rows, columns = master.shape
        rank = max(round(group["rank_fraction"] * min(rows, columns)), 1)
        lr, dtype = float(group["lr"]), master.dtype
        average, factor, changed = (work.like(each) for each in (*moments, master))
        work.launch(torch.add, moments[0], gradient, out=average)
        right = self._right(moments[1][:rank], step, work)
        sketch, left = (work.new((rows, rank), dtype) for _ in range(2))
        work.launch(torch.mm, average, right.T, out=sketch)
        # The one kernel whose own workspace does not come from here.
        work.launch(torch.linalg.qr, sketch, out=(left, work.new((rank, rank), dtype)))
        work.launch(torch.mm, left.T, average, out=right)
        work.launch(average.addmm_, left, right, alpha=group["momentum"] - 1)
        norms = work.new((rank, 1), dtype)
        work.launch(torch.linalg.vector_norm, right, dim=1, keepdim=True, out=norms)
        work.launch(norms.clamp_, min=group["eps"])
        work.launch(right.div_, norms)
        work.launch(factor.zero_)
        work.launch(factor[:rank].copy_, right)
        work.launch(torch.mul, master, 1 - lr * group["weight_decay"], out=changed)
        work.launch(changed.addmm_, left, right, alpha=-lr * sqrt(rows / columns))
        for before, after in zip((master, *moments), (changed, average, factor), strict=True):
            work.replace(before, after)

    def _right(self, factor: torch.Tensor, step: torch.Tensor, work: Work) -> torch.Tensor:
        """Return the transposed right factor in `work`: `factor`, or before the first step cosines."""
        rank, columns = factor.shape
        right, is_first = work.new(factor.shape, factor.dtype), work.new((), torch.bool)
        frequency, place = work.new((rank,), factor.dtype), work.new((columns,), factor.dtype)
        work.launch(torch.arange, rank, out=frequency)
        work.launch(torch.arange, 0.5, columns, out=place)
        work.launch(torch.mul, frequency[:, None], place[None, :], out=right)
        work.launch(right.mul_, pi / columns)
        work.launch(right.cos_)
        work.launch(torch.eq, step, 1, out=is_first)
        work.launch(torch.where, is_first, right, factor, out=right)
        return right
