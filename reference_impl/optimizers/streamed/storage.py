# SPDX-License-Identifier: Apache-2.0
"""Where states are between steps: chunks in pinned host memory, reserved at once, or on the device.

`StateFormat` has the states of a chunk with their dtypes, and `StateStorage` makes the chunks. Saving, loading and
showing the states of single members go through `states`.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from offload_arithmetic.division import aligned
from offload_arithmetic.sizes import STATE_CHUNK_BYTES
from offload_arithmetic.states import BF16_BYTES, Form, form
from reference_impl.device import Device
from reference_impl.memory.arena import ALIGNMENT_BYTES, HostArena, HostBlock
from reference_impl.optimizers.algorithms import Algorithm, Formula, MatrixAlgorithm
from reference_impl.optimizers.algorithms.adam import adam_formula
from reference_impl.optimizers.layout import MASTER, Member, Piece
from reference_impl.optimizers.options import States
from reference_impl.optimizers.streamed import compact, packing
from reference_impl.optimizers.streamed.chunks import (
    LOW,
    TIES,
    Chunk,
    Field,
    Part,
    alignment_of,
    bytes_of,
    plan_chunks,
    scale_of,
    slot_bytes,
)
from reference_impl.optimizers.streamed.matrices import matrix_work_bytes
from reference_impl.optimizers.streamed.update import scratch_bytes_an_element


def has_kernel_of(formula: Formula, device: Device) -> bool:
    """Return whether bf16 moments can be updated: on a GPU that takes a kernel with the formula in it."""
    if not device.compiles:
        return True
    from reference_impl.optimizers.streamed import rounded_kernel

    return rounded_kernel.has(formula)


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """The format of streamed states.

    `offload_masters`: fp32 masters are stored in chunks, not on the device. `hi_lo_masters`: only the lower halves of
    the masters of bf16 weights are, and with `ties_apart` their flags have a field of their own, because moments have
    signs. `moments_dtype`: fp32, or bf16 for rounded moments. `compact_low_bits`: instead of all these, moments in 8
    bits, and so many low bits of the masters of bf16 weights, 8 or 16; see `compact`.
    """

    offload_masters: bool = True
    hi_lo_masters: bool = False
    ties_apart: bool = False
    moments_dtype: torch.dtype = torch.float32
    compact_low_bits: int | None = None

    @classmethod
    def of(
        cls, states: States, algorithm: Algorithm, device: Device, *, offload_masters: bool = True
    ) -> StateFormat:
        """Return the format of a form of states, see `Streaming`.

        Only Adam and AdamW have the bit that lower halves of masters need: the sign of `exp_avg_sq`. Raises ValueError
        for a form that is not possible.
        """
        is_adam = algorithm.formula is adam_formula
        if states != "exact" and not device.has_kernels:
            raise ValueError(
                f"states is {states!r}, whose kernels are made of triton; expected it to be installed; try pip install "
                "triton, or states='exact'"
            )
        if states == "bf16-moments" and not has_kernel_of(algorithm.formula, device):
            raise ValueError(
                f"states is {states!r} for {type(algorithm).__name__}, whose formula no kernel of a GPU has; expected "
                "Adam, AdamW or SGD; try states='exact'"
            )
        if not states.startswith("compact"):
            return cls(
                offload_masters=offload_masters,
                hi_lo_masters=offload_masters and is_adam and device.has_kernels,
                moments_dtype=torch.float32 if states == "exact" else torch.bfloat16,
            )
        if not is_adam:
            raise ValueError(
                f"states is {states!r} for {type(algorithm).__name__}; expected Adam or AdamW, for whose two moments "
                "the 8 bits are made; try states='exact'"
            )
        if not offload_masters:
            raise ValueError(
                f"states is {states!r} with offload_masters False; expected masters in the compact form; try "
                "offload_masters=True"
            )
        return cls(compact_low_bits=int(states.removeprefix("compact-")))

    def of_matrices(self) -> StateFormat:
        """Return the format of states that a formula of matrices updates.

        Raises ValueError for a form that such states do not have.
        """
        if self.compact_low_bits is not None:
            raise ValueError(
                f"states are 'compact-{self.compact_low_bits}' and a group is updated in matrices; expected moments of "
                "16 or 32 bits for these; try states='exact' or 'bf16-moments'"
            )
        return replace(self, ties_apart=True)

    @property
    def form(self) -> Form:
        """The bytes of a streamed element."""
        return form(
            hi_lo_masters=self.hi_lo_masters,
            moment_bytes=self.moments_dtype.itemsize,
            compact_low_bits=self.compact_low_bits,
        )

    def keeps_exact(self, param: torch.Tensor) -> bool:
        """Return whether the states of `param` stay on the device in fp32: of one dimension where others are compact.

        Norms and biases have hardly any elements, and neighbours in them differ more than in a matrix.
        """
        return self.compact_low_bits is not None and param.dim() < 2

    def fields(self, dtype: torch.dtype, moments: tuple[str, ...]) -> tuple[Field, ...]:
        """Return the fields of a chunk whose parameters have `dtype`.

        fp32 parameters are their own masters. Masters of fp16 parameters, which do not begin with the bits of their
        weights, are stored whole.
        """
        if self.compact_low_bits is not None:
            return self._compact_fields(dtype, moments)
        states = tuple(Field(name, self.moments_dtype) for name in moments)
        if dtype == torch.float32 or not self.offload_masters:
            return states
        halved = self.hi_lo_masters and dtype == torch.bfloat16
        if not halved:
            return (Field(MASTER, torch.float32), *states)
        ties = (Field(TIES, torch.uint8, packing.FLAGS_A_BYTE),) if self.ties_apart else ()
        return (Field(LOW, torch.int16), *states, *ties)

    def _compact_fields(self, dtype: torch.dtype, moments: tuple[str, ...]) -> tuple[Field, ...]:
        """Return the fields of a compact chunk, longest numbers first and scales last: each begins aligned."""
        low = Field(LOW, torch.int8 if self.compact_low_bits == 8 else torch.int16)
        masters = {torch.bfloat16: (low,), torch.float32: ()}.get(dtype, (Field(MASTER, torch.float32),))
        average, square = moments
        scales = (Field(scale_of(name), torch.int16, compact.BLOCK) for name in moments)
        return (*masters, Field(average, torch.int8), Field(square, torch.uint8), *scales)

    def unpacked_fields(self, dtype: torch.dtype, moments: tuple[str, ...]) -> tuple[Field, ...]:
        """Return the same states, all in fp32."""
        return StateFormat(offload_masters=self.offload_masters).fields(dtype, moments)

    def check(self, algorithm: Algorithm, *, chunk_bytes: int) -> None:
        """Raise ValueError for chunks of fewer elements than a piece begins at.

        The multiples are `ALIGNMENT` in fp32, or `COMPACT_ALIGNMENT` in the compact format with masters in fp32.
        """
        fields = self.fields if self.compact_low_bits is not None else self.unpacked_fields
        largest = fields(torch.float16, algorithm.moments)
        numel = alignment_of(largest)
        least_bytes = bytes_of(largest, numel)
        if chunk_bytes < least_bytes:
            raise ValueError(
                f"chunk_bytes is {chunk_bytes}; expected {least_bytes} or more, {numel} elements of "
                f"{least_bytes / numel:g} bytes; try {STATE_CHUNK_BYTES}"
            )


class Kind(NamedTuple):
    """Common properties of chunks: the form of states, and the longest uncut unit.

    `whole` counts the elements of a matrix shared by ranks, 0 without one.
    """

    dtype: torch.dtype
    matrices: MatrixAlgorithm | None = None
    unit: int = 1
    whole: int = 0

    @classmethod
    def of(cls, member: Member) -> Kind:
        """Return that of a member."""
        whole = 0 if member.cut is None else prod(member.cut.shape)
        return cls(member.dtype, member.matrices, member.unit, whole)


class StateStorage:
    """Makes chunks of at most `chunk_bytes`, as stored, or of one matrix, and owns the host memory behind them.

    Args:
        device: the device of resident chunks, resident masters and noise offsets.
        moments: the names of the moments.
        chunk_bytes: most bytes of one chunk.
        state_format: the states of a chunk and their dtypes.
        remedy: ends the message of the HostMemoryError.
        host_gradients: chunks have room for gradients on the host.
    """

    def __init__(
        self,
        device: Device,
        *,
        moments: tuple[str, ...],
        chunk_bytes: int,
        state_format: StateFormat,
        remedy: str,
        host_gradients: bool = False,
    ) -> None:
        self._device = device
        self._moments = moments
        self._chunk_bytes = chunk_bytes
        self._format = state_format
        self._host_gradients = host_gradients
        self._arena = HostArena(device, remedy=remedy)
        # Blocks taken by the last `make`, and blocks reserved for discarded chunks.
        self._blocks: list[HostBlock] = []
        self._used_bytes = 0
        self._spare_bytes = 0

    def chunk_elements(self, kind: Kind) -> int:
        """Return the most elements that a chunk of such members has: one matrix at least."""
        fields = self._fields(kind)
        alignment = alignment_of(fields)
        return max(self._chunk_bytes // bytes_of(fields, alignment) * alignment, aligned(kind.unit))

    def slot_bytes(self, kind: Kind) -> int:
        """Return the most bytes of a chunk of such members on the device."""
        elements = self.chunk_elements(kind)
        return slot_bytes(bytes_of(self._fields(kind), elements), elements * self._gradient_bytes(kind.dtype))

    def scratch_bytes(self, kind: Kind) -> int:
        """Return the device bytes that the update of one such chunk needs beside its slot and a matrix's `Work`.

        Of shared matrices a rank sends as many elements as it has of a chunk, and as many, or a matrix, that it owns.
        """
        each_bytes = scratch_bytes_an_element(self._fields(kind), in_matrices=kind.matrices is not None)
        elements = self.chunk_elements(kind)
        crossing = elements + max(elements, kind.whole) if kind.whole else 0
        return elements * each_bytes + crossing * BF16_BYTES

    def work_bytes(self, members: Iterable[Member]) -> int:
        """Return the device bytes of the `Work` for one matrix of `members` at a time."""
        return matrix_work_bytes(members, widens=self._format.moments_dtype != torch.float32)

    def host_bytes(self, parts: Mapping[Member, Part]) -> int:
        """Return the bytes of the host that `make` takes for these parts, but for gaps of alignment."""
        total_bytes = 0.0
        for member, part in parts.items():
            leaving, staying = len(part.streamed), len(part.resident) + len(part.staying)
            if member.cut is not None:
                leaving, staying = (0, member.unit) if member.stays else (member.unit, 0)
            total_bytes += leaving * self.state_bytes(member)
            total_bytes += (leaving + staying) * self._gradient_bytes(member.dtype)
        return round(total_bytes)

    def state_bytes(self, member: Member) -> float:
        """Return the bytes of the states of one streamed element of `member`."""
        fields = self._fields(Kind.of(member), packed=not self._format.keeps_exact(member.param))
        return sum(field.dtype.itemsize / field.block for field in fields)

    def make(self, parts: Mapping[Member, Part]) -> list[Chunk]:
        """Return new chunks for parts of members, all states zero.

        Raises HostMemoryError and torch.OutOfMemoryError; then nothing has been handed out.
        """
        self._blocks, self._used_bytes = [], 0
        chunks: list[Chunk] = []
        try:
            for exact in (True, False):
                members = [member for member in parts if self._format.keeps_exact(member.param) == exact]
                # Packing saves copies, and a resident chunk has none. The compact format saves memory too.
                saves_memory = not exact and self._format.compact_low_bits is not None
                # Of a matrix that ranks share, a rank may have no element, and has chunks as the others.
                stay = [each for each in members if each.cut is None or each.stays]
                leave = [each for each in members if not each.stays]
                resident = {each: parts[each].resident for each in stay}
                chunks += self._make(resident, resident=True, packed=saves_memory)
                staying = {each: parts[each].staying for each in members if each.cut is None}
                chunks += self._make(staying, resident=True, packed=not exact)
                streamed = {each: parts[each].streamed for each in leave}
                chunks += self._make(streamed, resident=exact, packed=not exact)
        except BaseException:
            self.discard()
            raise
        return chunks

    def discard(self) -> None:
        """Take back the host memory of the last `make`, before any copy has used it; the next chunks get it."""
        for block in self._blocks:
            # A chunk begins with states that are zero.
            block.view(torch.uint8, (block.size_bytes,)).zero_()
            self._arena.free(block)
        self._spare_bytes += self._used_bytes
        self._blocks, self._used_bytes = [], 0

    def close(self) -> None:
        """Wait for all copies and unlock the host memory."""
        self._arena.close()

    def _fields(self, kind: Kind, *, packed: bool = True) -> tuple[Field, ...]:
        state_format, moments = self._format, self._moments
        if kind.matrices is not None:
            state_format, moments = state_format.of_matrices(), kind.matrices.moments
        fields_of = state_format.fields if packed else state_format.unpacked_fields
        return fields_of(kind.dtype, moments)

    def _make(self, ranges: Mapping[Member, range], *, resident: bool, packed: bool) -> Iterator[Chunk]:
        plans = plan_chunks(
            ranges,
            elements=lambda member: self.chunk_elements(Kind.of(member)),
            alignment=alignment_of(self._fields(Kind(torch.float32), packed=packed)),
        )
        listed = [
            (pieces, numel, self._fields(Kind.of(pieces[0].member), packed=packed)) for pieces, numel in plans
        ]
        blocks = [
            size_bytes
            for pieces, numel, fields in listed
            for size_bytes in (
                0 if resident else bytes_of(fields, numel),
                numel * self._gradient_bytes(pieces[0].member.param.dtype),
            )
            if size_bytes
        ]
        if blocks:
            needed_bytes = sum(map(_reserved, blocks))
            if self._spare_bytes == 0:
                self._arena.reserve_blocks(blocks)
                self._spare_bytes = needed_bytes
            elif needed_bytes > self._spare_bytes:
                self._arena.reserve(needed_bytes - self._spare_bytes)
                self._spare_bytes = needed_bytes
            self._spare_bytes -= needed_bytes
            self._used_bytes += needed_bytes
        for pieces, numel, fields in listed:
            size_bytes = bytes_of(fields, numel)
            is_own_master = pieces[0].member.param.dtype == torch.float32
            has_masters = any(field.name in (MASTER, LOW) for field in fields)
            yield Chunk(
                pieces,
                numel,
                fields,
                storage=self._on_device(size_bytes) if resident else self._on_host(size_bytes),
                masters=None
                if has_masters or is_own_master
                else self._on_device(4 * numel).view(torch.float32),
                resident=resident,
                noise_offsets=self._noise_offsets(pieces),
                gradients=self._gradients(numel, pieces[0].member.param.dtype),
            )

    def _gradient_bytes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize if self._host_gradients else 0

    def _gradients(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._on_host(numel * dtype.itemsize).view(dtype) if self._host_gradients else None

    def _noise_offsets(self, pieces: Sequence[Piece]) -> dict[Piece, torch.Tensor]:
        """Number the first elements of pieces, by parameter and place in it alone: however these are cut."""
        numbers = [[packing.number(piece.member.order, piece.start)] for piece in pieces]
        rows = packing.aligned_rows(torch.tensor(numbers, device=self._device.torch_device))
        return {piece: row[0] for piece, row in zip(pieces, rows, strict=True)}

    def _on_device(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device.torch_device)

    def _on_host(self, size_bytes: int) -> torch.Tensor:
        """Return a part of the slab, filled with zeros: freed memory is set to zero."""
        block = self._arena.allocate(size_bytes)
        self._blocks.append(block)
        return block.view(torch.uint8, (size_bytes,))


def _reserved(size_bytes: int) -> int:
    """Return the bytes of the arena that a block of `size_bytes` takes."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
