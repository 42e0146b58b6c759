"""What one chunk needs on the device beside its slot, where torch's kernel updates it: fp32 gradients and masters.

Updates run one after the other, so one scratch serves all of them. Nothing is allocated on the way. Chunks with moments
in bf16 need none of it, see `rounded_update`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_impl.device import Device
from reference_impl.optimizers.layout import Piece
from reference_impl.optimizers.streamed import packing
from reference_impl.optimizers.streamed.chunks import MASTER, Chunk, Field, Weights, is_rounded
from reference_impl.optimizers.streamed.packing import LOW, Halves, integers


def scratch_bytes_of(fields: tuple[Field, ...]) -> int:
    """Return the bytes an element of a chunk of `fields`: a gradient, and a master and a weight where it is halved."""
    if is_rounded(fields):
        return 0
    return 10 if fields[0].name == LOW else 4


class Scratch:
    """Buffers of the largest chunk; its methods queue on the live current stream."""

    def __init__(self, device: Device) -> None:
        """Take nothing yet."""
        self._device = device
        self._gradients = torch.empty(0)
        self._masters = torch.empty(0)
        self._high = torch.empty(0, dtype=torch.bfloat16)

    def make_room(self, chunks: Sequence[Chunk]) -> None:
        """Allocate what any of `chunks` needs, on the live current stream; no update runs."""
        exact = [chunk for chunk in chunks if not chunk.rounded]
        self._gradients = self._grown(self._gradients, exact)
        halved = [chunk for chunk in exact if chunk.has(LOW)]
        self._masters = self._grown(self._masters, halved)
        self._high = self._grown(self._high, halved)

    def _grown(self, buffer: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        numel = max((chunk.numel for chunk in chunks), default=0)
        if numel <= buffer.numel():
            return buffer
        return torch.empty(numel, dtype=buffer.dtype, device=self._device.torch_device)

    def close(self) -> None:
        """Let the buffers go, once no update runs."""
        self._gradients, self._masters, self._high = (
            torch.empty(0, dtype=each.dtype) for each in (self._gradients, self._masters, self._high)
        )

    def gradient(self, piece: Piece) -> torch.Tensor:
        """Return the fp32 buffer for the gradient of `piece`."""
        return self._gradients[piece.offset : piece.offset + piece.numel]

    def new_weight(self, piece: Piece) -> torch.Tensor:
        """Return the bf16 weight of `piece` after `pack` of a chunk with half masters."""
        return self._high[piece.offset : piece.offset + piece.numel]

    def unpack(self, chunk: Chunk, buffer: torch.Tensor, weights: Weights) -> dict[str, torch.Tensor]:
        """Return all states of `chunk`, which has come in to `buffer`, as flat fp32 tensors by name."""
        states = {field.name: chunk.field(field.name, buffer) for field in chunk.fields}
        if chunk.has(LOW):
            torch._foreach_copy_(
                [self.new_weight(piece) for piece in chunk.pieces],
                [weights.of(piece) for piece in chunk.pieces],
            )
            packing.run_on(self._device, packing.unpack, self._halves(chunk, buffer))
            del states[LOW]
            states[MASTER] = self._masters[: chunk.numel]
        return states

    def pack(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Write the states that `unpack` has returned back to `buffer`."""
        if chunk.has(LOW):
            packing.run_on(self._device, packing.pack, self._halves(chunk, buffer))

    def _halves(self, chunk: Chunk, buffer: torch.Tensor) -> Halves:
        return Halves(
            high=self._high[: chunk.numel].view(torch.int16),
            low=chunk.field(LOW, buffer),
            masters=self._masters[: chunk.numel].view(torch.int32),
            flagged=integers(chunk.field(chunk.fields[-1].name, buffer)),
        )
