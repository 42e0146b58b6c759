# SPDX-License-Identifier: Apache-2.0
"""The protocol of an algorithm that updates whole matrices, and the scratch of its kernels.

Such a formula multiplies matrices, so nothing may cut one, and the CPU would take minutes for it. It runs on the device
once for each matrix; a stack (a parameter of three dimensions, as experts' weights) has several. Products of several at
once may round differently, see `streamed.batches`.

An algorithm is one function, `update_matrix`. It changes nothing if `Work` says that the step is skipped; the host does
not know that. All results go into `Work`, because nothing may be allocated once a step has begun. An algorithm in three
parts, with the whole matrix in the second alone (`ShardedMatrixAlgorithm`), also updates sharded matrices, and several
of one shape in one call.

Explained in docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Protocol, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from reference_impl.distributed.matrix_owners import cut_of
from reference_impl.optimizers.algorithms.base import AnyAlgorithm

# Of the places in the scratch: vectorised kernels and products read whole lines.
_ALIGNMENT_BYTES = 256
# At the front of the scratch: numbers that `Work.number` keeps for all matrices.
_NUMBERS_BYTES = 8 * _ALIGNMENT_BYTES


class MatrixAlgorithm(AnyAlgorithm, Protocol):
    """A formula whose unit is a matrix. It has no choice of kernels and no fixed options, unless it names some."""

    def __hash__(self) -> int:
        # The scratch of equal formulas is counted once for each shape.
        return object.__hash__(self)

    @property
    def kernels(self) -> Mapping[str, Any]:
        """None."""
        return {}

    @property
    def fixed(self) -> Mapping[str, Any]:
        """None."""
        return {}

    def update_matrix(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moments: Sequence[torch.Tensor],
        step: torch.Tensor,
        group: Mapping[str, Any],
        work: Work,
    ) -> None:
        """Update master and moments of one matrix in place; where the step is skipped they keep their values.

        All are fp32 of the matrix's shape, with the strides of the parameter. `gradient` may be overwritten; in a
        skipped step it is not finite. `step` (0-dim, on the device) counts this step. Its part of `work` depends on
        shape and strides alone.
        """


class ShardedMatrixAlgorithm(MatrixAlgorithm, Protocol):
    """A formula whose first and last part are of elements, so that ranks compute them on their shards."""

    @property
    def crosses_as(self) -> torch.dtype:
        """The dtype of `of_whole`'s argument and result, and of matrices sent between ranks."""

    def before(
        self, gradient: torch.Tensor, moments: Sequence[torch.Tensor], group: Mapping[str, Any], work: Work
    ) -> torch.Tensor:
        """Update moments in place, and return the input of `of_whole`; `gradient` may be overwritten."""

    def of_whole(self, matrix: torch.Tensor, group: Mapping[str, Any], work: Work) -> torch.Tensor:
        """Return the new `matrix`, or stack of them; the old one may be overwritten."""

    def after(
        self,
        master: torch.Tensor,
        result: torch.Tensor,
        shape: Sequence[int],
        group: Mapping[str, Any],
        work: Work,
    ) -> None:
        """Update the master in place by a result of the same elements; `shape` is that of the whole matrix."""


def is_in_parts(algorithm: object) -> TypeGuard[ShardedMatrixAlgorithm]:
    """Return whether a formula of matrices consists of three parts."""
    return hasattr(algorithm, "of_whole")


class Work:
    """Scratch for one matrix after the other: hands out parts of `buffer` (flat uint8), and launches kernels.

    Without a buffer it hands out tensors on `meta`, to learn how many bytes an update takes. `skipped` (0-dim bool, on
    the device) says that the step changes nothing; None that it is not skipped.
    """

    def __init__(
        self, buffer: torch.Tensor | None, launch: Callable[..., None], skipped: torch.Tensor | None
    ) -> None:
        self._buffer = buffer
        self.launch = launch
        self.skipped = skipped
        self._numbers: dict[tuple[float, float, torch.dtype], torch.Tensor] = {}
        self.used_bytes = _NUMBERS_BYTES

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of any values."""
        first, size_bytes = self.used_bytes, prod(shape) * dtype.itemsize
        self.used_bytes += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._buffer is None:
            return torch.empty(tuple(shape), dtype=dtype, device="meta")
        return self._buffer[first : first + size_bytes].view(dtype).view(tuple(shape))

    def like(self, matrix: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of any values with the shape and the strides of `matrix`, which leave no gaps."""
        flat = self.new((matrix.numel(),), dtype or matrix.dtype)
        return flat.as_strided(matrix.shape, matrix.stride())

    def reuse(self, *, behind: int = 0) -> None:
        """Hand everything out again, or all `behind` so many bytes, for the next matrix: its kernels run later."""
        self.used_bytes = behind or _NUMBERS_BYTES

    def replace(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Let `before` be `after`, unless the step is skipped."""
        if self.skipped is None:
            self.launch(before.copy_, after)
        else:
            self.launch(torch.where, self.skipped, before, after, out=before)

    def number(
        self, value: float, *, if_skipped: float, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor | float:
        """Return `value`, or `if_skipped` where the step is: on the device, and the same one for all matrices."""
        if self.skipped is None:
            return value
        key = (value, if_skipped, dtype)
        if key not in self._numbers:
            used_bytes, self.used_bytes = self.used_bytes, len(self._numbers) * _ALIGNMENT_BYTES
            chosen = self._numbers[key] = self.new((), dtype)
            assert self.used_bytes <= _NUMBERS_BYTES, "more numbers than an algorithm may have"
            self.used_bytes = used_bytes
            self.launch(chosen.fill_, value)
            self.launch(chosen.masked_fill_, self.skipped, if_skipped)
        return self._numbers[key]


@lru_cache(maxsize=1024)
def work_bytes(algorithm: MatrixAlgorithm, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the bytes of scratch that the update of a matrix takes; to count them runs it on `meta`."""

    def run(kernel: Callable[..., object], *arguments: Any, **options: Any) -> None:
        kernel(*arguments, **options)

    work = Work(None, run, torch.empty((), dtype=torch.bool, device="meta"))
    master, gradient, *moments = (
        torch.empty_strided(shape, stride, device="meta") for _ in range(2 + len(algorithm.moments))
    )
    algorithm.update_matrix(
        master, gradient, moments, torch.empty((), device="meta"), algorithm.defaults, work
    )
    return work.used_bytes


def check_shapes(name: str, group: Mapping[str, Any], *, instead: str, sharded: bool = False) -> None:
    """Raise ValueError unless all parameters of a group are matrices or stacks of them: whole ones, or `sharded` ones.

    `instead` is the formula for others.
    """
    others = [param for param in group["params"] if param.dim() not in (2, 3)]
    if not others:
        for param in group["params"]:
            if cut_of(param) is not None and not sharded:
                assert isinstance(param, DTensor)
                raise ValueError(
                    f"{name} updates whole matrices, and a parameter of shape {tuple(param.shape)} is sharded as "
                    f"{param.placements}; expected all of it on this rank; try Muon, or DistributedDataParallel"
                )
        return
    shapes = ", ".join(str(tuple(param.shape)) for param in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    view = "; a convolution's weight is a matrix as weight.flatten(1)" if others[0].dim() > 3 else ""
    raise ValueError(
        f"{name} updates matrices, and {len(others)} of {len(group['params'])} parameters of its group are none: "
        f"{shapes}{more}; expected two dimensions, or three for a stack of matrices; try {instead} for these{view}"
    )
