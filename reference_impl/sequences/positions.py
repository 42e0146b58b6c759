# SPDX-License-Identifier: Apache-2.0
"""Where the positions of a call lie in its tensors: how they are cut into tiles, and their results joined.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Stands for a tensor among a call's outputs.
TENSOR = object()


@dataclass(frozen=True)
class Leading:
    """The leading shape of a call: `batch` sequences of `count` positions; None where there is no such dimension."""

    batch: int | None
    count: int

    @property
    def dim(self) -> int:
        """The dimension of the positions."""
        return 0 if self.batch is None else 1

    def shape(self, count: int) -> tuple[int, ...]:
        """Return the leading shape of `count` positions."""
        return (count,) if self.batch is None else (self.batch, count)

    def is_cut(self, leaf: Any) -> bool:
        """Whether an input has positions."""
        if not isinstance(leaf, torch.Tensor) or leaf.dim() <= self.dim:
            return False
        return leaf.shape[self.dim] == self.count and (self.dim == 0 or leaf.shape[0] in (1, self.batch))

    def cut(self, leaf: Any, tile: slice) -> Any:
        """Return a tile's part of an input, as contiguous as the input: a module may view it."""
        if not self.is_cut(leaf):
            return leaf
        part = leaf.narrow(self.dim, tile.start, tile.stop - tile.start)
        return part.contiguous() if leaf.is_contiguous() else part

    def tiles(self, tile_tokens: int) -> Iterator[slice]:
        """Yield the positions of each tile; the last one may be shorter."""
        for start in range(0, self.count, tile_tokens):
            yield slice(start, min(start + tile_tokens, self.count))

    def is_flattened(self, shape: torch.Size, count: int) -> bool | None:
        """Return whether an output of `count` positions has one dimension for both; None where it has no positions."""
        leading = self.shape(count)
        if tuple(shape[: len(leading)]) == leading:
            return False
        return True if self.batch is not None and shape[:1] == (self.batch * count,) else None


def leading_of(leaves: Sequence[Any]) -> Leading | None:
    """Return the leading shape of a call's inputs, None where no tensor has one."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > 1:
            return Leading(None, leaf.shape[0]) if leaf.dim() == 2 else Leading(leaf.shape[0], leaf.shape[1])
    return None


class Joined:
    """One output of all tiles; they are written to it one after the other."""

    def __init__(self, name: str, leading: Leading, first: torch.Tensor, count: int) -> None:
        """Make room for all positions beside `first`, the output of `count` of them.

        Raises ValueError for an output without positions, such as a mean over them.
        """
        flattened = leading.is_flattened(first.shape, count)
        if flattened is None:
            raise ValueError(
                f"{name} returned a tensor of shape {tuple(first.shape)} for {count} positions, which cannot be joined "
                f"along them; expected one that begins with {leading.shape(count)}; try leaving {name} out of tiles"
            )
        self._leading = leading
        self._is_flattened = flattened
        rest = first.shape[1:] if flattened else first.shape[leading.dim + 1 :]
        self._whole = first.new_empty((*leading.shape(leading.count), *rest))

    def part(self, tile: slice) -> torch.Tensor:
        """Return where a tile's output goes, beginning with the leading shape."""
        return self._whole.narrow(self._leading.dim, tile.start, tile.stop - tile.start)

    def write(self, tile: slice, output: torch.Tensor) -> None:
        """Write a tile's output."""
        part = self.part(tile)
        part.copy_(output.reshape(part.shape))

    def whole(self) -> torch.Tensor:
        """Return all positions, as the module without tiles would."""
        return self._whole.flatten(0, 1) if self._is_flattened else self._whole


def part_of_gradient(
    leading: Leading, gradient: torch.Tensor, tile: slice, shape: torch.Size
) -> torch.Tensor:
    """Return a tile's part of an output's gradient, in the `shape` of the tile's output."""
    count = tile.stop - tile.start
    if leading.is_flattened(shape, count):
        gradient = gradient.unflatten(0, leading.shape(leading.count))
    return gradient.narrow(leading.dim, tile.start, count).reshape(shape)
