# SPDX-License-Identifier: Apache-2.0
"""The compact format: moments in 8 bits by blocks of 64, and masters as the bf16 weight and 8 or 16 of its low bits.

A block is `BLOCK` elements with one scale for each moment, in bf16 and rounded up: no code is too large.

- `exp_avg` is signed. Its code c, of at most 127, stands for scale * c / (254 - c): softsign's inverse, whose steps are
  1/254 of the scale near 0 and 2/127 at the top.
- The root of `exp_avg_sq` is linear: its code c, of at most 255, stands for scale * (c / 255) ** 2. A value that is not
  0 has a code of 1 or more: a 0 would leave an update without its denominator. Scales are 2**-108 or more, so that no
  such value underflows.
- A master is the weight (its upper half, rounded to nearest with ties away from zero) and the signed rest: the lower
  16 bits exactly, or the upper 8 of them in a master of 24 bits.

Codes and masters of 24 bits are rounded stochastically, since most changes are smaller than a step: rounded to nearest
they would be lost for good. An infinite moment or a NaN spreads to its block; a master that is NaN stays NaN.

Every number is made by operations that IEEE 754 rounds in one way, one after the other. So the kernel of the GPU,
`compact_kernel`, makes the same bytes.

Explained in docs/optimizer-state-offloading.md, "Compact states".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from offload_arithmetic.states import COMPACT_BLOCK_ELEMENTS
from reference_impl.optimizers.algorithms import Formula, root
from reference_impl.optimizers.streamed import packing
from reference_impl.optimizers.streamed.packing import Scalars, Writes

BLOCK = COMPACT_BLOCK_ELEMENTS
# The noise by which `rounded` rounds a master to nearest.
TO_NEAREST = 0x80

_INFINITY = 0x7F800000
_LARGEST = 0x7F7FFFFF
_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(2**31)
_LARGEST_BF16 = 0x7F7F
_QUIET_BF16 = 0x40
_NAN = 0x7FC00000
_BIAS = 127

# Codes, and the random bits by which each is rounded.
_SIGNED_TOP, _SIGNED_NOISE_BITS = 127, 6
_ROOT_TOP, _ROOT_NOISE_BITS = 255, 14
# The bits of the least scales, 2**-100 and 2**-108.
LEAST_SIGNED_SCALE = (_BIAS - 100) << 7
LEAST_ROOT_SCALE = (_BIAS - 108) << 7
# Constants that the kernel on the GPU is compiled with.
CONSTANTS = {
    "block": BLOCK,
    "least_signed_scale": LEAST_SIGNED_SCALE,
    "least_root_scale": LEAST_ROOT_SCALE,
}
# Releases of 2026-11-23 to 26 cut c / (254 - c) off behind 20 or 22 bits: a value that they saved is less by so much of
# its scale at most.
_CUT_OFF_SHARE = 2.0**-19
# Possible top codes of a block's largest value. They tell the block's scale.
_SIGNED_TOPS, _ROOT_TOPS = (127, 126), (255, 254)


def random_parts(random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the noise (int32) of the master, of `exp_avg` and of `exp_avg_sq` from 32 random bits each."""
    return random & 0xFF, (random >> 8) & 0x3F, (random >> 18) & 0x3FFF


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the bits (int32) of masters from bf16 weights (int16) and low bits (int16, or int8 for masters of 24).

    No master is rounded up to zero: other code has written the weight, and its low bits are of the weight before.
    """
    is_written = (low < 0) & ((high & 0x7FFF) == 0)
    wide = torch.where(is_written, 0, low.to(torch.int32))
    return (high.to(torch.int32) << 16) + (wide << (8 if low.dtype == torch.int8 else 0))


def split(bits: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bf16 weights (int16) and low bits of `dtype` of masters (int32), rounded before; `join` undoes it."""
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    low = torch.where(is_nan, 0, ((bits + 0x8000) & 0xFFFF) - 0x8000)
    high = torch.where(is_nan, (bits >> 16) | _QUIET_BF16, (bits - low) >> 16)
    return high.to(torch.int16), (low >> (8 if dtype == torch.int8 else 0)).to(dtype)


def rounded(bits: torch.Tensor, noise: torch.Tensor | int) -> torch.Tensor:
    """Return masters (int32) rounded to 24 bits, up with the probability of the part that is cut off.

    `noise` is uniform in [0, 2**8), or `TO_NEAREST`. A finite master stays finite.
    """
    magnitude = bits & _MAGNITUDE
    larger = torch.clamp(magnitude + noise, max=_LARGEST) & -256
    return (bits & _SIGN) | torch.where(magnitude < _INFINITY, larger, magnitude)


