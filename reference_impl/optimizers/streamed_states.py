"""The states of single members in the homes of chunks, for whoever saves, loads or shows them.

Works on homes alone: the caller has made sure that these are whole and that no copy reads or writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from reference_impl.optimizers.chunks import MASTER, Chunk
from reference_impl.optimizers.layout import Member, Piece


class MemberStates:
    """Reads and writes states by name: the moments and `master_param`."""

    def __init__(self) -> None:
        """Know no chunk yet."""
        self._homes: defaultdict[Member, list[tuple[Piece, Chunk]]] = defaultdict(list)

    def add(self, chunk: Chunk) -> None:
        """Learn where the pieces of `chunk` are."""
        for piece in chunk.pieces:
            self._homes[piece.member].append((piece, chunk))

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part of a state, where it lives or as a copy."""
        for piece, chunk in self._homes[member]:
            yield piece.start, _stored(piece, chunk, name)

    def write(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace a state by `value`, fp32 of the whole member and laid out like it."""
        flat = member.flat(value)
        for piece, chunk in self._homes[member]:
            _stored(piece, chunk, name).copy_(flat[piece.start : piece.stop])

    def refresh_master(self, member: Member) -> None:
        """Make the master from the parameter as it is; an fp32 parameter is its own."""
        if member.param.dtype != torch.float32:
            weight = member.flat(member.param_local.detach())
            for piece, chunk in self._homes[member]:
                _stored(piece, chunk, MASTER).copy_(weight[piece.start : piece.stop])


def _stored(piece: Piece, chunk: Chunk, name: str) -> torch.Tensor:
    if name in chunk.names:
        return chunk.state(name, piece, chunk.home)
    if name == MASTER and chunk.masters is None:
        return piece.member.flat(piece.member.param_local.detach())[piece.start : piece.stop]
    assert chunk.masters is not None
    return chunk.masters[piece.offset : piece.offset + piece.numel]
