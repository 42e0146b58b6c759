"""What travels at once: the states of a few pieces, side by side in one flat tensor.

A chunk belongs to one parameter group, so that one fused kernel call updates it, and its states lie one after
the other (master | exp_avg | exp_avg_sq, in fp32 or packed by `packing`), so that one copy each way moves it. Cuts
are multiples of `ALIGNMENT` elements and every piece starts at one, which leaves every bit of the update as it is for
whole parameters. A chunk that stays on the device has the same form. Geometry and views only; `streamed_update` moves
chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from reference_impl.device import REACHED, Event
from reference_impl.optimizers.layout import ALIGNMENT, Member, Piece
from reference_impl.optimizers.streamed.packing import LOW

MASTER = "master_param"


class Part(NamedTuple):
    """Which elements of a member are whose: `streamed` ones travel, `resident` ones are updated where they stay.

    `staged`: new weights do not go into the parameter, because somebody else updates other elements of it and
    brings all of them home together.
    """

    streamed: range
    resident: range = range(0)
    staged: bool = False


class Field(NamedTuple):
    """One state in a chunk, in the dtype that it travels in."""

    name: str
    dtype: torch.dtype


def is_rounded(fields: tuple[Field, ...]) -> bool:
    """Whether any of `fields` is a moment in bf16."""
    return any(field.dtype == torch.bfloat16 for field in fields)


def packed_of(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return the fields that are shorter than fp32, and the last one where its sign serves half masters."""
    flagged = fields[-1] if fields[0].name == LOW else None
    return tuple(field for field in fields if field.dtype != torch.float32 or field is flagged)


@dataclass(eq=False, slots=True)
class Chunk:
    """`home` holds `fields` of `numel` elements each, flat bytes: on the host, or on the device if resident.

    `masters` are the fp32 masters that stay on the device, where none travel; an fp32 parameter is its own master
    and has none. `firsts` numbers each piece's first element among those of all chunks, 0-dim on the device. `stored`
    is the event after which `home` on the host is whole.
    """

    pieces: tuple[Piece, ...]
    numel: int
    fields: tuple[Field, ...]
    home: torch.Tensor
    masters: torch.Tensor | None
    resident: bool
    firsts: Mapping[Piece, torch.Tensor]
    stored: Event = REACHED

    @property
    def group(self) -> int:
        """The parameter group of all pieces."""
        return self.pieces[0].member.group

    @property
    def deadline(self) -> int:
        """The place in the forward of the first member that waits for this chunk."""
        return min(piece.member.order for piece in self.pieces)

    def has(self, name: str) -> bool:
        """Return whether the state `name` is among the fields."""
        return any(field.name == name for field in self.fields)

    @property
    def rounded(self) -> bool:
        """Whether moments are kept in fewer bits than fp32, so that the update is not torch's to the bit."""
        return is_rounded(self.fields)

    @property
    def packed(self) -> tuple[Field, ...]:
        """The fields that are not plain fp32 states: shorter, or with flags in the sign; see `packing`."""
        return packed_of(self.fields)

    def field(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return the state `name` of all elements in `buffer`, which is laid out like `home`."""
        start = 0
        for field in self.fields:
            stop = start + self.numel * field.dtype.itemsize
            if field.name == name:
                return buffer[start:stop].view(field.dtype)
            start = stop
        raise KeyError(name)


class Weights:
    """Where the share's part of each weight stands: in the parameter, or in a staging tensor beside it."""

    def __init__(self) -> None:
        """Stage nothing."""
        self._staged: dict[Member, tuple[int, torch.Tensor]] = {}

    def stage(self, member: Member, part: range) -> None:
        """From now on keep the weights of this part apart from the parameter."""
        self._staged[member] = (part.start, parameter(member)[part.start : part.stop].clone())

    def refresh(self, member: Member) -> None:
        """Take over the parameter's weights where they stand apart."""
        if member in self._staged:
            first, staged = self._staged[member]
            staged.copy_(parameter(member)[first : first + staged.numel()])

    def staged(self, member: Member) -> tuple[int, torch.Tensor] | None:
        """Return the first element and the weights that stand apart, if any."""
        return self._staged.get(member)

    def of(self, piece: Piece) -> torch.Tensor:
        """Return the weights of `piece`, flat."""
        first, staged = self._staged.get(piece.member, (0, None))
        whole = parameter(piece.member) if staged is None else staged
        return whole[piece.start - first : piece.stop - first]

    def clear(self) -> None:
        """Let all staging tensors go."""
        self._staged.clear()


def parameter(member: Member) -> torch.Tensor:
    """Return a member's own weight, flat."""
    return member.flat(member.param_local.detach())


def plan_chunks(
    ranges: Mapping[Member, range], *, elements: Callable[[Member], int]
) -> list[tuple[tuple[Piece, ...], int]]:
    """Cut the elements `ranges` of members, each from a multiple of `ALIGNMENT`, into (pieces, numel with gaps).

    A chunk has at most `elements(member)` elements, a multiple of `ALIGNMENT`, of one group and dtype. Pieces follow
    the forward.
    """
    plans = []
    for _, alike in groupby(sorted(ranges, key=_kind), key=_kind):
        pieces: list[Piece] = []
        offset = 0
        for member in sorted(alike, key=lambda member: member.order):
            start, stop = ranges[member].start, ranges[member].stop
            while start < stop:
                room = elements(member) - offset
                if room == 0:
                    plans.append((tuple(pieces), offset))
                    pieces, offset, room = [], 0, elements(member)
                piece = Piece(member, start, min(start + room, stop), offset)
                pieces.append(piece)
                start = piece.stop
                offset += -(-piece.numel // ALIGNMENT) * ALIGNMENT
        if pieces:
            plans.append((tuple(pieces), offset))
    return plans


def _kind(member: Member) -> tuple[int, str]:
    return member.group, str(member.param.dtype)
