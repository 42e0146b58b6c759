# SPDX-License-Identifier: Apache-2.0
"""Long sequences: modules that mix no positions run on a few of them at a time, attention on a few of its heads.

- position: a token of one sequence; a module is position-wise where a position's output depends on its input alone.
- tile: the positions that a module takes at a time; backward computes each tile again.
- group: some of attention's key-value heads, with their queries and their part of the projections.
- part: a tile or a group; a call is divided into parts.
- leading shape: (batch, positions) of a call, or (positions,) where sequences are joined to rows of one matrix.

Explained in docs/long-sequences.md.
"""

from reference_impl.sequences.head_groups import HeadGroups
from reference_impl.sequences.tiles import SequenceTiles

__all__ = ["HeadGroups", "SequenceTiles"]