def signed_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `exp_avg` (fp32, rows of `BLOCK`) of codes (int8) and the bits of scales (int16, a column)."""
    wide = codes.to(torch.float32)
    return wide / (2 * _SIGNED_TOP - wide.abs()) * _scale(scales)


def signed_scales(bits: torch.Tensor) -> torch.Tensor:
    """Return the scales (int32, a column) that rows of `exp_avg`, given by their bits (int32), are to have."""
    return _scales(bits, LEAST_SIGNED_SCALE)


def signed_codes(bits: torch.Tensor, scales: torch.Tensor, noise: torch.Tensor | int) -> torch.Tensor:
    """Return the codes (int8) of `exp_avg` (int32); `noise` is uniform in [0, 64), or 32 for to nearest."""
    # So that nothing here is too large for fp32, the scale becomes 2**15 or a little more.
    unit = ((15 + 2 * _BIAS - (scales >> 7)) << 23).view(torch.float32)
    value = bits.view(torch.float32).abs() * unit
    share = 2 * _SIGNED_TOP * value / (value + _scale(scales) * unit)
    code = torch.clamp((share + _offset(noise, _SIGNED_NOISE_BITS)).to(torch.int32), max=_SIGNED_TOP)
    code = torch.where(scales < _INFINITY >> 16, code, _SIGNED_TOP)
    return torch.where(bits.view(torch.float32) < 0, -code, code).to(torch.int8)


def root_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `exp_avg_sq` (fp32, rows of `BLOCK`) of codes (uint8) and the bits of scales (int16, a column)."""
    wide = codes.to(torch.float32)
    return wide * wide * (_scale(scales) * (1 / _ROOT_TOP**2))


def root_scales(bits: torch.Tensor) -> torch.Tensor:
    """Return the scales (int32, a column) that rows of `exp_avg_sq`, given by their bits (int32), are to have."""
    return _scales(bits, LEAST_ROOT_SCALE)


def root_codes(bits: torch.Tensor, scales: torch.Tensor, noise: torch.Tensor | int) -> torch.Tensor:
    """Return the codes (uint8) of `exp_avg_sq` (int32); `noise` is uniform in [0, 2**14), or 2**13 for to nearest."""
    value = bits.view(torch.float32).abs()
    share = root(value) * (root(_scale(scales)).reciprocal() * _ROOT_TOP)
    code = torch.clamp((share + _offset(noise, _ROOT_NOISE_BITS)).to(torch.int32), max=_ROOT_TOP)
    code = torch.maximum(code, (value != 0).to(torch.int32))
    return torch.where(scales < _INFINITY >> 16, code, _ROOT_TOP).to(torch.uint8)


def _offset(noise: torch.Tensor | int, bits: int) -> torch.Tensor | float:
    """Return noise of so many bits as a summand of codes, whose fraction is then cut off: the middle of its part.

    A code that is a little too small, because numbers were rounded on the way to it, stays as it is.
    """
    return (noise + 0.5) * 2.0**-bits


def _scales(bits: torch.Tensor, least: int) -> torch.Tensor:
    """Return the largest magnitudes of rows, as bf16 rounded up and `least` or more; infinity and NaN stay."""
    # All NaN may be the same one, so that none becomes too large.
    largest = torch.clamp((bits & _MAGNITUDE).amax(1, keepdim=True), max=_NAN)
    upper = torch.clamp((largest + 0xFFFF) >> 16, min=least)
    return torch.where(largest < _INFINITY, torch.clamp(upper, max=_LARGEST_BF16), upper)


