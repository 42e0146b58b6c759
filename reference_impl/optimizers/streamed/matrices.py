# SPDX-License-Identifier: Apache-2.0
"""The update of a chunk's matrices, one after the other, by a formula of `algorithms.matrices`.

The parts before and behind the products run in one kernel each if `matrix_parts` allows it. Of
matrices that ranks share each rank has its shards here. A formula of elements runs on them, before and behind an
exchange (`distributed.matrix_owners`) by which the owner of each matrix has it whole. A chunk's matrices cross
together.

A formula changes nothing if the device has skipped the step. Matrices run one after the other, or
several short ones together, so one scratch, as long as the longest matrix takes, serves all. Moments that are kept in
bf16 are widened there, and rounded behind the formula.

Explained in docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch

from offload_arithmetic.division import aligned
from reference_impl.device import Device
from reference_impl.distributed.matrix_owners import Cut, Exchange
from reference_impl.optimizers.algorithms import MatrixAlgorithm
from reference_impl.optimizers.algorithms.matrices import ShardedMatrixAlgorithm, Work, work_bytes
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.streamed.batches import Batches, MatrixKind, kind_of
from reference_impl.optimizers.streamed.chunks import Chunk, is_rounded
from reference_impl.optimizers.streamed.matrix_parts import (
    Applied,
    Kernels,
    Matrix,
    Operators,
    PackedMaster,
    Parts,
)
from reference_impl.optimizers.streamed.packing import FLAGS_A_BYTE, Packer, Rounding, integers
from reference_impl.optimizers.streamed.step import StreamedStep

# Of the matrix that makes the device load its libraries.
_BUILT_WITH = 64


class MatrixStates(NamedTuple):
    """The tensors that an update reads and writes, flat: masters and gradients of each piece, and these of each moment.

    Masters and gradients are fp32, or as they are stored where `MatrixUpdate.takes_packed` says so.
    """

    pieces: Sequence[Piece]
    masters: Sequence[torch.Tensor] | Sequence[PackedMaster]
    gradients: Sequence[torch.Tensor]
    moments: Sequence[Sequence[torch.Tensor]]


def _matrices_in(states: MatrixStates, chunk: Chunk, step: StreamedStep) -> Iterator[tuple[Piece, Matrix]]:
    for index, piece in enumerate(states.pieces):
        cut, tensors = piece.member.matrices_of, [each[index] for each in states.moments]
        matrices = zip(*map(cut, (states.gradients[index], *tensors)), strict=True)
        first, counter = chunk.noise_offsets[piece], step.steps[piece.member]
        masters: Iterable[torch.Tensor | PackedMaster] = _masters_in(piece, states.masters[index])
        for place, ((gradient, *moments), master) in enumerate(zip(matrices, masters, strict=True)):
            shift = place * gradient.numel()
            yield piece, Matrix(gradient, master, tuple(moments), first, counter, shift)


def _masters_in(
    piece: Piece, masters: torch.Tensor | PackedMaster
) -> Sequence[torch.Tensor] | Sequence[PackedMaster]:
    if isinstance(masters, torch.Tensor):
        return piece.member.matrices_of(masters)
    halves = map(piece.member.matrices_of, masters[:2])
    flags = masters.ties.split(-(-piece.member.matrix_numel // FLAGS_A_BYTE))
    return [PackedMaster(*each) for each in zip(*halves, flags, strict=False)]


class MatrixUpdate:
    """Runs formulas of matrices on the live current stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._skipped = torch.zeros((), dtype=torch.bool)
        self._packer = Packer(device)
        self._batches = Batches(device)
        self._operators, self._kernels = Operators(device), Kernels(device)
        self._exchanges: dict[Chunk, Exchange] = {}
        self._crossing = torch.empty(0)

    def allocate(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the scratch that the longest matrix of `chunks`, all there are, takes. No update may be running."""
        listed = [chunk for chunk in chunks if chunk.matrices is not None]
        self._prepare_exchanges(listed)
        needed = max((_work_bytes(chunk) for chunk in listed), default=0)
        if needed > self._buffer.numel():
            on = self._device.torch_device
            skipped = torch.empty((), dtype=torch.bool, device=on)
            self._buffer = torch.empty(needed, dtype=torch.uint8, device=on)
            self._skipped = skipped
            if self._device.compiles:
                for algorithm in {chunk.matrices for chunk in listed if chunk.matrices is not None}:
                    self._build(algorithm)
        self._learn(listed)

    def takes_packed(self, chunk: Chunk) -> bool:
        """Return whether masters and gradients of `chunk` are taken as they are stored."""
        return self._kernels.serve(chunk)

    def _learn(self, chunks: Sequence[Chunk]) -> None:
        """Find the matrices that run together, and their kernels, for updates here."""
        runs = [self._kinds(chunk, chunk.pieces) for chunk in chunks]
        widened = max(
            (
                _widened_bytes(piece.member)
                for chunk in chunks
                if is_rounded(chunk.fields)
                for piece in chunk.pieces
            ),
            default=0,
        )
        ready = self._device.record()
        with self._device.on_update_stream(), torch.no_grad():
            self._device.wait(ready)
            self._batches.learn(runs, self._buffer, widened)
            self._kernels.learn(chunks)
            learnt = self._device.record()
        self._device.wait(learnt)

    def _kinds(self, chunk: Chunk, pieces: Sequence[Piece]) -> list[MatrixKind | None]:
        """Return the kinds of the matrices of `pieces`; for shared matrices, the kinds of the whole ones here."""
        if chunk.exchanges:
            owned = self._exchanges[chunk].owned
            return [kind_of(chunk.matrices, cut.shape, (cut.shape[1], 1)) for cut, _ in owned]
        return [
            kind_of(chunk.matrices, piece.member.param_local.shape[-2:], piece.member.stride[-2:])
            for piece in pieces
            for _ in range(piece.numel // piece.member.matrix_numel)
        ]

    def _prepare_exchanges(self, chunks: Sequence[Chunk]) -> None:
        """Give each matrix that ranks share its owner, and allocate memory for the longest exchange.

        All ranks have the same `chunks`, in the same order. A collective where they have exchanged none of a mesh yet.
        """
        loads: dict[str, list[int]] = {}
        exchanges = {chunk: Exchange(cuts, loads) for chunk in chunks if (cuts := _cuts(chunk))}
        numel = max((exchange.numel for exchange in exchanges.values()), default=0)
        if not numel:
            return
        (dtype,) = {cast(ShardedMatrixAlgorithm, chunk.matrices).crosses_as for chunk in exchanges}
        crossing = torch.empty(numel, dtype=dtype, device=self._device.torch_device)
        for exchange in exchanges.values():
            exchange.place(crossing)
        # A communicator takes its memory with the first one; a begun step may not.
        for exchange in {exchange.key: exchange for exchange in exchanges.values()}.values():
            exchange.to_owners()
        self._crossing, self._exchanges = crossing, exchanges

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
        if step.grad_scale is not None and not self.takes_packed(chunk):
            self._device.launch(torch._foreach_div_, list(states.gradients), step.grad_scale)
        skipped = None if step.found_inf is None else self._skipped
        work = Work(self._buffer, self._device.launch, skipped)
        applied = Applied(step.groups[chunk.group], work, step.grad_scale, self._skipped)
        matrices = list(_matrices_in(states, chunk, step))
        if chunk.exchanges:
            self._run_shared(chunk, states, matrices, applied)
        else:
            self._run_whole(chunk, states, matrices, applied)

    def _run_whole(
        self,
        chunk: Chunk,
        states: MatrixStates,
        matrices: Sequence[tuple[Piece, Matrix]],
        step: Applied,
    ) -> None:
        """Update matrices one after the other, or matrices of one kind together."""
        for kind, places in self._batches.of(self._kinds(chunk, states.pieces)):
            step.work.reuse()
            if kind is None:
                self._run_single(chunk, matrices[places[0]][1], step)
            else:
                self._run_batch(chunk, kind, [matrices[place][1] for place in places], step)

    def _run_single(self, chunk: Chunk, matrix: Matrix, step: Applied) -> None:
        """Update a matrix by a formula that does not consist of parts."""
        assert chunk.matrices is not None
        assert isinstance(matrix.master, torch.Tensor)
        moments = [self._operators.widened(moment, step.work) for moment in matrix.moments]
        chunk.matrices.update_matrix(
            matrix.master, matrix.gradient, moments, matrix.counter, step.group, step.work
        )
        self._operators.round(matrix, moments, step.skipped)

    def _run_batch(self, chunk: Chunk, kind: MatrixKind, batch: Sequence[Matrix], step: Applied) -> None:
        """Update matrices of one kind together, elementwise work one after the other."""
        parts, work = self._parts_of(chunk), step.work
        stack = kind.stack(len(batch), work)
        behind = work.used_bytes
        for matrix, place in zip(batch, stack.unbind(), strict=True):
            work.reuse(behind=behind)
            parts.before(kind.algorithm, matrix, place, step)
        work.reuse(behind=behind)
        results = self._transformed(kind, stack, step)
        for matrix, result in zip(batch, results.unbind(), strict=True):
            parts.after(kind.algorithm, matrix, result, kind.shape, step)

    def _run_shared(
        self,
        chunk: Chunk,
        states: MatrixStates,
        matrices: Sequence[tuple[Piece, Matrix]],
        step: Applied,
    ) -> None:
        """Update this rank's shards of matrices; meanwhile each matrix is whole on its owner.

        Bytes of a parameter that has no gradient, on any rank, cross and are not used.
        """
        algorithm, parts = cast(ShardedMatrixAlgorithm, chunk.matrices), self._parts_of(chunk)
        exchange, launch, work = self._exchanges[chunk], self._device.launch, step.work
        shards = {piece: iter(exchange.shards[index]) for index, piece in enumerate(chunk.pieces)}
        crossing = [(piece, matrix, next(shards[piece])) for piece, matrix in matrices]
        for _, matrix, shard in crossing:
            work.reuse()
            parts.before(algorithm, matrix, shard, step)
        exchange.to_owners()
        for kind, places in self._batches.of(self._kinds(chunk, states.pieces)):
            assert kind is not None
            work.reuse()
            stack, batch = kind.stack(len(places), work), [exchange.owned[place] for place in places]
            for whole, (cut, own) in zip(stack.unbind(), batch, strict=True):
                for shard, part in zip(own, cut.parts_of(whole), strict=True):
                    launch(part.copy_, shard)
            results = self._transformed(kind, stack, step)
            for result, (cut, own) in zip(results.unbind(), batch, strict=True):
                for shard, part in zip(own, cut.parts_of(result), strict=True):
                    launch(shard.copy_, part)
        exchange.to_ranks()
        for piece, matrix, shard in crossing:
            work.reuse()
            parts.after(algorithm, matrix, shard, piece.member.param.shape[-2:], step)

    def _transformed(self, kind: MatrixKind, stack: torch.Tensor, step: Applied) -> torch.Tensor:
        """Return the new matrices of `stack`: of one alone by the products of one."""
        given = stack if len(stack) > 1 else stack[0]
        return kind.algorithm.of_whole(given, step.group, step.work).view(stack.shape)

    def _parts_of(self, chunk: Chunk) -> Parts:
        return self._kernels if self._kernels.serve(chunk) else self._operators

    def close(self) -> None:
        """Drop the scratch. No update may be running."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._crossing, self._exchanges = torch.empty(0), {}
        self._kernels.learn(())


def _widened_bytes(member: Member) -> int:
    """Return the bytes that the moments of one matrix take in fp32."""
    algorithm, shape = member.matrices, member.param_local.shape[-2:]
    return 0 if algorithm is None else len(algorithm.moments) * aligned(shape.numel()) * 4


def _cuts(chunk: Chunk) -> list[Cut]:
    """Return how ranks share the parameters of a chunk; none where this rank has whole matrices."""
    return [piece.member.cut for piece in chunk.pieces if piece.member.cut is not None]


def _work_bytes(chunk: Chunk) -> int:
    return matrix_work_bytes((piece.member for piece in chunk.pieces), widens=is_rounded(chunk.fields))


def matrix_work_bytes(members: Iterable[Member], *, widens: bool) -> int:
    """Return the device bytes of the scratch that the longest matrix takes, with its moments in fp32 if it `widens`."""
    kinds = set()
    for member in members:
        if member.matrices is None or not member.unit:
            continue
        if member.cut is None:
            kinds.add((member.matrices, member.param_local.shape[-2:], member.stride[-2:]))
        else:
            kinds.add((member.matrices, torch.Size(member.cut.shape), (member.cut.shape[1], 1)))
    return max(
        (
            work_bytes(algorithm, shape, stride)
            + (len(algorithm.moments) * aligned(shape.numel()) * 4 if widens else 0)
            for algorithm, shape, stride in kinds
        ),
        default=0,
    )
