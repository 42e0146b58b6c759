"""The states of single members in the homes of chunks, for whoever saves, loads or shows them, always in fp32.

Works on homes alone: the caller has made sure that these are whole and that no copy reads or writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.streamed import packing
from reference_impl.optimizers.streamed.chunks import MASTER, Chunk, Weights, parameter
from reference_impl.optimizers.streamed.packing import LOW


class MemberStates:
    """Reads and writes states by name: the moments and `master_param`."""

    def __init__(self, weights: Weights) -> None:
        """Know no chunk yet; `weights` hold the upper halves of masters that are stored as lower ones."""
        self._weights = weights
        self._homes: defaultdict[Member, list[tuple[Piece, Chunk]]] = defaultdict(list)

    def add(self, chunk: Chunk) -> None:
        """Learn where the pieces of `chunk` are."""
        for piece in chunk.pieces:
            self._homes[piece.member].append((piece, chunk))

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part of a state, where it lives or as a copy."""
        for piece, chunk in self._homes[member]:
            yield piece.start, self._read(piece, chunk, name)

    def write(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace a state by `value`, fp32 of the whole member and laid out like it.

        Weights become their masters rounded where only lower halves of these are kept.
        """
        flat = member.flat(value)
        for piece, chunk in self._homes[member]:
            self._write(piece, chunk, name, flat[piece.start : piece.stop])

    def refresh_master(self, member: Member) -> None:
        """Make the master from the parameter as it is; an fp32 parameter is its own."""
        self._weights.refresh(member)
        if member.param.dtype != torch.float32:
            weight = parameter(member)
            for piece, chunk in self._homes[member]:
                self._write(piece, chunk, MASTER, weight[piece.start : piece.stop])

    def _read(self, piece: Piece, chunk: Chunk, name: str) -> torch.Tensor:
        if name == MASTER and chunk.has(LOW):
            high = self._weights.of(piece).cpu().view(torch.int16)
            flag = self._flagged(piece, chunk) < 0
            return packing.join(high, self._place(piece, chunk, LOW), flag).view(torch.float32)
        stored = self._place(piece, chunk, name)
        if all(field.name != name for field in chunk.packed):
            return stored
        flagged = chunk.has(LOW) and name == chunk.fields[-1].name
        return packing.widen(packing.integers(stored), flagged=flagged).view(torch.float32)

    def _write(self, piece: Piece, chunk: Chunk, name: str, value: torch.Tensor) -> None:
        if name == MASTER and chunk.has(LOW):
            high, low, flag = packing.split(value.float().view(torch.int32))
            for weights in (self._weights.of(piece), parameter(piece.member)[piece.start : piece.stop]):
                # A weight that is right already may be part of a graph.
                if not torch.equal(weights.cpu().view(torch.int16), high.cpu()):
                    weights.copy_(high.view(torch.bfloat16))
            self._place(piece, chunk, LOW).copy_(low)
            signed = self._flagged(piece, chunk)
            signed.copy_(packing.with_flag(signed, flag.cpu()))
        elif chunk.has(LOW) and name == chunk.fields[-1].name:
            signed = self._flagged(piece, chunk)
            flag = signed < 0
            self._place(piece, chunk, name).copy_(value)
            signed.copy_(packing.with_flag(signed, flag))
        else:
            self._place(piece, chunk, name).copy_(value)

    def _place(self, piece: Piece, chunk: Chunk, name: str) -> torch.Tensor:
        """Return where a state of `piece` stands, in the dtype that it is stored in."""
        if chunk.has(name):
            whole = chunk.field(name, chunk.home)
        elif chunk.masters is not None:
            whole = chunk.masters
        else:
            return self._weights.of(piece)
        return whole[piece.offset : piece.offset + piece.numel]

    def _flagged(self, piece: Piece, chunk: Chunk) -> torch.Tensor:
        """Return the bits of the state whose sign says how masters were rounded."""
        return packing.integers(self._place(piece, chunk, chunk.fields[-1].name))
