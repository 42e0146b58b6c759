"""The update of a chunk's matrices, one after the other, by a formula of `algorithms.matrices`.

A formula changes nothing where the device has found that the step is skipped. Matrices run one after the other, so one
scratch, as long as the longest matrix takes, serves all. Moments that are kept in bf16 are widened there, and rounded
behind the formula.

Explained in docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from offload_arithmetic.division import aligned
from reference_impl.device import Device
from reference_impl.optimizers.algorithms import MatrixAlgorithm
from reference_impl.optimizers.algorithms.matrices import Work, work_bytes
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.streamed.chunks import Chunk, is_rounded
from reference_impl.optimizers.streamed.packing import Packer, Rounding, integers
from reference_impl.optimizers.streamed.step import StreamedStep

# Of the matrix that makes the device load its libraries.
_BUILT_WITH = 64


class MatrixStates(NamedTuple):
    """What an update reads and writes, flat fp32: masters and gradients of each piece, and these of each moment."""

    pieces: Sequence[Piece]
    masters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    moments: Sequence[Sequence[torch.Tensor]]


class MatrixUpdate:
    """Runs formulas of matrices on the live current stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._skipped = torch.zeros((), dtype=torch.bool)
        self._packer = Packer(device)

    def allocate(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the scratch that the longest matrix of `chunks`, all there are, takes. No update may be running."""
        listed = [chunk for chunk in chunks if chunk.matrices is not None]
        needed = max((_work_bytes(chunk) for chunk in listed), default=0)
        if needed <= self._buffer.numel():
            return
        on = self._device.torch_device
        skipped = torch.empty((), dtype=torch.bool, device=on)
        self._buffer = torch.empty(needed, dtype=torch.uint8, device=on)
        self._skipped = skipped
        if self._device.compiles:
            for algorithm in {chunk.matrices for chunk in listed if chunk.matrices is not None}:
                self._build(algorithm)

    def _build(self, algorithm: MatrixAlgorithm) -> None:
        """Update a small matrix where updates run: libraries of products take their memory with their first call."""
        matrix = torch.zeros(_BUILT_WITH, _BUILT_WITH, device=self._device.torch_device)
        step, size_bytes = matrix.new_zeros(()), work_bytes(algorithm, matrix.shape, matrix.stride())
        scratch = torch.empty(size_bytes, dtype=torch.uint8, device=self._device.torch_device)
        stored, first = matrix.to(torch.bfloat16), step.to(torch.int64)
        ready = self._device.record()
        with self._device.on_update_stream(), torch.no_grad():
            self._device.wait(ready)
            moments = [matrix for _ in algorithm.moments]
            work = Work(scratch, self._device.launch, self._skipped.fill_(True))
            algorithm.update_matrix(matrix, matrix, moments, step, algorithm.defaults, work)
            self._packer.round(
                Rounding(
                    integers(stored).view(-1),
                    integers(matrix).view(-1),
                    first,
                    step,
                    self._skipped,
                    shift=0,
                    moment=0,
                )
            )
            built = self._device.record()
        self._device.wait(built)

    def run(self, chunk: Chunk, states: MatrixStates, step: StreamedStep) -> None:
        """Update the matrices of a chunk."""
        if step.found_inf is None:
            self._device.launch(self._skipped.fill_, False)
        else:
            self._device.launch(torch.ne, step.found_inf, 0, out=self._skipped)
        if step.grad_scale is not None:
            self._device.launch(torch._foreach_div_, list(states.gradients), step.grad_scale)
        skipped = None if step.found_inf is None else self._skipped
        algorithm, work = chunk.matrices, Work(self._buffer, self._device.launch, skipped)
        assert algorithm is not None
        for index, piece in enumerate(states.pieces):
            member = piece.member
            each = zip(
                member.matrices_of(states.gradients[index]),
                member.matrices_of(states.masters[index]),
                *(member.matrices_of(moment[index]) for moment in states.moments),
                strict=True,
            )
            for place, (gradient, master, *stored) in enumerate(each):
                work.reuse()
                moments = [self._widened(moment, work) for moment in stored]
                algorithm.update_matrix(
                    master, gradient, moments, step.steps[member], step.groups[chunk.group], work
                )
                for number, (moment, new) in enumerate(zip(stored, moments, strict=True)):
                    if new is not moment:
                        rounding = Rounding(
                            integers(member.flat(moment)),
                            integers(member.flat(new)),
                            chunk.noise_offsets[piece],
                            step.steps[member],
                            self._skipped,
                            shift=place * master.numel(),
                            moment=number,
                        )
                        self._packer.round(rounding)

    def _widened(self, moment: torch.Tensor, work: Work) -> torch.Tensor:
        """Return a moment in fp32: itself, or a copy."""
        if moment.dtype == torch.float32:
            return moment
        wide = work.like(moment, torch.float32)
        self._device.launch(wide.copy_, moment)
        return wide

    def close(self) -> None:
        """Drop the scratch. No update may be running."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _work_bytes(chunk: Chunk) -> int:
    return matrix_work_bytes((piece.member for piece in chunk.pieces), widens=is_rounded(chunk.fields))


def matrix_work_bytes(members: Iterable[Member], *, widens: bool) -> int:
    """Return the device bytes of the scratch that the longest matrix takes, with its moments in fp32 if it `widens`."""
    kinds = set()
    for member in members:
        if member.matrices is not None and member.unit:
            kinds.add((member.matrices, member.param_local.shape[-2:], member.stride[-2:]))
    return max(
        (
            work_bytes(algorithm, shape, stride)
            + (len(algorithm.moments) * aligned(shape.numel()) * 4 if widens else 0)
            for algorithm, shape, stride in kinds
        ),
        default=0,
    )
