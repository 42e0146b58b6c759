# SPDX-License-Identifier: Apache-2.0
"""The parts of a formula of matrices before and behind the whole matrix: by operators, or by one kernel each.

Operators take gradients and masters in fp32, and read and write each of them in every launch. A kernel takes them as
they are stored. It has to round at the same places as the operators. A trial before the first step compares them on
matrices of noise, and kernels run only if no bit differs. The CPU twin has operators alone.

Explained in docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from math import prod
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast

import torch

from reference_impl.device import Device
from reference_impl.optimizers.algorithms import MatrixAlgorithm, Muon
from reference_impl.optimizers.algorithms.matrices import ShardedMatrixAlgorithm, Work
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.chunks import TIES, Chunk, is_rounded
from reference_impl.optimizers.streamed.packing import FLAGS_A_BYTE, Halves, Packer, Rounding, integers

# Of the trial: wide and tall, several programs of a kernel each. Triton builds another kernel for multiples of 16.
_SHAPES = ((80, 1008), (1008, 80))
# With each: the two forms of a mean, every kernel that is built; and the divisor of gradients.
_OPTIONS = (
    ({"momentum": 0.95, "nesterov": True}, 1.7),
    ({"momentum": 0.3, "nesterov": True}, None),
    ({"momentum": 0.3, "nesterov": False}, 1.7),
    ({"momentum": 0.95, "nesterov": False}, None),
)


class PackedMaster(NamedTuple):
    """The bf16 weights of a matrix and their lower halves (both int16), in one layout, and a bit each for ties."""

    high: torch.Tensor
    low: torch.Tensor
    ties: torch.Tensor


class Matrix(NamedTuple):
    """The tensors of one matrix, or of this rank's shard of it, that an update reads and writes.

    Operators take an fp32 `master`, and the gradient in fp32. All but flags have the strides of the parameter.
    `first` (0-dim int64) and `shift` number the first element, and `counter` (0-dim) the step, for noise.
    """

    gradient: torch.Tensor
    master: torch.Tensor | PackedMaster
    moments: tuple[torch.Tensor, ...]
    first: torch.Tensor
    counter: torch.Tensor
    shift: int


class Applied(NamedTuple):
    """The numbers of a step for all matrices of a group; gradients that are scaled already have no `grad_scale`."""

    group: Mapping[str, Any]
    work: Work
    grad_scale: torch.Tensor | None
    skipped: torch.Tensor


class Parts(Protocol):
    """Both parts of a formula, on the live current stream."""

    def before(
        self, algorithm: ShardedMatrixAlgorithm, matrix: Matrix, direction: torch.Tensor, step: Applied
    ) -> None:
        """Update moments, and write the input of `of_whole` into `direction`, of the matrix's shape and strides."""

    def after(
        self,
        algorithm: ShardedMatrixAlgorithm,
        matrix: Matrix,
        result: torch.Tensor,
        shape: Sequence[int],
        step: Applied,
    ) -> None:
        """Update the master by the result of `of_whole`, of any strides; `shape` is that of the whole matrix."""


