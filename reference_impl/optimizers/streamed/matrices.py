"""The update of a chunk's matrices, one after the other, by a formula of `algorithms.matrices`.

A formula leaves its results in scratch. They replace the old states behind it, unless the device has found that the
step is skipped. Matrices run one after the other, so one scratch, as long as the longest matrix takes, serves all.

Explained in docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from reference_impl.device import Device
from reference_impl.optimizers.algorithms import MatrixAlgorithm
from reference_impl.optimizers.algorithms.matrices import Work, work_bytes
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.streamed.chunks import Chunk
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
        self._skipped = torch.empty(())

    def allocate(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the scratch that the longest matrix of `chunks`, all there are, takes. No update may be running."""
        listed = [chunk for chunk in chunks if chunk.matrices is not None]
        needed = matrix_work_bytes(piece.member for chunk in listed for piece in chunk.pieces)
        if needed <= self._buffer.numel():
            return
        on = self._device.torch_device
        skipped = torch.empty((), dtype=torch.bool, device=on)
        self._buffer = torch.empty(needed, dtype=torch.uint8, device=on)
        self._skipped = skipped
        for algorithm in {chunk.matrices for chunk in listed}:
            if algorithm is not None and self._device.compiles:
                self._build(algorithm)

    def _build(self, algorithm: MatrixAlgorithm) -> None:
        """Update a small matrix where updates run: libraries of products take their memory with their first call."""
        matrix = torch.zeros(_BUILT_WITH, _BUILT_WITH, device=self._device.torch_device)
        step, size_bytes = matrix.new_zeros(()), work_bytes(algorithm, matrix.shape, matrix.stride())
        scratch = torch.empty(size_bytes, dtype=torch.uint8, device=self._device.torch_device)
        ready = self._device.record()
        with self._device.on_update_stream(), torch.no_grad():
            self._device.wait(ready)
            moments = [matrix for _ in algorithm.moments]
            algorithm.updated(
                matrix, matrix, moments, step, algorithm.defaults, Work(scratch, self._device.launch)
            )
            built = self._device.record()
        self._device.wait(built)

    def run(self, chunk: Chunk, states: MatrixStates, step: StreamedStep) -> None:
        """Update the matrices of a chunk."""
        if step.found_inf is not None:
            self._device.launch(torch.ne, step.found_inf, 0, out=self._skipped)
        if step.grad_scale is not None:
            self._device.launch(torch._foreach_div_, list(states.gradients), step.grad_scale)
        algorithm, work = chunk.matrices, Work(self._buffer, self._device.launch)
        assert algorithm is not None
        for index, piece in enumerate(states.pieces):
            member = piece.member
            each = zip(
                member.matrices_of(states.gradients[index]),
                member.matrices_of(states.masters[index]),
                *(member.matrices_of(moment[index]) for moment in states.moments),
                strict=True,
            )
            for gradient, *old in each:
                work.reuse()
                master, moments = algorithm.updated(
                    old[0], gradient, old[1:], step.steps[member], step.groups[chunk.group], work
                )
                for before, after in zip(old, (master, *moments), strict=True):
                    self._replace(before, after, is_skipped=step.found_inf is not None)

    def _replace(self, before: torch.Tensor, after: torch.Tensor, *, is_skipped: bool) -> None:
        """Let `before` be `after`; where it `is_skipped` perhaps, the device says whether it stays."""
        if is_skipped:
            self._device.launch(torch.where, self._skipped, before, after, out=before)
        else:
            self._device.launch(before.copy_, after)

    def close(self) -> None:
        """Drop the scratch. No update may be running."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def matrix_work_bytes(members: Iterable[Member]) -> int:
    """Return the device bytes of the scratch that the longest matrix of `members` takes."""
    kinds = set()
    for member in members:
        shape, stride = member.param_local.shape, member.stride
        if member.matrices is not None and member.unit:
            kinds.add((member.matrices, shape[-2:], stride[-2:]))
    return max((work_bytes(*kind) for kind in kinds), default=0)
