# SPDX-License-Identifier: Apache-2.0
"""The update of one chunk on the device: its kernels, with their views and numbers.

If all states are fp32 during the update, torch's own fused kernel runs. Kernels before and after it unpack and pack
hi/lo masters. Where moments have fewer bits one kernel does all of it; see `packing` and `compact`. Updates run one
after the other, so one set of scratch buffers, allocated once, serves all chunks.

The numbers of kernels that do everything are made before the step begins: from then on nothing is allocated.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from offload_arithmetic.states import scratch_bytes
from reference_impl.device import Device
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.layout import MASTER, Member, Piece
from reference_impl.optimizers.step import as_steps_run
from reference_impl.optimizers.streamed import packing
from reference_impl.optimizers.streamed.chunk_masters import ChunkMasters
from reference_impl.optimizers.streamed.chunks import (
    LOW,
    TIES,
    Chunk,
    Field,
    StreamedWeights,
    alignment_of,
    bytes_of,
    is_rounded,
    scale_of,
)
from reference_impl.optimizers.streamed.compact import CompactOperands
from reference_impl.optimizers.streamed.matrices import MatrixStates, MatrixUpdate
from reference_impl.optimizers.streamed.matrix_parts import PackedMaster
from reference_impl.optimizers.streamed.step import StreamedStep

# The numbers of one step for kernels that do everything: a row for each member.
StepNumbers = Mapping[Member, torch.Tensor]


class ChunkUpdate:
    """Runs the kernels of one chunk after another on the live current stream."""

    def __init__(self, device: Device, algorithm: Algorithm, *, follows_writes: bool = True) -> None:
        self._device = device
        self._algorithm = algorithm
        self._masters = ChunkMasters(device, follows_writes=follows_writes)
        self._scratch = Scratch(device)
        self._rounded = packing.RoundedUpdate(device, algorithm)
        self._matrices = MatrixUpdate(device)

    def allocate(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the scratch of `chunks`, all there are, on the live current stream. No update may be running.

        Compiled kernels are built here, for seconds, and not in the first step.
        """
        self._scratch.allocate(chunks)
        self._masters.expect(chunks)
        self._matrices.allocate(chunks)
        if self._device.compiles:
            kinds = {(chunk.pieces[0].member.param.dtype, chunk.fields): chunk for chunk in chunks}
            for chunk in kinds.values():
                self._build(chunk)

    @as_steps_run
    def _build(self, chunk: Chunk) -> None:
        """Update a few elements in the form of `chunk`, so that its kernels are loaded."""
        member, numel = chunk.pieces[0].member, alignment_of(chunk.fields)
        weight = torch.zeros(numel, dtype=member.param.dtype, device=self._device.torch_device)
        buffer = torch.zeros(
            bytes_of(chunk.fields, numel), dtype=torch.uint8, device=self._device.torch_device
        )
        few = replace(
            chunk,
            pieces=(Piece(member, 0, numel, 0),),
            numel=numel,
            masters=None if chunk.masters is None else weight.float(),
        )
        if chunk.has(LOW) and not chunk.rounded:
            self._scratch.build(few, buffer)
        # Triton makes another kernel for lengths that are no multiples of 16.
        for length in (numel, numel - 1) if chunk.rounded else ():
            piece, part = Piece(member, 0, length, 0), weight[:length]
            self._rounded.update(
                self._operands(few, buffer, piece, torch.zeros_like(part), part),
                first=next(iter(chunk.noise_offsets.values())),
                step=torch.zeros((), device=self._device.torch_device),
                numbers=self._rounded.any_numbers(),
                grad_scale=None,
                found_inf=None,
            )

    def numbers(self, step: StreamedStep, chunks: Sequence[Chunk]) -> StepNumbers:
        """Compute the numbers of `run` for `chunks`, on the live current stream. All later work must run behind it.

        They are kept until the next step has begun: it begins behind all updates of this one. Resident masters take
        over weights written by others.
        """
        self._masters.before_step(chunks, step.gradients, step.weights)
        rounded = (piece.member for chunk in chunks if chunk.rounded for piece in chunk.pieces)
        members = [member for member in dict.fromkeys(rounded) if member in step.gradients]
        return self._rounded.numbers(members, step)

    def run(
        self,
        chunk: Chunk,
        buffer: torch.Tensor,
        step: StreamedStep,
        numbers: StepNumbers,
        came_in: torch.Tensor | None = None,
    ) -> None:
        """Update the states in `buffer`, laid out like the chunk's storage, and the weights of its pieces.

        Pieces of members without a gradient stay as they are. `came_in` are the gradients of all elements where they
        come from the host, flat.
        """
        pieces = [piece for piece in chunk.pieces if piece.member in step.gradients]
        self._masters.in_slot(chunk, buffer, pieces, step.weights)
        if came_in is None:
            gradients = {piece: step.gradient(piece) for piece in pieces}
        else:
            gradients = {piece: _part(came_in, piece) for piece in pieces}
            for piece, gradient in gradients.items():
                for factor in step.factors.get(piece.member, ()):
                    self._device.launch(gradient.mul_, factor)
        if chunk.rounded:
            self._run_rounded(chunk, buffer, gradients, step, numbers)
        elif self._matrices.takes_packed(chunk):
            self._run_packed(chunk, buffer, gradients, step)
        else:
            self._run_exact(chunk, buffer, gradients, step)

    def close(self) -> None:
        """Drop the scratch and the tables. No update may be running."""
        self._scratch.close()
        self._matrices.close()

    def _run_exact(
        self, chunk: Chunk, buffer: torch.Tensor, gradients: Mapping[Piece, torch.Tensor], step: StreamedStep
    ) -> None:
        """Unpack, run the fused kernel or the update of matrices, round masters to weights, pack."""
        pieces = list(gradients)
        weights = [step.weights.of(piece) for piece in pieces]
        widened = [self._scratch.gradient(piece) for piece in pieces]
        # The kernel writes the scaled gradient back, so an fp32 gradient is copied too.
        self._device.launch(torch._foreach_copy_, widened, list(gradients.values()))
        self._scratch.unpack(chunk, buffer, step.weights)
        states = self._scratch.states(chunk, buffer)
        masters = states.get(MASTER, chunk.masters)
        updated = weights if masters is None else _cut(masters, pieces)
        if chunk.matrices is not None:
            moments = [_cut(states[name], pieces) for name in chunk.matrices.moments]
            self._matrices.run(chunk, MatrixStates(pieces, updated, widened, moments), step)
        else:
            self._device.launch(
                self._algorithm.update,
                updated,
                widened,
                [_cut(states[name], pieces) for name in self._algorithm.moments],
                [step.steps[piece.member] for piece in pieces],
                step.groups[chunk.group],
                grad_scale=step.grad_scale,
                found_inf=step.found_inf,
            )
        self._scratch.pack(chunk, buffer)
        if chunk.has(LOW):
            self._device.launch(
                torch._foreach_copy_, weights, [self._scratch.weight(piece) for piece in pieces]
            )
        elif masters is not None:
            self._device.launch(torch._foreach_copy_, weights, _cut(masters, pieces))

    def _run_packed(
        self, chunk: Chunk, buffer: torch.Tensor, gradients: Mapping[Piece, torch.Tensor], step: StreamedStep
    ) -> None:
        """Run kernels of matrices that take masters and gradients as they are stored."""
        assert chunk.matrices is not None
        pieces, low = list(gradients), chunk.field(LOW, buffer)
        masters = [
            PackedMaster(
                step.weights.of(piece).view(torch.int16),
                _part(low, piece),
                chunk.blocks(TIES, buffer, piece),
            )
            for piece in pieces
        ]
        moments = [_cut(chunk.field(name, buffer), pieces) for name in chunk.matrices.moments]
        self._matrices.run(chunk, MatrixStates(pieces, masters, list(gradients.values()), moments), step)

    def _run_rounded(
        self,
        chunk: Chunk,
        buffer: torch.Tensor,
        gradients: Mapping[Piece, torch.Tensor],
        step: StreamedStep,
        numbers: StepNumbers,
    ) -> None:
        """Run the one kernel that does everything, once a piece."""
        for piece, gradient in gradients.items():
            self._rounded.update(
                self._operands(chunk, buffer, piece, gradient, step.weights.of(piece)),
                first=chunk.noise_offsets[piece],
                step=step.steps[piece.member],
                numbers=numbers[piece.member],
                grad_scale=step.grad_scale,
                found_inf=step.found_inf,
            )

    def _operands(
        self,
        chunk: Chunk,
        buffer: torch.Tensor,
        piece: Piece,
        gradient: torch.Tensor,
        weight: torch.Tensor,
    ) -> packing.PieceOperands:
        """Return the kernel's operands of `piece`."""
        moments = self._algorithm.moments
        master = chunk.field(MASTER, buffer) if chunk.has(MASTER) else chunk.masters
        is_own_master = master is None and not chunk.has(LOW)
        whole = weight if is_own_master else None if master is None else _part(master, piece)
        written = None if is_own_master else weight.view(torch.int16) if chunk.has(LOW) else weight
        if chunk.compact:
            return CompactOperands(
                weight=written,
                low=chunk.blocks(LOW, buffer, piece) if chunk.has(LOW) else None,
                master=whole,
                gradient=gradient,
                codes=[chunk.blocks(name, buffer, piece) for name in moments],
                scales=[chunk.blocks(scale_of(name), buffer, piece) for name in moments],
            )
        return packing.Operands(
            weight=written,
            low=_part(chunk.field(LOW, buffer), piece) if chunk.has(LOW) else None,
            master=whole,
            gradient=gradient,
            moments=[packing.integers(_part(chunk.field(name, buffer), piece)) for name in moments],
        )


