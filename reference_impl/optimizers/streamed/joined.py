# SPDX-License-Identifier: Apache-2.0
"""The update of bf16 moments by one kernel for several pieces of a chunk.

The host takes 0.2 to 0.5 ms to launch a compiled kernel, and a chunk has many pieces. Their states lie side by side.
Where weights visit from their homes and gradients come in with the states, these do too, and the kernel takes them
there. Those of shards that stay are copied into scratch, and new weights out of it. Pieces do not
share the number of the first element, for the noise, and the numbers of the formula: the kernel looks both up for each
element. So every element is updated as in a kernel of its piece alone.

Explained in docs/optimizer-state-offloading.md, "Fewer bytes".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from reference_impl.device import Device
from reference_impl.optimizers.algorithms import Algorithm, Formula, group_defaults
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed import packing
from reference_impl.optimizers.streamed.chunks import Chunk, PieceSpan
from reference_impl.optimizers.streamed.step import StreamedStep

# The compiler would build other kernels for tables of one entry.
_LEAST_PIECES, _LEAST_MEMBERS = 3, 2
# Of the first kernel: the compiler takes lengths that are the same there for the same ever after.
_MEMBERS_BUILT_FOR = 7


class Places(NamedTuple):
    """Where the pieces of a run are in it, on the device.

    `begins` (int32) are the places of all pieces but the first. An element's place and `shifts` (int32) add up to
    its number for the noise. `columns` (int64) say where in `OfMembers` the numbers of the piece are.
    """

    begins: torch.Tensor
    shifts: torch.Tensor
    columns: torch.Tensor


class OfMembers(NamedTuple):
    """The numbers that members do not share in one step, a column for each, on the device.

    `numbers` (fp32) has a row for each number of the formula, `steps` counts the step, and where `skipped` is not 0
    nothing changes. Gradients are divided by `grad_scale` (0-dim).
    """

    numbers: torch.Tensor
    steps: torch.Tensor
    skipped: torch.Tensor
    grad_scale: torch.Tensor


def update_halved(formula: Formula, operands: packing.Operands, places: Places, members: OfMembers) -> None:
    """Update hi/lo masters, as `packing.update_halved`; operands are of a whole run."""
    packing.update_halved(formula, operands, scalars_of_elements(operands, places, members))


def update_whole(formula: Formula, operands: packing.Operands, places: Places, members: OfMembers) -> None:
    """Update fp32 masters, as `packing.update_whole`; operands are of a whole run."""
    packing.update_whole(formula, operands, scalars_of_elements(operands, places, members))


def scalars_of_elements(operands: packing.Operands, places: Places, members: OfMembers) -> packing.Scalars:
    """Return the numbers of each element: elsewhere they are one number a piece."""
    element = torch.arange(operands.gradient.numel(), dtype=torch.int32, device=operands.gradient.device)
    piece = torch.bucketize(element, places.begins, right=True)
    column = places.columns[piece]
    return packing.Scalars(
        first=places.shifts[piece],
        step=members.steps[column],
        numbers=[row[column] for row in members.numbers.unbind()],
        grad_scale=members.grad_scale,
        found_inf=members.skipped[column],
    )


class JoinedUpdate:
    """Runs the kernels on the live current stream."""

    def __init__(self, device: Device, algorithm: Algorithm) -> None:
        self._device = device
        self._algorithm = algorithm
        # By group, so that each group's numbers are made at once.
        self._members: list[Member] = []
        self._places: dict[Chunk, list[Places]] = {}

    def allocate(self, chunks: Sequence[Chunk]) -> None:
        """Make the tables of `chunks`, all there are. Changes nothing when it raises."""
        joined = [chunk for chunk in chunks if chunk.joint_runs]
        found = dict.fromkeys(piece.member for chunk in joined for piece in chunk.pieces)
        members = sorted(found, key=_group)
        columns = {member: column for column, member in enumerate(members)}
        self._places = {
            chunk: [self._places_of(run, columns) for run in chunk.joint_runs] for chunk in joined
        }
        self._members = members

    def numbers(self, step: StreamedStep) -> OfMembers | None:
        """Compute the numbers of all members for `update`; those without a gradient stay as they are."""
        if not self._members:
            return None
        numbers, counted = [], []
        for group, alike in groupby(self._members, key=_group):
            counted.append(step.counted(list(alike)))
            numbers.append(self._algorithm.numbers_by_step(step.groups[group], counted[-1]))
        steps = torch.cat(counted)
        skipped = torch.zeros_like(steps)
        if step.found_inf is not None:
            skipped += step.found_inf
        for column, member in enumerate(self._members):
            if member not in step.gradients:
                skipped[column].fill_(1)
        return OfMembers(
            _at_least(torch.cat(numbers)).t().contiguous(),
            _at_least(steps),
            _at_least(skipped),
            skipped.new_ones(()) if step.grad_scale is None else step.grad_scale.clone(),
        )

    def update(
        self, chunk: Chunk, number: int, operands: packing.PieceOperands, members: OfMembers | None
    ) -> None:
        """Update all pieces of the run of that `number` in `chunk`; `operands` are of the whole run."""
        assert members is not None
        self._run(operands, self._places[chunk][number], members)

    def build(self, few: Chunk, operands: packing.PieceOperands) -> None:
        """Run the kernel for a chunk that is in no table, whose member has no step: with the numbers of any."""
        zeros = torch.zeros(_MEMBERS_BUILT_FOR, device=self._device.torch_device)
        numbers = self._algorithm.numbers_by_step(group_defaults(self._algorithm), zeros)
        (run,) = few.joint_runs
        places = self._places_of(run, {run.span.member: 0})
        self._run(
            operands, places, OfMembers(numbers.t().contiguous(), zeros, zeros.clone(), zeros.new_ones(()))
        )

    def close(self) -> None:
        """Drop the tables and the chunks that they are of. No update may be running."""
        self._places.clear()
        self._members.clear()

    def _run(self, operands: packing.PieceOperands, places: Places, members: OfMembers) -> None:
        assert isinstance(operands, packing.Operands)
        function: Callable[..., None] = update_whole if operands.low is None else update_halved
        tensors = (*operands[:4], *operands.moments)
        kind = (self._algorithm.formula, *(None if each is None else each.dtype for each in tensors))
        kernel = packing.compiled(function, *kind)
        self._device.launch(kernel, self._algorithm.formula, operands.each(packing.apart), places, members)

    def _places_of(self, run: PieceSpan, columns: Mapping[Member, int]) -> Places:
        pieces = list(run.pieces)
        pieces += [pieces[-1]] * (_LEAST_PIECES - len(pieces))
        begins = [piece.offset - run.span.offset for piece in run.pieces]
        begins += [run.span.numel] * (_LEAST_PIECES - len(begins))
        shifts = [
            packing.number(piece.member.order, piece.start) - piece.offset + run.span.offset
            for piece in pieces
        ]
        return Places(
            self._table(begins[1:], torch.int32),
            self._table(shifts, torch.int32),
            self._table([columns[piece.member] for piece in pieces], torch.int64),
        )

    def _table(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device.torch_device)


def _at_least(table: torch.Tensor) -> torch.Tensor:
    """Return `table` with rows enough."""
    return table if len(table) >= _LEAST_MEMBERS else torch.cat([table] * _LEAST_MEMBERS)


def _group(member: Member) -> int:
    return member.group
