"""Tells the arena in the first forward what the next blocks will save, so that its memory is pinned in time.

Blocks of a model are mostly alike: what one has saved, the next ones are expected to save. A forecast looks two
blocks ahead, so that a wrong one costs little memory. Later steps find everything pinned and need none.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from reference_impl.activations.run import Run
from reference_impl.memory.arena import HostArena

_BLOCKS_AHEAD = 2


class Forecast:
    """Follows the first forward from block to block."""

    def __init__(self, arena: HostArena, blocks: Iterable[nn.Module], chosen: Iterable[nn.Module]) -> None:
        """Look at those of `blocks` that hold a module that was `chosen` to offload."""
        self._arena = arena
        wanted = set(chosen)
        self._coming = {block for block in blocks if not wanted.isdisjoint(block.modules())}
        self._seen = 0

    def end_block(self, block: nn.Module, run: Run) -> None:
        """Note that `block` has saved what it will."""
        if block not in self._coming or not run.has_saved:
            return
        self._coming.discard(block)
        sizes = run.moved_sizes(self._seen)
        self._seen = run.length
        self._arena.expect(sizes * min(_BLOCKS_AHEAD, len(self._coming)))