def scratch_bytes_an_element(fields: tuple[Field, ...], *, in_matrices: bool = False) -> int:
    """Return the scratch that the update of `fields` needs (`scratch_bytes`)."""
    return scratch_bytes(
        has_half_masters=fields[0].name == LOW, is_rounded=is_rounded(fields) and not in_matrices
    )


class Scratch:
    """Device buffers as long as the longest chunk. Its methods use the live current stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._packer = packing.Packer(device)
        self._gradients = torch.empty(0)
        self._masters = torch.empty(0)
        self._weights = torch.empty(0, dtype=torch.bfloat16)

    def allocate(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the scratch of the longest of `chunks`. No update may be running."""
        exact = [chunk for chunk in chunks if not chunk.rounded]
        halved = [chunk for chunk in exact if chunk.has(LOW)]
        self._gradients = self._grown(self._gradients, exact)
        self._masters = self._grown(self._masters, halved)
        self._weights = self._grown(self._weights, halved)

    def close(self) -> None:
        """Drop the buffers. No update may be running."""
        self._gradients = self._masters = torch.empty(0)
        self._weights = torch.empty(0, dtype=torch.bfloat16)

    def gradient(self, piece: Piece) -> torch.Tensor:
        """Return the fp32 buffer for the gradient of `piece`."""
        return _part(self._gradients, piece)

    def weight(self, piece: Piece) -> torch.Tensor:
        """Return the buffer for the weight of `piece`: the new one, after `pack` of a chunk with hi/lo masters."""
        return _part(self._weights, piece)

    def unpack(self, chunk: Chunk, buffer: torch.Tensor, weights: StreamedWeights) -> None:
        """Make `states` of `chunk`, which `buffer` holds, valid."""
        if chunk.has(LOW):
            self._device.launch(
                torch._foreach_copy_,
                [self.weight(piece) for piece in chunk.pieces],
                [weights.of(piece) for piece in chunk.pieces],
            )
            self._packer.unpack(self._halves(chunk, buffer))

    def states(self, chunk: Chunk, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return all states of `chunk`, by name, as flat fp32 tensors; valid between `unpack` and `pack`."""
        states = {field.name: chunk.field(field.name, buffer) for field in chunk.fields}
        if states.pop(LOW, None) is not None:
            states[MASTER] = self._masters[: chunk.numel]
        return states

    def build(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Run the kernels for a chunk with hi/lo masters, whose states and the scratch may be overwritten."""
        halves = self._halves(chunk, buffer)
        self._packer.unpack(halves)
        self._packer.pack(halves)

    def pack(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Write the `states` back to `buffer`."""
        if chunk.has(LOW):
            self._packer.pack(self._halves(chunk, buffer))

    def _grown(self, buffer: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        numel = max((chunk.numel for chunk in chunks), default=0)
        if numel <= buffer.numel():
            return buffer
        return torch.empty(numel, dtype=buffer.dtype, device=self._device.torch_device)

    def _halves(self, chunk: Chunk, buffer: torch.Tensor) -> packing.Halves:
        assert chunk.flagged is not None
        return packing.Halves(
            high=self._weights[: chunk.numel].view(torch.int16),
            low=chunk.field(LOW, buffer),
            masters=self._masters[: chunk.numel].view(torch.int32),
            flagged=_flag_holder(chunk.field(chunk.flagged, buffer)),
        )


def _flag_holder(field: torch.Tensor) -> torch.Tensor:
    return field if field.dtype == torch.uint8 else packing.integers(field)


def _cut(state: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    return [_part(state, piece) for piece in pieces]


def _part(state: torch.Tensor, piece: Piece) -> torch.Tensor:
    return state[piece.offset : piece.offset + piece.numel]
