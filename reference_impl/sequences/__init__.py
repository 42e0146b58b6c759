"""Long sequences: what does not mix positions runs on a few of them at a time.

- position: a token of one sequence; a module is position-wise where a position's output depends on its input alone.
- tile: the positions that a module takes at a time; backward computes each tile again.
- leading shape: (batch, positions) of a call, or (positions,) where sequences are joined to rows of one matrix.

Explained in docs/long-sequences.md.
"""

from reference_impl.sequences.tiles import SequenceTiles

__all__ = ["SequenceTiles"]