class Operators:
    """Runs both parts by the operators of a formula: of gradients that are scaled, and fp32 masters."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._packer = Packer(device)

    def before(
        self, algorithm: ShardedMatrixAlgorithm, matrix: Matrix, direction: torch.Tensor, step: Applied
    ) -> None:
        """As `Parts.before`."""
        moments = [self.widened(moment, step.work) for moment in matrix.moments]
        found = algorithm.before(matrix.gradient, moments, step.group, step.work)
        self._device.launch(direction.copy_, found)
        self.round(matrix, moments, step.skipped)

    def after(
        self,
        algorithm: ShardedMatrixAlgorithm,
        matrix: Matrix,
        result: torch.Tensor,
        shape: Sequence[int],
        step: Applied,
    ) -> None:
        """As `Parts.after`."""
        assert isinstance(matrix.master, torch.Tensor)
        algorithm.after(matrix.master, result, shape, step.group, step.work)

    def widened(self, moment: torch.Tensor, work: Work) -> torch.Tensor:
        """Return a moment in fp32: itself, or a copy."""
        if moment.dtype == torch.float32:
            return moment
        wide = work.like(moment, torch.float32)
        self._device.launch(wide.copy_, moment)
        return wide

    def round(self, matrix: Matrix, moments: Iterable[torch.Tensor], skipped: torch.Tensor) -> None:
        """Round widened moments to their stored dtype."""
        for number, (moment, new) in enumerate(zip(matrix.moments, moments, strict=True)):
            if new is not moment:
                stored, values = (integers(_flat(each)) for each in (moment, new))
                first, counter, shift = matrix[3:]
                rounding = Rounding(stored, values, first, counter, skipped, shift=shift, moment=number)
                self._packer.round(rounding)


class Kernels:
    """Runs both parts by a kernel each, of gradients and masters as they are stored."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._exact: dict[tuple[MatrixAlgorithm, bool], bool] = {}
        self._served: set[Chunk] = set()

    def learn(self, chunks: Iterable[Chunk]) -> None:
        """Try the kernels of `chunks`, all there are; allocates for a while, and the host waits for the device."""
        self._served = {chunk for chunk in chunks if self._device.compiles and self._serves(chunk)}

    def serve(self, chunk: Chunk) -> bool:
        """Return whether they update the matrices of `chunk`."""
        return chunk in self._served

    def before(
        self, algorithm: ShardedMatrixAlgorithm, matrix: Matrix, direction: torch.Tensor, step: Applied
    ) -> None:
        """As `Parts.before`."""
        if matrix.gradient.numel():
            kernel = _kernels_of(algorithm).before
            self._device.launch(kernel, matrix, direction, step.group, step.grad_scale, step.skipped)

    def after(
        self,
        algorithm: ShardedMatrixAlgorithm,
        matrix: Matrix,
        result: torch.Tensor,
        shape: Sequence[int],
        step: Applied,
    ) -> None:
        """As `Parts.after`."""
        if matrix.gradient.numel():
            kernel = _kernels_of(algorithm).after
            self._device.launch(kernel, matrix, result, shape, step.group, step.skipped)

    def _serves(self, chunk: Chunk) -> bool:
        algorithm = chunk.matrices
        if not isinstance(algorithm, Muon) or not chunk.has(TIES):
            return False
        if not all(_fits_kernels(piece.member) for piece in chunk.pieces):
            return False
        kind = algorithm, is_rounded(chunk.fields)
        if kind not in self._exact:
            cases = zip(cycle(_SHAPES), _OPTIONS, strict=False)
            self._exact[kind] = all(self._is_exact(*kind, shape, *options) for shape, options in cases)
        return self._exact[kind]

    def _is_exact(
        self,
        algorithm: Muon,
        rounds: bool,
        shape: tuple[int, int],
        options: Mapping[str, Any],
        divisor: float | None,
    ) -> bool:
        """Return whether kernels and operators turn a matrix of noise into the same bits."""
        on, numel = self._device.torch_device, prod(shape)
        buffer = torch.empty(4 * numel + 2**16, dtype=torch.uint8, device=on)
        scale = None if divisor is None else torch.tensor(divisor, device=on)
        step = Applied(
            {**algorithm.defaults, **options},
            Work(buffer, self._device.launch, None),
            scale,
            torch.tensor(False, device=on),
        )
        packer, found = Packer(self._device), []
        for parts in (self, Operators(self._device)):
            matrix, result = _noise(shape, on, rounds=rounds)
            direction = torch.empty(shape, dtype=algorithm.crosses_as, device=on)
            packed, given = cast(PackedMaster, matrix.master), matrix
            masters = torch.empty(numel, dtype=torch.int32, device=on)
            halves = Halves(packed.high.view(-1), packed.low.view(-1), masters, packed.ties)
            if parts is not self:
                packer.unpack(halves)
                scaled = matrix.gradient.float().div_(1 if scale is None else scale)
                given = matrix._replace(gradient=scaled, master=masters.view(torch.float32).view(shape))
            parts.before(algorithm, given, direction, step)
            parts.after(algorithm, given, result, shape, step)
            if parts is not self:
                packer.pack(halves)
            found.append([*packed, integers(*matrix.moments), direction])
        return all(map(torch.equal, *found))


def _noise(shape: tuple[int, int], on: torch.device, *, rounds: bool) -> tuple[Matrix, torch.Tensor]:
    """Return a matrix of noise, and a result of noise in the layout that `of_whole` gives it."""
    generator, numel = torch.Generator(on).manual_seed(0), prod(shape)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=on).to(dtype)

    def bits(count: int, dtype: torch.dtype) -> torch.Tensor:
        limits = torch.iinfo(dtype)
        drawn = torch.randint(limits.min, limits.max + 1, (count,), generator=generator, device=on)
        return drawn.to(dtype)

    ties = bits(numel // FLAGS_A_BYTE, torch.uint8)
    master = PackedMaster(normal(*shape).view(torch.int16), bits(numel, torch.int16).view(shape), ties)
    average = normal(*shape, dtype=torch.bfloat16 if rounds else torch.float32)
    first, counter = (torch.tensor(number, device=on) for number in (2**31 - 1000, 5.0))
    matrix = Matrix(normal(*shape), master, (average,), first, counter, 304)
    is_tall = shape[0] > shape[1]
    return matrix, normal(*reversed(shape)).mT if is_tall else normal(*shape)


def _fits_kernels(member: Member) -> bool:
    """Return whether the matrices of a member have no gaps, and rows (or columns, as they lie) of whole bytes of flags.

    Shards cross in rows.
    """
    (rows, columns), (first, second) = member.param_local.shape[-2:], member.stride[-2:]
    in_rows = (first, second) == (columns, 1) and columns % FLAGS_A_BYTE == 0
    in_columns = (first, second) == (1, rows) and rows % FLAGS_A_BYTE == 0 and member.cut is None
    return in_rows or in_columns


def _kernels_of(algorithm: ShardedMatrixAlgorithm) -> ModuleType:
    """Import the kernels of a formula: triton comes with torch's builds for GPUs only."""
    assert isinstance(algorithm, Muon)
    from reference_impl.optimizers.streamed import muon_kernel

    return muon_kernel


def _flat(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.as_strided((matrix.numel(),), (1,))
