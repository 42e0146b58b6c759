"""What one chunk needs on the device beside its slot while it is updated: fp32 gradients and unpacked states.

Updates run one after the other, so one scratch serves all of them. Nothing is allocated on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_impl.device import Device
from reference_impl.optimizers import packing
from reference_impl.optimizers.chunks import MASTER, Chunk, Weights
from reference_impl.optimizers.layout import Piece
from reference_impl.optimizers.packing import LOW, Halves, integers


class Scratch:
    """Buffers of the largest chunk; its methods queue on the live current stream."""

    def __init__(self, device: Device) -> None:
        """Take nothing yet."""
        self._device = device
        self._gradients = torch.empty(0)
        self._high = torch.empty(0, dtype=torch.bfloat16)
        self._wide: list[torch.Tensor] = []

    def make_room(self, chunks: Sequence[Chunk]) -> None:
        """Allocate what any of `chunks` needs, on the live current stream; no update runs."""
        numel = max((chunk.numel for chunk in chunks), default=0)
        self._gradients = self._grown(self._gradients, numel)
        packed = [chunk for chunk in chunks if chunk.packed]
        numel = max((chunk.numel for chunk in packed), default=0)
        count = max((len(chunk.packed) for chunk in packed), default=0)
        self._wide += [torch.empty(0) for _ in range(count - len(self._wide))]
        self._wide = [self._grown(each, numel) for each in self._wide]
        if any(chunk.has(LOW) for chunk in packed):
            self._high = self._grown(self._high, numel)

    def _grown(self, buffer: torch.Tensor, numel: int) -> torch.Tensor:
        if numel <= buffer.numel():
            return buffer
        return torch.empty(numel, dtype=buffer.dtype, device=self._device.torch_device)

    def close(self) -> None:
        """Let the buffers go, once no update runs."""
        self._gradients, self._high, self._wide = torch.empty(0), torch.empty(0), []

    def gradient(self, piece: Piece) -> torch.Tensor:
        """Return the fp32 buffer for the gradient of `piece`."""
        return self._gradients[piece.offset : piece.offset + piece.numel]

    def new_weight(self, piece: Piece) -> torch.Tensor:
        """Return the bf16 weight of `piece` after `pack` of a chunk with half masters."""
        return self._high[piece.offset : piece.offset + piece.numel]

    def unpack(self, chunk: Chunk, buffer: torch.Tensor, weights: Weights) -> dict[str, torch.Tensor]:
        """Return all states of `chunk`, which has come in to `buffer`, as flat fp32 tensors by name."""
        states = {field.name: chunk.field(field.name, buffer) for field in chunk.fields}
        if not chunk.packed:
            return states
        if chunk.has(LOW):
            torch._foreach_copy_(
                [self.new_weight(piece) for piece in chunk.pieces],
                [weights.of(piece) for piece in chunk.pieces],
            )
        wide = self._wide_of(chunk)
        packing.unpack_on(self._device, *self._operands(chunk, buffer))
        states.update(wide)
        if LOW in states:
            states[MASTER] = states.pop(LOW)
        return states

    def pack(self, chunk: Chunk, buffer: torch.Tensor, step: torch.Tensor) -> None:
        """Write the states that `unpack` has returned back to `buffer`; `step` seeds the rounding."""
        if chunk.packed:
            packing.pack_on(self._device, *self._operands(chunk, buffer), chunk.first, step)

    def _operands(
        self, chunk: Chunk, buffer: torch.Tensor
    ) -> tuple[Halves | None, list[torch.Tensor], list[torch.Tensor]]:
        """Return what `packing` reads and writes: halves of masters, moments as stored and in fp32, as integers."""
        wide = {name: each.view(torch.int32) for name, each in self._wide_of(chunk).items()}
        halves = None
        if LOW in wide:
            high = self._high[: chunk.numel].view(torch.int16)
            halves = Halves(high, chunk.field(LOW, buffer), wide.pop(LOW))
        return halves, [integers(chunk.field(name, buffer)) for name in wide], list(wide.values())

    def _wide_of(self, chunk: Chunk) -> dict[str, torch.Tensor]:
        buffers = zip(chunk.packed, self._wide, strict=False)
        return {field.name: buffer[: chunk.numel] for field, buffer in buffers}