def _scale(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in fp32 from their bits."""
    return (scales.to(torch.int32) << 16).view(torch.float32)


def pack_signed(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales (int16, a column) of `exp_avg` (fp32, rows of `BLOCK`), to nearest.

    Values that were unpacked from any codes come back to the bit; of those that earlier releases cut off, the codes do.
    """
    largest = values.abs().amax(1, keepdim=True)
    guesses = [largest / (top / (254 - top)) for top in _SIGNED_TOPS]
    half = 1 << (_SIGNED_NOISE_BITS - 1)
    return _packed(
        values,
        [*guesses, signed_scales(values.view(torch.int32))],
        lambda bits, scales: signed_codes(bits, scales, half),
        signed_values,
        LEAST_SIGNED_SCALE,
        slack=_CUT_OFF_SHARE,
    )


def pack_root(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales (int16, a column) of `exp_avg_sq` (fp32, rows of `BLOCK`), to nearest.

    Values that were unpacked from any codes come back to the bit.
    """
    largest = values.abs().amax(1, keepdim=True)
    half = 1 << (_ROOT_NOISE_BITS - 1)
    return _packed(
        values,
        [*(largest / (top / _ROOT_TOP) ** 2 for top in _ROOT_TOPS), root_scales(values.view(torch.int32))],
        lambda bits, scales: root_codes(bits, scales, half),
        root_values,
        LEAST_ROOT_SCALE,
    )


def _packed(
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    encode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    least: int,
    *,
    slack: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode each row with the first of `scales` that loses no more than `slack` of it, else with the last, in bits.

    A scale is rounded up, so the largest value of a row may have a code below the top one. Of the few that it can have,
    the right one restores all values.
    """
    *guesses, usual = scales
    chosen, codes = usual, encode(values.view(torch.int32), usual)
    for guess in reversed(guesses):
        # Any number will do where the guess is no scale: it restores nothing.
        tried = torch.clamp(
            guess.to(torch.bfloat16).view(torch.int16).to(torch.int32), min=least, max=_LARGEST_BF16
        )
        other = encode(values.view(torch.int32), tried)
        restored = decode(other, tried)
        # Beside the first, because of infinities.
        same = (restored == values) | ((restored - values).abs() <= slack * _scale(tried))
        fits = same.all(1, keepdim=True)
        chosen, codes = torch.where(fits, tried, chosen), torch.where(fits, other, codes)
    return codes, chosen.to(torch.int16)


class Moment(NamedTuple):
    """How a moment becomes codes and scales, to nearest, and comes back."""

    pack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    unpack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


MOMENTS = {
    "exp_avg": Moment(pack_signed, signed_values),
    "exp_avg_sq": Moment(pack_root, root_values),
}


def rows(flat: torch.Tensor) -> torch.Tensor:
    """Return `flat` as rows of `BLOCK`, the last one filled up with zeros."""
    missing = -flat.numel() % BLOCK
    return (pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


class CompactOperands(NamedTuple):
    """The tensors of one piece, flat; weights and states are written.

    `weight`, `low`, `master` and `gradient` are as in `packing.Operands`; `low` is int8 or int16. `codes` and `scales`
    belong to `exp_avg` and `exp_avg_sq`. `low` and `codes` are of whole blocks, however long the piece is; `scales`
    (int16) have one number a block.
    """

    weight: torch.Tensor | None
    low: torch.Tensor | None
    master: torch.Tensor | None
    gradient: torch.Tensor
    codes: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor]

    def part(self, elements: slice) -> CompactOperands:
        """Return the operands of some elements that begin with a block."""
        first, last = elements.start // BLOCK, -(-elements.stop // BLOCK)
        padded = slice(first * BLOCK, last * BLOCK)
        weight, master = (None if one is None else one[elements] for one in (self.weight, self.master))
        return CompactOperands(
            weight,
            None if self.low is None else self.low[padded],
            master,
            self.gradient[elements],
            [one[padded] for one in self.codes],
            [one[first:last] for one in self.scales],
        )

    def tables(self) -> CompactOperands:
        """Return every tensor with a row for each block: views where all blocks are full."""
        weight, low, master = (None if one is None else rows(one) for one in self[:3])
        codes, scales = [rows(one) for one in self.codes], [one.view(-1, 1) for one in self.scales]
        return CompactOperands(weight, low, master, rows(self.gradient), codes, scales)

    def launch(self, formula: Formula, scalars: Scalars) -> None:
        """Run the GPU's kernel, with Adam's formula in it."""
        from reference_impl.optimizers.streamed import compact_kernel

        compact_kernel.update(self, scalars, CONSTANTS)

    def writes(self, formula: Formula, scalars: Scalars) -> Writes:
        """Return the values that the update would write."""
        found = new_tables(formula, self.tables(), scalars)
        return [
            (state, new.view(-1)[: state.numel()]) for state, new in zip(self.written, found, strict=True)
        ]

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that an update writes, in the order of `new_tables`."""
        found = (*self.codes, *self.scales, self.low, self.master, self.weight)
        return [each for each in found if each is not None]


def new_tables(formula: Formula, tables: CompactOperands, scalars: Scalars) -> list[torch.Tensor]:
    """Return the new values, in the order of `written`: codes, scales and masters, in rows of `BLOCK`."""
    weight, low, whole, gradient, codes, scales = tables
    old = whole if low is None or weight is None else join(weight, low).view(torch.float32)
    assert old is not None
    moments = [signed_values(codes[0], scales[0]), root_values(codes[1], scales[1])]
    scaled = gradient.float() * (1 / scalars.grad_scale)
    master, average, square = formula(old, scaled, moments, scalars.numbers)
    elements = torch.arange(old.numel(), dtype=torch.int32, device=old.device).view(-1, BLOCK)
    random = packing.random_bits(elements + scalars.first.to(torch.int32), scalars.step)
    of_master, of_average, of_square = random_parts(random)
    bits = [average.view(torch.int32), square.view(torch.int32)]
    new_scales = [signed_scales(bits[0]), root_scales(bits[1])]
    found = [
        signed_codes(bits[0], new_scales[0], of_average),
        root_codes(bits[1], new_scales[1], of_square),
        *(scale.to(torch.int16) for scale in new_scales),
    ]
    if low is None:
        found.append(master)
    else:
        exact = master.view(torch.int32)
        high, lower = split(exact if low.dtype == torch.int16 else rounded(exact, of_master), low.dtype)
        found += [lower, high]
    # Codes stand for rounded values, which would be rounded again: a skipped step keeps their bytes.
    skipped = scalars.found_inf != 0
    kept = [torch.where(skipped, was, now) for was, now in zip(tables.written, found, strict=False)]
    # An fp32 master beside the weight is rounded to it as it is written.
    return kept if low is not None or weight is None else [*kept, kept[-1]]
