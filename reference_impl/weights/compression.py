# SPDX-License-Identifier: Apache-2.0
"""bf16 weights in 12 bits each, without loss: 4 bits stand for the exponent.

The exponents of trained weights are close together: within one matrix, 15 neighbouring ones serve all but a few
elements in a thousand. So an element has its sign and fraction in one byte, and half a byte for its exponent's distance
from the matrix's. Zeros and subnormals have a code of their own; the few other elements lie behind, each with its
position. Memory that is something else does not become shorter, and is left alone.

Explained in docs/layer-streaming.md, "Twelve bits for sixteen".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload_arithmetic.sizes import MOST_COMPRESSED_SHARE
from reference_impl.device import Device
from reference_impl.memory.ledger import unseen

# Exponents with a code; the code 0 is that of the exponent 0.
_CODED = 15
_EXPONENTS = 256
# Fewer elements would take the kernels longer than the bytes take the link.
_LEAST_NUMEL = 4096
_ALIGNMENT_BYTES = 16
# Codes that the host unfolds at once: all operands fit a core's cache.
_HOST_PIECE_NUMEL = 2**17


@dataclass(frozen=True)
class Form:
    """The place of each part of `numel` compressed weights.

    The code of an exponent is its distance from `below`, and `exceptions` elements are stored as they are.
    """

    numel: int
    below: int
    exceptions: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return self._values_at + 2 * self.exceptions

    def parts(
        self, compressed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of `compressed` (flat uint8).

        They are signs and fractions (uint8), codes (uint8: of element i and, in the high half, of one half of all
        further on), positions of exceptions (int32) and their bits (int16).
        """
        positions = compressed[self._positions_at : self._positions_at + 4 * self.exceptions]
        values = compressed[self._values_at : self.size_bytes]
        return (
            compressed[: self.numel],
            compressed[self.numel : self.numel + self.half],
            positions.view(torch.int32),
            values.view(torch.int16),
        )

    @property
    def half(self) -> int:
        """How many bytes hold the codes: as the kernel loads them, sixteen at once."""
        return -(-self.numel // (2 * _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES

    @property
    def _positions_at(self) -> int:
        return -(-(self.numel + self.half) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def _values_at(self) -> int:
        return self._positions_at + 4 * self.exceptions


def most_compressed_bytes(size_bytes: int) -> int:
    """Return the most bytes that weights of `size_bytes` have where they are compressed."""
    return int(size_bytes * MOST_COMPRESSED_SHARE) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES


def compress(bits: torch.Tensor) -> tuple[Form, torch.Tensor] | None:
    """Return the form and the compressed bytes (flat uint8) of bf16 weights, whose `bits` are flat int16.

    None where they are few, or would not be shorter by a tenth.
    """
    if bits.numel() < _LEAST_NUMEL:
        return None
    exponents = (bits >> 7).bitwise_and_(0xFF).to(torch.uint8)
    below = _below_most(exponents)
    # They wrap around, to more than any code.
    codes = exponents - below
    is_coded = (codes > 0) & (codes <= _CODED)
    positions = (~is_coded & (exponents != 0)).nonzero().flatten()
    form = Form(bits.numel(), below, positions.numel())
    if form.size_bytes > most_compressed_bytes(bits.nbytes):
        return None
    codes.masked_fill_(~is_coded, 0)
    compressed = torch.zeros(form.size_bytes, dtype=torch.uint8, device=bits.device)
    rest, pairs, at, values = form.parts(compressed)
    rest.copy_((bits >> 8).bitwise_and_(0x80).bitwise_or_(bits & 0x7F))
    pairs.copy_(codes[: form.half])
    pairs[: form.numel - form.half] |= codes[form.half :] << 4
    at.copy_(positions)
    values.copy_(bits[positions])
    return form, compressed


def decompress(device: Device, target: torch.Tensor, form: Form, compressed: torch.Tensor) -> None:
    """Write the weights of `form` and `compressed` to `target` (flat int16), on the live current stream."""
    if device.compiles:
        from reference_impl.weights import compression_kernel

        device.launch(compression_kernel.decompress, target, form, *form.parts(compressed))
    else:
        decompress_on_host(target, form, compressed)


def decompress_on_host(target: torch.Tensor, form: Form, compressed: torch.Tensor) -> None:
    """Write the weights of `form` and `compressed` to `target` (flat int16); both are in host memory."""
    rest, pairs, positions, values = form.parts(compressed)
    with unseen():
        for start in range(0, form.half, _HOST_PIECE_NUMEL):
            piece = pairs[start : start + _HOST_PIECE_NUMEL]
            for first, codes in ((start, piece & 0xF), (form.half + start, piece >> 4)):
                end = min(first + codes.numel(), form.numel)
                _join(target[first:end], rest[first:end], codes[: end - first], form.below)
        target[positions.long()] = values


def _join(target: torch.Tensor, rest: torch.Tensor, codes: torch.Tensor, below: int) -> None:
    """Write weights to `target` (int16) of their signs and fractions, and their exponents' codes (both uint8)."""
    wide = rest.short()
    target.copy_(codes).add_(below).mul_(codes > 0).bitwise_left_shift_(7)
    target |= (wide & 0x7F).bitwise_or_((wide & 0x80).bitwise_left_shift_(8))


def _below_most(exponents: torch.Tensor) -> int:
    """Return the exponent below the neighbouring ones that most elements have."""
    counts = torch.bincount(exponents, minlength=_EXPONENTS)
    counts[0] = 0
    up_to = counts.cumsum(0)
    return int((up_to[_CODED:] - up_to[:-_CODED]).argmax())
