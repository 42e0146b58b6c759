# SPDX-License-Identifier: Apache-2.0
"""Masters in chunks take over weights written by others, counted or not.

Of whole masters alone: the upper half of a hi/lo master is the weight itself. Resident masters are compared at once,
when a step is prepared; streamed ones on their arrival, before their update. Weights that only visit the device have
guards of their own (`weights/`).

Explained in docs/optimizer-offloading.md, "Writing weights yourself".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from reference_impl.device import Device
from reference_impl.optimizers.layout import MASTER, Member, Piece
from reference_impl.optimizers.streamed.chunks import Chunk, StreamedWeights
from reference_impl.optimizers.writes.masters import DeviceMasters


class ChunkMasters:
    """Compares the masters of chunks with their weights, on the live current stream.

    Args:
        device: where the weights are.
        follows_writes: False where weights follow masters alone, and nothing is compared.
    """

    def __init__(self, device: Device, *, follows_writes: bool) -> None:
        self._follows = follows_writes
        self._masters = DeviceMasters(device)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Allocate the scratch of comparing masters of `chunks`."""
        for chunk in chunks if self._follows else ():
            if chunk.has_whole_masters:
                self._masters.expect(chunk.pieces[0].member.dtype)

    def before_step(
        self, chunks: Iterable[Chunk], members: Iterable[Member], weights: StreamedWeights
    ) -> None:
        """Let masters that stay on the device take over the weights of `members`; allocates."""
        if not self._follows:
            return
        listed = [member for member in members if not member.is_apart]
        for member in listed:
            weights.refresh(member)
        ours = set(listed)
        pairs = [
            (weights.of(piece), master)
            for chunk in chunks
            if chunk.has_whole_masters and (chunk.resident or chunk.masters is not None)
            for piece, master in _parts(chunk, chunk.storage, chunk.pieces)
            if piece.member in ours
        ]
        self._masters.take_over_all([weight for weight, _ in pairs], [master for _, master in pairs])

    def in_slot(
        self, chunk: Chunk, slot: torch.Tensor, pieces: Sequence[Piece], weights: StreamedWeights
    ) -> None:
        """Let the masters of a chunk that has come in, to `slot`, take over the weights of `pieces`."""
        if self._follows and chunk.has_whole_masters and chunk.has(MASTER) and not chunk.resident:
            for piece, master in _parts(chunk, slot, pieces):
                if not piece.member.is_apart:
                    self._masters.take_over(weights.of(piece), master)


def _parts(
    chunk: Chunk, buffer: torch.Tensor, pieces: Sequence[Piece]
) -> Iterable[tuple[Piece, torch.Tensor]]:
    masters = chunk.masters if chunk.masters is not None else chunk.field(MASTER, buffer)
    return ((piece, masters[piece.offset : piece.offset + piece.numel]) for piece in pieces)
