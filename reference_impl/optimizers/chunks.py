"""What travels at once: the states of a few pieces, side by side in one flat tensor.

A chunk belongs to one parameter group, so that one fused kernel call updates it, and its states lie one after
the other (master | exp_avg | exp_avg_sq), so that one copy each way moves it. Cuts are multiples of `ALIGNMENT`
elements and every piece starts at one, which leaves every bit of the update as it is for whole parameters.
A chunk that stays on the device has the same form. Geometry and views only; `streamed_update` moves chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from reference_impl.device import REACHED, Event
from reference_impl.optimizers.layout import ALIGNMENT, Member, Piece

MASTER = "master_param"


class Part(NamedTuple):
    """Which elements of a member are whose: `streamed` ones travel, `resident` ones are updated where they stay.

    `staged`: new weights do not go into the parameter, because somebody else updates other elements of it and
    brings all of them home together.
    """

    streamed: range
    resident: range = range(0)
    staged: bool = False


@dataclass(eq=False, slots=True)
class Chunk:
    """`home` holds the states `names` of `numel` elements each, flat fp32: on the host, or on the device if resident.

    `masters` are the fp32 masters that stay on the device, where these are not among `names`; an fp32 parameter is
    its own master and has none. `stored` is the event after which `home` on the host is whole.
    """

    pieces: tuple[Piece, ...]
    numel: int
    names: tuple[str, ...]
    home: torch.Tensor
    masters: torch.Tensor | None
    resident: bool
    stored: Event = REACHED

    @property
    def group(self) -> int:
        """The parameter group of all pieces."""
        return self.pieces[0].member.group

    @property
    def deadline(self) -> int:
        """The place in the forward of the first member that waits for this chunk."""
        return min(piece.member.order for piece in self.pieces)

    def state(self, name: str, piece: Piece, buffer: torch.Tensor) -> torch.Tensor:
        """Return the state `name` of `piece` in `buffer`, which is laid out like `home`."""
        start = self.names.index(name) * self.numel + piece.offset
        return buffer[start : start + piece.numel]


def plan_chunks(
    ranges: Mapping[Member, range], *, elements: Callable[[Member], int]
) -> list[tuple[tuple[Piece, ...], int]]:
    """Cut the elements `ranges` of members, each from a multiple of `ALIGNMENT`, into (pieces, numel with gaps).

    A chunk has at most `elements(member)` elements, a multiple of `ALIGNMENT`, of one group; fp32 parameters, which
    are their own masters, and others do not share one. Pieces follow the forward.
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


def _kind(member: Member) -> tuple[int, bool]:
    return member.group, member.param.dtype == torch.float32
