"""Where states live between steps: chunks in pinned host memory, reserved at once, or on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.layout import ALIGNMENT, Member, Piece
from reference_impl.optimizers.streamed.chunks import MASTER, Chunk, Field, Part, plan_chunks
from reference_impl.optimizers.streamed.packing import LOW, aligned_rows
from reference_impl.optimizers.streamed.scratch import scratch_bytes_of


@dataclass(frozen=True, kw_only=True)
class Travel:
    """What travels, and as what: masters or not, whole or as the lower half of bf16 weights, moments in a dtype."""

    offload_masters: bool = True
    hi_lo_masters: bool = False
    moments_dtype: torch.dtype = torch.float32

    def fields(self, dtype: torch.dtype, moments: tuple[str, ...]) -> tuple[Field, ...]:
        """Return the states that travel of parameters of `dtype`.

        fp32 parameters are their own masters; those of fp16 parameters, which are no halves of them, travel whole.
        """
        states = tuple(Field(name, self.moments_dtype) for name in moments)
        if dtype == torch.float32 or not self.offload_masters:
            return states
        halved = self.hi_lo_masters and dtype == torch.bfloat16
        return (Field(LOW, torch.int16) if halved else Field(MASTER, torch.float32), *states)

    def unpacked(self, dtype: torch.dtype, moments: tuple[str, ...]) -> tuple[Field, ...]:
        """Return the same states in fp32."""
        return Travel(offload_masters=self.offload_masters).fields(dtype, moments)


def check_travel(travel: Travel, algorithm: Algorithm, device: Device) -> None:
    """Raise ValueError for states that cannot travel as asked."""
    if travel.moments_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"moments_dtype is {travel.moments_dtype}; expected torch.float32 or torch.bfloat16; try torch.bfloat16"
        )
    if travel.hi_lo_masters and not travel.offload_masters:
        raise ValueError(
            "hi_lo_masters is True with offload_masters False; expected masters that travel, of which it halves the "
            "bytes; try offload_masters=True"
        )
    if travel.hi_lo_masters and "exp_avg_sq" not in algorithm.moments:
        raise ValueError(
            f"hi_lo_masters is True for {type(algorithm).__name__}; expected Adam or AdamW, because the bit that "
            "tells ties apart stands in the sign of exp_avg_sq; try hi_lo_masters=False"
        )
    packs = travel.hi_lo_masters or travel.moments_dtype != torch.float32
    if packs and device.is_cuda and find_spec("triton") is None:
        raise ValueError(
            "hi_lo_masters and moments_dtype need triton, which torch.compile builds their kernels with; try pip "
            "install triton, or leaving both out"
        )


class Homes:
    """Makes chunks whose states, as they travel, are `chunk_bytes` at most."""

    def __init__(
        self, device: Device, *, moments: tuple[str, ...], chunk_bytes: int, travel: Travel, remedy: str
    ) -> None:
        """Take nothing yet."""
        self._device = device
        self._moments = moments
        self._chunk_bytes = chunk_bytes
        self._travel = travel
        self._arena = HostArena(device, remedy=remedy)
        self._numbered = 0

    def elements(self, dtype: torch.dtype) -> int:
        """Return how many elements of a parameter of `dtype` a chunk holds at most."""
        fields = self._travel.fields(dtype, self._moments)
        return self._chunk_bytes // _bytes(fields) // ALIGNMENT * ALIGNMENT

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Return the most bytes that a chunk of such elements travels in."""
        return self.elements(dtype) * _bytes(self._travel.fields(dtype, self._moments))

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Return the device bytes that one chunk takes beside its slot, see `streamed_scratch`."""
        return self.elements(dtype) * scratch_bytes_of(self._travel.fields(dtype, self._moments))

    def make(self, parts: Mapping[Member, Part]) -> list[Chunk]:
        """Return the chunks of members, all states zero. Raises HostMemoryError."""
        resident = {member: part.resident for member, part in parts.items()}
        streamed = {member: part.streamed for member, part in parts.items()}
        return [*self._make(resident, resident=True), *self._make(streamed, resident=False)]

    def close(self) -> None:
        """Wait for all copies and unlock the host memory."""
        self._arena.close()

    def _make(self, ranges: Mapping[Member, range], *, resident: bool) -> Iterator[Chunk]:
        plans = plan_chunks(ranges, elements=lambda member: self.elements(member.param.dtype))
        # What does not travel gains nothing by being packed.
        fields_of = self._travel.unpacked if resident else self._travel.fields
        listed = [(*plan, fields_of(plan[0][0].member.param.dtype, self._moments)) for plan in plans]
        if listed and not resident:
            self._arena.reserve(sum(numel * _bytes(fields) for _, numel, fields in listed))
        for pieces, numel, fields in listed:
            size_bytes = numel * _bytes(fields)
            is_own = pieces[0].member.param.dtype == torch.float32
            travels = any(field.name in (MASTER, LOW) for field in fields)
            yield Chunk(
                pieces,
                numel,
                fields,
                home=self._on_device(size_bytes) if resident else self._on_host(size_bytes),
                masters=None if travels or is_own else self._on_device(4 * numel).view(torch.float32),
                resident=resident,
                firsts=self._firsts(pieces),
            )
            self._numbered += numel

    def _firsts(self, pieces: Sequence[Piece]) -> dict[Piece, torch.Tensor]:
        """Number the first elements of the next chunk's pieces."""
        numbers = [[self._numbered + piece.offset] for piece in pieces]
        rows = aligned_rows(torch.tensor(numbers, device=self._device.torch_device))
        return {piece: row[0] for piece, row in zip(pieces, rows, strict=True)}

    def _on_device(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device.torch_device)

    def _on_host(self, size_bytes: int) -> torch.Tensor:
        """Return part of the slab, which is zeros as long as nothing has come back to it."""
        return self._arena.allocate(size_bytes).view(torch.uint8, (size_bytes,))


def _bytes(fields: tuple[Field, ...]) -> int:
    return sum(field.dtype.itemsize for field in fields)
