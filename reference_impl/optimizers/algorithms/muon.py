# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum that is made orthogonal, as `torch.optim.Muon` updates matrices.

Bitwise torch's over fp32 parameters on the same device: the same kernels, for one matrix at a time. The fifth-degree
iteration after Newton and Schulz runs in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch

from reference_impl.optimizers.algorithms.base import (
    check_learning_rate,
    check_numbers,
    check_switches,
    is_number,
)
from reference_impl.optimizers.algorithms.matrices import ShardedMatrixAlgorithm, Work, check_shapes

_ADJUSTS = (None, "original", "match_rms_adamw")
# From so many on torch refuses.
_MOST_ITERATIONS = 100


@dataclass(frozen=True)
class Muon(ShardedMatrixAlgorithm):
    """Muon for matrices and stacks of them; embeddings, heads and vectors are AdamW's."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Hyper-parameters of `torch.optim.Muon`."""
        return {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": (3.4445, -4.7750, 2.0315),
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
        }

    @property
    def counts_steps(self) -> bool:
        """It needs none."""
        return False

    @property
    def moments(self) -> tuple[str, ...]:
        """The mean of gradients."""
        return ("momentum_buffer",)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError as `torch.optim.Muon` does, and where a value is no number, or a parameter no matrix."""
        check_learning_rate(group)
        check_numbers(group, "momentum", "eps")
        check_switches(group, "nesterov")
        coefficients, iterations, adjust = (
            group[name] for name in ("ns_coefficients", "ns_steps", "adjust_lr_fn")
        )
        listed = list(coefficients) if isinstance(coefficients, tuple | list) else []
        if len(listed) != 3 or not all(map(is_number, listed)):
            raise ValueError(f"ns_coefficients are {coefficients!r}; expected three numbers")
        if not isinstance(iterations, int) or not 0 <= iterations < _MOST_ITERATIONS:
            raise ValueError(f"ns_steps is {iterations!r}; expected 0 to {_MOST_ITERATIONS - 1}; try 5")
        if adjust not in _ADJUSTS:
            raise ValueError(f"adjust_lr_fn is {adjust!r}; expected one of {_ADJUSTS}")
        check_shapes("Muon", group, instead="AdamW", sharded=True)

    def update_matrix(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moments: Sequence[torch.Tensor],
        step: torch.Tensor,
        group: Mapping[str, Any],
        work: Work,
    ) -> None:
        """Update master and `momentum_buffer` of one matrix in place.

        In a skipped step momentum takes the gradient's place, so its mean is itself; the direction is zero, and
        nothing decays. So one kernel a matrix more than torch's keeps both as they were.
        """
        direction = self.before(gradient, moments, group, work)
        rounded = work.like(direction, self.crosses_as)
        work.launch(rounded.copy_, direction)
        self.after(master, self.of_whole(rounded, group, work), master.shape, group, work)

    @property
    def crosses_as(self) -> torch.dtype:
        """The dtype of Newton and Schulz's iteration."""
        return torch.bfloat16

    def before(
        self, gradient: torch.Tensor, moments: Sequence[torch.Tensor], group: Mapping[str, Any], work: Work
    ) -> torch.Tensor:
        """Update the mean of gradients, and return the matrix to be made orthogonal, in fp32."""
        (average,) = moments
        momentum = group["momentum"]
        if work.skipped is not None:
            work.launch(torch.where, work.skipped, average, gradient, out=gradient)
        work.launch(average.lerp_, gradient, 1 - momentum)
        if group["nesterov"]:
            work.launch(torch.lerp, gradient, average, momentum, out=gradient)
        return gradient if group["nesterov"] else average

    def of_whole(self, matrix: torch.Tensor, group: Mapping[str, Any], work: Work) -> torch.Tensor:
        """Return about the nearest matrix with orthogonal rows or columns, in bf16, of the same shape; or several."""
        return orthogonal(matrix, group, work)

    def after(
        self,
        master: torch.Tensor,
        result: torch.Tensor,
        shape: Sequence[int],
        group: Mapping[str, Any],
        work: Work,
    ) -> None:
        """Let the master decay, and add the direction."""
        kept, rate = decay_and_rate(shape, group)
        # The form of lists takes a number on the device at the speed of one on the host.
        work.launch(torch._foreach_mul_, [master], work.number(kept, if_skipped=1.0))
        work.launch(master.add_, result, alpha=-rate)


def decay_and_rate(shape: Sequence[int], group: Mapping[str, Any]) -> tuple[float, float]:
    """Return the factor of a master, and the learning rate of a matrix of `shape`."""
    lr = float(group["lr"])
    return 1 - lr * group["weight_decay"], lr * _ratio(shape, group["adjust_lr_fn"])


def orthogonal(matrix: torch.Tensor, group: Mapping[str, Any], work: Work) -> torch.Tensor:
    """Return about the nearest matrix to `matrix` (bf16, overwritten) with orthogonal rows or columns, of its shape.

    So it is for each one of a stack. Where the step is skipped it is zero: the norm of a finite `matrix` counts as
    infinite.
    """
    a, b, c = group["ns_coefficients"]
    *stack, rows, columns = matrix.shape
    is_tall = rows > columns
    flat = matrix.mT if is_tall else matrix
    multiply, add_product = (torch.bmm, torch.baddbmm) if stack else (torch.mm, torch.addmm)
    norms = work.new(stack, torch.bfloat16)
    # Each by itself: the norm of a stack's rows adds in another order.
    for each, norm in zip(flat.unbind(), norms.unbind(), strict=True) if stack else [(flat, norms)]:
        work.launch(torch.linalg.vector_norm, each, out=norm)
    work.launch(norms.clamp_, min=work.number(group["eps"], if_skipped=inf, dtype=norms.dtype))
    work.launch(flat.div_, norms[:, None, None] if stack else norms)
    rows, columns = flat.shape[-2:]
    gram, polynomial = (work.new((*stack, rows, rows), torch.bfloat16) for _ in range(2))
    # Products are written side by side, whatever the strides of the parameter; the first input's place is free then.
    product = work.new((*stack, rows, columns), torch.bfloat16)
    results = [product, flat.as_strided(product.shape, product.stride())]
    for _ in range(group["ns_steps"]):
        work.launch(multiply, flat, flat.mT, out=gram)
        work.launch(add_product, gram, gram, gram, beta=b, alpha=c, out=polynomial)
        work.launch(add_product, flat, polynomial, flat, beta=a, out=results[0])
        flat = results[0]
        results.reverse()
    return flat.mT if is_tall else flat


def _ratio(shape: Sequence[int], adjust: str | None) -> float:
    """Return the factor of a matrix's learning rate."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1, rows / columns))
