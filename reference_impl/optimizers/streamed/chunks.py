# SPDX-License-Identifier: Apache-2.0
"""Chunks: the states of a few pieces side by side in one flat tensor, and how parameters are cut into them.

A chunk belongs to one parameter group, so that one fused kernel call updates it. Its fields lie one after the other
(master | exp_avg | exp_avg_sq, in fp32 or in fewer bits as in `packing` and `compact`), so that one copy each way moves
it. Cuts are multiples of `ALIGNMENT_ELEMENTS` and every piece starts at one, so the update gives the same bits as for
whole parameters. Where a formula updates whole matrices a chunk has one or more of these, and nothing cuts one. A chunk
that stays on the device has the same form. This module has geometry and views only.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from offload_arithmetic.division import aligned
from offload_arithmetic.states import ALIGNMENT_ELEMENTS, COMPACT_BLOCK_ELEMENTS
from reference_impl.device import REACHED, Event
from reference_impl.memory.weight_home import WeightHome
from reference_impl.optimizers.algorithms import MatrixAlgorithm
from reference_impl.optimizers.layout import MASTER, Member, Piece

# Fields beside the states: the low bits of masters, and the flags of lower halves if no sign is free for them.
LOW = "master_low"
TIES = "master_ties"
# Pieces in a compact chunk begin at multiples of so many elements, so that their scales begin at 16 bytes.
COMPACT_ALIGNMENT = 8 * ALIGNMENT_ELEMENTS
# The launches of a matrix's update, in launches of a fused kernel.
_COST_OF_MATRIX = 4
# Of storage, whose copies take the launches of one kernel.
_COST_1_BYTES = 128 * 2**20
_SECTION_BYTES = 256


class Part(NamedTuple):
    """The elements of one member that the streamed share updates.

    The states of `streamed` elements are copied in and out. States of `resident` elements stay on the device, in fp32;
    states of `staying` ones stay too, in the streamed format. With `is_split` the CPU updates other elements of the
    same member, so new weights do not go into the parameter: they are kept apart until all of them are written
    together.
    """

    streamed: range
    resident: range = range(0)
    is_split: bool = False
    staying: range = range(0)


class Field(NamedTuple):
    """One state in a chunk, in the dtype that it is stored in, with one number for each `block` elements."""

    name: str
    dtype: torch.dtype
    block: int = 1


def scale_of(moment: str) -> str:
    """Return the name of the field that has the scales of a compact moment."""
    return f"{moment}_scale"


def is_compact(fields: tuple[Field, ...]) -> bool:
    """Return whether `fields` have moments in 8 bits, with scales."""
    return any(field.block == COMPACT_BLOCK_ELEMENTS for field in fields)


def is_rounded(fields: tuple[Field, ...]) -> bool:
    """Return whether any of `fields` is a moment in fewer bits than fp32."""
    return is_compact(fields) or any(field.dtype == torch.bfloat16 for field in fields)


def bytes_of(fields: tuple[Field, ...], numel: int) -> int:
    """Return the bytes of `fields` for `numel` elements, a multiple of `ALIGNMENT_ELEMENTS`."""
    return sum(numel // field.block * field.dtype.itemsize for field in fields)


def alignment_of(fields: tuple[Field, ...]) -> int:
    """Return of how many elements the places of pieces in a chunk are multiples."""
    return COMPACT_ALIGNMENT if is_compact(fields) else ALIGNMENT_ELEMENTS


class PieceSpan(NamedTuple):
    """Pieces whose weights lie side by side as they do in the chunk, so that one copy can serve them all.

    `span` has the elements of all, numbered from the first piece's parameter on.
    """

    span: Piece
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(eq=False, slots=True)
class Chunk:
    """States of `pieces`.

    `storage` is flat bytes, on the host or, if `resident`, on the device: `numel` elements of each of `fields`. Where
    masters are no field they stay on the device as `masters` (fp32); an fp32 parameter is its own master and has none.
    `noise_offsets` numbers each piece's first element (0-dim int64, on the device). The storage on the host is whole
    after the event `stored`, and weights that have a home are whole there after `at_home`. `gradients` is where the
    gradients of all elements are left on the host, flat in the parameters' dtype, if they are not on the device; they
    come in behind the states, or alone where these stay.

    The weights of all pieces visit from `home`, together, or stay on the device (None). `matrices` is the formula for
    pieces as whole matrices; None for the formula of elements. The update of one that `exchanges` is a
    collective: ranks share its matrices. Moments are `compact`, in 8 bits with scales, or one kernel updates elements
    whose moments are `rounded` to fewer bits than fp32. `runs` are the pieces again, adjacent ones together.
    """

    pieces: tuple[Piece, ...]
    numel: int
    fields: tuple[Field, ...]
    storage: torch.Tensor
    masters: torch.Tensor | None
    resident: bool
    noise_offsets: Mapping[Piece, torch.Tensor]
    gradients: torch.Tensor | None = None
    stored: Event = REACHED
    at_home: Event = REACHED
    # Found from these, because each step asks for them several times.
    home: WeightHome | None = dataclasses.field(init=False)
    matrices: MatrixAlgorithm | None = dataclasses.field(init=False)
    exchanges: bool = dataclasses.field(init=False)
    compact: bool = dataclasses.field(init=False)
    rounded: bool = dataclasses.field(init=False)
    runs: tuple[PieceSpan, ...] = dataclasses.field(init=False)
    _first_bytes: dict[str, tuple[int, Field]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Find the common kind of all pieces, the runs, and the start of each field."""
        ends = accumulate((bytes_of((field,), self.numel) for field in self.fields), initial=0)
        self._first_bytes = {
            field.name: (first, field) for first, field in zip(ends, self.fields, strict=False)
        }
        member = self.pieces[0].member
        self.home, self.matrices, self.exchanges = member.home, member.matrices, member.cut is not None
        self.compact = is_compact(self.fields)
        self.rounded = is_rounded(self.fields) and self.matrices is None
        self.runs = runs_of(self.pieces)

    @property
    def comes_in(self) -> bool:
        """Whether its update needs a slot: for states that are on the host, or for gradients alone."""
        return not self.resident or self.gradients is not None

    @property
    def slot_bytes(self) -> int:
        """Bytes of its slot while it is updated."""
        states_bytes = 0 if self.resident else self.storage.nbytes
        return slot_bytes(states_bytes, 0 if self.gradients is None else self.gradients.nbytes)

    def states_in(self, slot: torch.Tensor) -> torch.Tensor:
        """Return the states' bytes during their update: in `slot` (flat bytes), or the resident storage."""
        return self.storage if self.resident else slot[: self.storage.nbytes]

    def gradients_in(self, slot: torch.Tensor) -> torch.Tensor | None:
        """Return where the gradients come in, behind the states in `slot` (flat bytes)."""
        if self.gradients is None:
            return None
        return slot[self.slot_bytes - self.gradients.nbytes : self.slot_bytes].view(self.gradients.dtype)

    @property
    def group(self) -> int:
        """The parameter group of all pieces."""
        return self.pieces[0].member.group

    @property
    def deadline(self) -> int:
        """The place in the forward of the first member that waits for this chunk."""
        return min(piece.member.order for piece in self.pieces)

    @property
    def launch_cost(self) -> int:
        """How long the host takes to launch its update, where one fused kernel of torch's is 1.

        Moments of fewer bits take a kernel a piece. Long storage comes in in many parts.
        """
        if self.matrices is not None:
            return _COST_OF_MATRIX * sum(-(-piece.numel // piece.member.unit) for piece in self.pieces)
        kernels = len(self.pieces) if self.rounded else 0
        return max(kernels, self.storage.nbytes // _COST_1_BYTES, 1)

    @property
    def flagged(self) -> str | None:
        """The field that holds the flags of hi/lo masters; None where there are none, as in compact chunks.

        It is the last: their own, a bit an element, or a state that is never negative, in its sign.
        """
        return self.fields[-1].name if self.has(LOW) and not self.compact else None

    @property
    def has_whole_masters(self) -> bool:
        """Whether fp32 masters stand beside weights that stay on the device, so that others may write these alone."""
        return self.home is None and (self.has(MASTER) or self.masters is not None)

    def has(self, name: str) -> bool:
        """Return whether the state `name` is among the fields."""
        return name in self._first_bytes

    def field(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return the state `name` of all elements in `buffer`, which is laid out like `storage`."""
        return self._part(name, buffer, 0, self.numel)

    def blocks(self, name: str, buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the state `name` of the whole blocks that `piece` has in `buffer`: its elements and its filling."""
        return self._part(name, buffer, piece.offset, piece.offset + aligned(piece.numel))

    def _part(self, name: str, buffer: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        first, field = self._first_bytes[name]
        size, block = field.dtype.itemsize, field.block
        return buffer[first + start // block * size : first + stop // block * size].view(field.dtype)


class StreamedWeights:
    """The weights updated by chunks: the parameter's own, or for split members a separate tensor."""

    def __init__(self) -> None:
        self._apart: dict[Member, tuple[int, torch.Tensor]] = {}

    def keep_apart(self, member: Member, elements: range) -> None:
        """From now on update a copy of these weights and leave the parameter as it is."""
        self._apart[member] = (elements.start, flat_weight(member)[elements.start : elements.stop].clone())

    def kept_apart(self, member: Member) -> tuple[int, torch.Tensor] | None:
        """Return the first element and the separate weights; None for a member that is updated in place."""
        return self._apart.get(member)

    def forget(self, member: Member) -> None:
        """Drop the separate weights of a member, if there are any."""
        self._apart.pop(member, None)

    def refresh(self, member: Member) -> None:
        """Copy the parameter's weights to the separate ones, if there are any."""
        if member in self._apart:
            first, apart = self._apart[member]
            apart.copy_(flat_weight(member)[first : first + apart.numel()])

    def of(self, piece: Piece) -> torch.Tensor:
        """Return the weights of `piece`, flat, on the device: of one with a home, while it visits."""
        if piece.member.home is not None:
            return piece.member.home.device_part(piece.start, piece.stop)
        first, apart = self._apart.get(piece.member, (0, None))
        whole = flat_weight(piece.member) if apart is None else apart
        return whole[piece.start - first : piece.stop - first]

    def between_steps(self, piece: Piece) -> torch.Tensor:
        """Return the weights of `piece`, flat, where they are when no update runs: at home, if they have one."""
        return (
            self.of(piece)
            if piece.member.home is None
            else flat_weight(piece.member)[piece.start : piece.stop]
        )

    def clear(self) -> None:
        """Drop all separate tensors."""
        self._apart.clear()


def flat_weight(member: Member) -> torch.Tensor:
    """Return the parameter's own weight, flat, or that at home."""
    return member.flat(member.weight)


def slot_bytes(state_bytes: int, gradient_bytes: int) -> int:
    """Return the bytes of a slot: states, and behind them gradients at an offset with aligned views."""
    if gradient_bytes == 0:
        return state_bytes
    return -(-state_bytes // _SECTION_BYTES) * _SECTION_BYTES + gradient_bytes


def plan_chunks(
    ranges: Mapping[Member, range], *, elements: Callable[[Member], int], alignment: int = ALIGNMENT_ELEMENTS
) -> list[tuple[tuple[Piece, ...], int]]:
    """Cut the elements `ranges` of members into chunks; return the pieces of each and its length with gaps.

    Each range begins at a multiple of `ALIGNMENT_ELEMENTS`. A chunk has elements of one group and dtype, of weights
    that visit the device together or all stay there, and at most `elements(member)` of them. Of such weights all chunks
    are as long but the last: a short one would have its copies and kernels all the same. Lengths and the places of
    pieces in a chunk are multiples of `alignment`, itself one of `ALIGNMENT_ELEMENTS`. Pieces follow the order of the
    forward. Matrices that a formula updates as such are not cut, and a chunk has at least one of them. A matrix that
    ranks share is one piece, however short this rank's shard is, and takes the place of the longest: all ranks have
    these chunks.
    """
    plans: list[tuple[tuple[Piece, ...], int]] = []
    for _, alike in groupby(sorted(ranges, key=_kind), key=_kind):
        members = sorted(alike, key=lambda member: member.order)
        if members[0].matrices is not None:
            plans += _plan_matrices({member: ranges[member] for member in members}, elements, alignment)
            continue
        total = sum(_rounded_up(len(ranges[member]), alignment) for member in members)
        count = -(-total // elements(members[0]))
        most = _rounded_up(-(-total // max(count, 1)), alignment)
        pieces: list[Piece] = []
        offset = 0
        for member in members:
            start, stop = ranges[member].start, ranges[member].stop
            while start < stop:
                if offset == most:
                    plans.append((tuple(pieces), offset))
                    pieces, offset = [], 0
                piece = Piece(member, start, min(start + most - offset, stop), offset)
                pieces.append(piece)
                start = piece.stop
                offset += _rounded_up(piece.numel, alignment)
        if pieces:
            plans.append((tuple(pieces), offset))
    return plans


def _plan_matrices(
    ranges: Mapping[Member, range], elements: Callable[[Member], int], alignment: int
) -> Iterator[tuple[tuple[Piece, ...], int]]:
    """Yield the pieces of each chunk, whole matrices in the order of `ranges`, and its length with gaps."""
    pieces: list[Piece] = []
    offset = 0
    for member, left in ranges.items():
        start, stop = left.start, left.stop
        if member.cut is not None:
            if pieces and offset + member.unit > elements(member):
                yield tuple(pieces), offset
                pieces, offset = [], 0
            pieces.append(Piece(member, start, stop, offset))
            offset += _rounded_up(member.unit, alignment)
            continue
        while start < stop:
            fitting = max(elements(member) - offset, 0) // member.unit
            if pieces and not fitting:
                yield tuple(pieces), offset
                pieces, offset = [], 0
                continue
            piece = Piece(member, start, min(start + max(fitting, 1) * member.unit, stop), offset)
            pieces.append(piece)
            start = piece.stop
            offset += _rounded_up(piece.numel, alignment)
    if pieces:
        yield tuple(pieces), offset


def mixed(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return `chunks`, in each visit with resident states spread evenly among streamed ones.

    All chunks of a visit have the same deadline. Small resident chunks between streamed ones keep both directions of
    the link busy all along.
    """
    found: list[Chunk] = []
    for visits, together in groupby(chunks, key=_visit):
        visit = list(together)
        if visits is not None:
            kinds = [[chunk for chunk in visit if chunk.resident == stays] for stays in (True, False)]
            places = {chunk: (index + 0.5) / len(kind) for kind in kinds for index, chunk in enumerate(kind)}
            visit.sort(key=places.__getitem__)
        found += visit
    return found


def spread(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return `chunks`, by deadline, with the last chunks of elements among the last half of the matrices.

    Products of matrices take longer than their copies, and updates of elements less. A table at the end of the forward
    would wait for the link, which has been idle before.
    """
    last = max((index for index, chunk in enumerate(chunks) if chunk.matrices is not None), default=-1)
    before, behind = list(chunks[: last + 1]), list(chunks[last + 1 :])
    if any(chunk.home is not None for chunk in chunks):
        return [*before, *behind]
    places = {chunk: float(index) for index, chunk in enumerate(before)}
    for index, chunk in enumerate(behind):
        places[chunk] = len(before) * (1 + (index + 1) / (len(behind) + 1)) / 2
    return sorted(places, key=places.__getitem__)


def _visit(chunk: Chunk) -> int | None:
    return None if chunk.home is None else chunk.home.block_index


def _rounded_up(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


def runs_of(pieces: Iterable[Piece]) -> tuple[PieceSpan, ...]:
    """Return the pieces of a chunk; pieces with weights side by side in their home as in the chunk are together."""
    found: list[list[Piece]] = []
    for piece in pieces:
        if found and _follows(piece, found[-1][-1]):
            found[-1].append(piece)
        else:
            found.append([piece])
    return tuple(_run(run) for run in found)


def _run(pieces: Sequence[Piece]) -> PieceSpan:
    first, last = pieces[0], pieces[-1]
    numel = last.offset + last.numel - first.offset
    return PieceSpan(Piece(first.member, first.start, first.start + numel, first.offset), tuple(pieces))


def _follows(piece: Piece, before: Piece) -> bool:
    home, home_before = piece.member.home, before.member.home
    if home is None or home_before is None or piece.offset != before.offset + before.numel:
        return False
    end = home_before.host.data_ptr() + before.stop * home_before.host.itemsize
    return end == home.host.data_ptr() + piece.start * home.host.itemsize


def _kind(member: Member) -> tuple[int, str, int, str]:
    visit = -1 if member.home is None else member.home.block_index
    return member.group, str(member.param.dtype), visit, "" if member.cut is None else member.cut.key
