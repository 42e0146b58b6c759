# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the states of single members, always in fp32, to save, load or show them.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from reference_impl.optimizers.layout import MASTER, Member, Piece
from reference_impl.optimizers.streamed import compact, packing
from reference_impl.optimizers.streamed.chunks import LOW, TIES, Chunk, StreamedWeights, flat_weight, scale_of


class StreamedStates:
    """Reads and writes states of members by name, in fp32: the moments and `master_param`.

    It works on the storage of chunks alone. The caller makes sure that this is whole, and before writing that no copy
    reads it. `weights` hold the upper halves of hi/lo masters.
    """

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights
        self._chunks: defaultdict[Member, list[tuple[Piece, Chunk]]] = defaultdict(list)

    def add(self, chunk: Chunk) -> None:
        """Note where the pieces of `chunk` are."""
        for piece in chunk.pieces:
            self._chunks[piece.member].append((piece, chunk))

    def forget(self, member: Member) -> None:
        """Know nothing of a member any more."""
        self._chunks.pop(member, None)

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each piece: a view of its storage, or a copy if it is packed."""
        for piece, chunk in self._chunks[member]:
            yield piece.start, self._read(piece, chunk, name)

    def write(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace a state by `value`, fp32 of the whole member and laid out like it.

        Writing hi/lo masters sets the weights to these masters, rounded.
        """
        flat = member.flat(value)
        for piece, chunk in self._chunks[member]:
            self._write(piece, chunk, name, flat[piece.start : piece.stop])

    def round_packed(self, member: Member, master: torch.Tensor, weight: torch.Tensor) -> None:
        """Round `master` to `weight` where it is compact."""
        for piece, chunk in self._chunks.get(member, ()):
            if chunk.compact and chunk.has(LOW):
                part = slice(piece.start, piece.stop)
                high, _ = compact.split(member.flat(master)[part].view(torch.int32), torch.int16)
                member.flat(weight)[part] = high.view(torch.bfloat16)

    def refresh_master(self, member: Member) -> None:
        """Make the master from the parameter as it is; an fp32 parameter is its own."""
        self._weights.refresh(member)
        if member.param.dtype != torch.float32:
            weight = flat_weight(member)
            for piece, chunk in self._chunks[member]:
                if chunk.has(LOW):
                    self._clear_low(piece, chunk)
                else:
                    self._write(piece, chunk, MASTER, weight[piece.start : piece.stop])

    def is_behind(self, member: Member) -> bool:
        """Return whether other code has written the weight since its whole master was the same; waits for the device.

        Of a hi/lo master the upper half is the weight as it is, here as in a step: the lower half stays.
        """
        self._weights.refresh(member)
        weight = flat_weight(member)
        return any(
            not torch.equal(master.to(weight.dtype), weight[piece.start : piece.stop].to(master.device))
            for piece, chunk in self._chunks[member]
            if chunk.has_whole_masters
            for master in [self._stored(piece, chunk, MASTER)]
        )

    def _clear_low(self, piece: Piece, chunk: Chunk) -> None:
        """Let the master be the bf16 weight as it is: it has no low bits, and was not rounded."""
        self._stored(piece, chunk, LOW).zero_()
        if not chunk.compact:
            self._set_flags(piece, chunk, torch.zeros(piece.numel, dtype=torch.bool))

    def _read(self, piece: Piece, chunk: Chunk, name: str) -> torch.Tensor:
        if chunk.compact and (name != MASTER or chunk.has(LOW)):
            return self._read_compact(piece, chunk, name)
        if name == MASTER and chunk.has(LOW):
            low = self._stored(piece, chunk, LOW)
            high = self._weights.between_steps(piece).to(low.device).view(torch.int16)
            return packing.join(high, low, self._flags(piece, chunk)).view(torch.float32)
        stored = self._stored(piece, chunk, name)
        flagged = name == chunk.flagged
        if stored.dtype == torch.float32 and not flagged:
            return stored
        return packing.widen(packing.integers(stored), flagged=flagged).view(torch.float32)

    def _read_compact(self, piece: Piece, chunk: Chunk, name: str) -> torch.Tensor:
        if name == MASTER:
            low = self._stored(piece, chunk, LOW)
            high = self._weights.between_steps(piece).to(low.device).view(torch.int16)
            return compact.join(high, low).view(torch.float32)
        codes, scales = self._codes(piece, chunk, name)
        return compact.MOMENTS[name].unpack(codes, scales).view(-1)[: piece.numel]

    def _write_compact(self, piece: Piece, chunk: Chunk, name: str, value: torch.Tensor) -> None:
        value = value.to(chunk.storage.device, torch.float32)
        if name == MASTER:
            stored = self._stored(piece, chunk, LOW)
            bits = value.view(torch.int32)
            exact = bits if stored.dtype == torch.int16 else compact.rounded(bits, compact.TO_NEAREST)
            high, low = compact.split(exact, stored.dtype)
            self._set_weights(piece, high)
            stored.copy_(low)
        else:
            codes, scales = self._codes(piece, chunk, name)
            new_codes, new_scales = compact.MOMENTS[name].pack(compact.rows(value))
            codes.copy_(new_codes)
            scales.copy_(new_scales)

    def _codes(self, piece: Piece, chunk: Chunk, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of a moment as rows of whole blocks, and their scales as a column."""
        codes, scales = (
            chunk.blocks(each, chunk.storage, piece).view(-1, width)
            for each, width in ((name, compact.BLOCK), (scale_of(name), 1))
        )
        return codes, scales

    def _set_weights(self, piece: Piece, high: torch.Tensor) -> None:
        """Set the weights of `piece` to the upper halves of its masters (int16)."""
        for weights in (
            self._weights.between_steps(piece),
            flat_weight(piece.member)[piece.start : piece.stop],
        ):
            # A weight that is right already may be part of a graph.
            if not torch.equal(weights.cpu().view(torch.int16), high.cpu()):
                weights.copy_(high.view(torch.bfloat16))

    def _write(self, piece: Piece, chunk: Chunk, name: str, value: torch.Tensor) -> None:
        if chunk.compact and (name != MASTER or chunk.has(LOW)):
            self._write_compact(piece, chunk, name, value)
        elif name == MASTER and chunk.has(LOW):
            high, low, flag = packing.split(value.float().view(torch.int32))
            self._set_weights(piece, high)
            self._stored(piece, chunk, LOW).copy_(low)
            self._set_flags(piece, chunk, flag)
        elif name == chunk.flagged:
            flag = self._flags(piece, chunk)
            self._stored(piece, chunk, name).copy_(value)
            self._set_flags(piece, chunk, flag)
        else:
            self._stored(piece, chunk, name).copy_(value)

    def _stored(self, piece: Piece, chunk: Chunk, name: str) -> torch.Tensor:
        """Return a state of `piece` in the dtype that it is stored in."""
        if chunk.has(name):
            whole = chunk.field(name, chunk.storage)
        elif chunk.masters is not None:
            whole = chunk.masters
        else:
            return self._weights.between_steps(piece)
        return whole[piece.offset : piece.offset + piece.numel]

    def _flags(self, piece: Piece, chunk: Chunk) -> torch.Tensor:
        """Return for each element of `piece` how its master was rounded (bool)."""
        if chunk.has(TIES):
            return packing.flags_of(chunk.blocks(TIES, chunk.storage, piece))[: piece.numel]
        return packing.flags_of(self._signed(piece, chunk))

    def _set_flags(self, piece: Piece, chunk: Chunk, flags: torch.Tensor) -> None:
        flags = flags.to(chunk.storage.device)
        if chunk.has(TIES):
            stored = chunk.blocks(TIES, chunk.storage, piece)
            gap = stored.numel() * packing.FLAGS_A_BYTE - piece.numel
            stored.copy_(packing.with_flag(stored, pad(flags, (0, gap))))
        else:
            signed = self._signed(piece, chunk)
            signed.copy_(packing.with_flag(signed, flags))

    def _signed(self, piece: Piece, chunk: Chunk) -> torch.Tensor:
        """Return the bits of the state whose sign holds the flags."""
        assert chunk.flagged is not None
        return packing.integers(self._stored(piece, chunk, chunk.flagged))
