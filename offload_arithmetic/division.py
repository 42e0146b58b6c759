# SPDX-License-Identifier: Apache-2.0
"""The division of elements, as numbers: resident on the device, streamed, updated on the CPU.

A share is a number of elements, exact to `ALIGNMENT_ELEMENTS`, because every element costs the same bytes. The last
parameters of the forward are offloaded first: their gradients are final first in backward, and their new weights are
needed last in the next forward, so their copies have the most time to hide. Of the offloaded elements, as many as can
be prefetched before the update begins are streamed first. Then units alternate between the streamed and the CPU share,
so that both keep the forward's pace. At most one unit is cut. Explained in docs/optimizer-offloading.md.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from offload_arithmetic.states import ALIGNMENT_ELEMENTS


class Part(Protocol):
    """One parameter: elements `[0, resident)` stay, the next `streamed` stream, the CPU updates the rest."""

    resident: int
    streamed: int

    @property
    def on_cpu(self) -> int:
        """Elements that the CPU updates."""


def aligned(numel: int) -> int:
    """Round up to a multiple of `ALIGNMENT_ELEMENTS`."""
    return -(-numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def offload_last(parts: Sequence[Part], wanted: int) -> None:
    """Let the last `wanted` elements of `parts`, which are in forward order and all resident, leave the device."""
    for part in reversed(parts):
        taken = min(wanted, part.resident)
        # Round the cut so that both parts start aligned; a whole parameter needs no rounding.
        part.resident = min(aligned(part.resident - taken), part.resident)
        wanted -= taken


class PartOfUnits(Part, Protocol):
    """A part of uncut units."""

    @property
    def unit(self) -> int:
        """Elements of each unit; 0 only where there are none at all."""


def offload_last_units(parts: Sequence[PartOfUnits], wanted: int) -> None:
    """Let the last units of `parts`, which are in forward order and all resident, leave: `wanted` elements, rounded.

    A unit leaves if half of it is wanted.
    """
    for part in reversed(parts):
        if part.unit:
            units = min(max(wanted + part.unit // 2, 0) // part.unit, part.resident // part.unit)
            part.resident -= units * part.unit
            wanted -= units * part.unit


def first_unit_streams(streamed: float, offloaded: float) -> bool:
    """Return whether the first unit streams, where a share `streamed` of all, or a part of `offloaded`, does.

    A unit streams if half of it is due by then (`alternate`), and of the first one that share is due.
    """
    return streamed >= offloaded / 2


def most_of_a_cut_unit(unit: int, on_cpu: int) -> int:
    """Return the most elements of a partly streamed unit that the CPU updates; `on_cpu` are all of its share.

    At most one unit is cut, the one by which shares are exact.
    """
    return min(unit, on_cpu)


def alternate(units: Sequence[Sequence[Part]], streamed: float, ahead: int) -> None:
    """Let whole units stream: the first `ahead` elements, then whenever the stream is behind the rest of its share.

    A unit is a group of parts that is not to be split. Elements that are then left over or missing are moved: at most
    one unit is cut, and one part in it.
    """
    total = sum(part.on_cpu for unit in units for part in unit)
    wanted = streamed * total
    ahead = min(ahead, int(wanted))
    pace = (wanted - ahead) / max(total - ahead, 1)
    seen = taken = 0
    for unit in units:
        numel = _numel(unit)
        seen += numel
        due = min(seen, ahead) + pace * max(seen - ahead, 0)
        if due - taken >= numel / 2:
            taken += numel
            for part in unit:
                part.streamed = part.on_cpu
    _move(units, round(wanted - taken))


class _Moves(NamedTuple):
    """Units that change sides as wholes, and the number of further streamed elements of the `cut` one."""

    whole: list[Sequence[Part]]
    missing: int
    cut: Sequence[Part]


def _move(units: Sequence[Sequence[Part]], missing: int) -> None:
    """Let `missing` more elements stream, or so many less if negative.

    The gradient of a part that is cut stays on the device as a whole, however much of it the CPU updates. So a small
    unit is cut, the smallest with enough elements. If even this one is large, it changes sides too, and others go back
    for it.
    """
    moves = _moves(units, missing)
    if moves.cut:
        others = [unit for unit in units if unit is not moves.cut]
        too_many = _numel(moves.cut) if missing > 0 else -_numel(moves.cut)
        back = _moves(others, moves.missing - too_many)
        if (back.cut or not back.missing) and _numel(back.cut) < _numel(moves.cut):
            moves = back._replace(whole=[*moves.whole, moves.cut, *back.whole])
    for part in (part for unit in moves.whole for part in unit):
        part.streamed = 0 if part.streamed else part.on_cpu
    missing = moves.missing
    for part in reversed(moves.cut):
        numel = part.streamed + part.on_cpu
        moved = max(min(missing, part.on_cpu), -part.streamed)
        missing -= moved
        part.streamed = min(aligned(part.streamed + moved), numel)


def _moves(units: Sequence[Sequence[Part]], missing: int) -> _Moves:
    """Return how `missing` more elements stream: by the largest units that fit, and the smallest one to be cut."""
    streams = missing < 0
    # Of equally large ones the last first.
    movable = sorted(
        (unit for unit in reversed(units) if _streams(unit) == streams), key=_numel, reverse=True
    )
    whole: list[Sequence[Part]] = []
    cut: Sequence[Part] = ()
    for unit in movable:
        if _numel(unit) > abs(missing):
            cut = unit
        else:
            whole.append(unit)
            missing += _numel(unit) if streams else -_numel(unit)
    return _Moves(whole, missing, cut if missing else ())


def _numel(unit: Sequence[Part]) -> int:
    """Elements of a unit that are offloaded."""
    return sum(part.streamed + part.on_cpu for part in unit)


def _streams(unit: Sequence[Part]) -> bool:
    return any(part.streamed for part in unit)
