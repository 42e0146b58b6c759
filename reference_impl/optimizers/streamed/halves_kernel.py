# SPDX-License-Identifier: Apache-2.0
"""Packs and unpacks hi/lo masters on a GPU: a Triton kernel for each, with the bits of `packing` on the twin.

Imported where it runs, because triton comes with torch's builds for GPUs only. The host launches one in a tenth of the
time that a kernel of `torch.compile` takes it. `packing` describes the halves.

Explained in docs/optimizer-state-offloading.md, "Fewer bytes".
"""

from __future__ import annotations

import triton
import triton.language as tl

# Elements of one program: eight a thread, which are one load of bf16 weights.
_WIDTH, _WARPS = 1024, 4

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)


def unpack(halves):
    """As `packing.Packer.unpack` of `packing.Halves`, on the live current stream."""
    _launch(_unpack, halves)


def pack(halves):
    """As `packing.Packer.pack` of `packing.Halves`, on the live current stream."""
    _launch(_pack, halves)


def round_moment(rounding):
    """As `packing.Packer.round` of `packing.Rounding`, on the live current stream."""
    numel = rounding.values.numel()
    upper = rounding.moment % 2 == 1
    grid = (triton.cdiv(numel, _WIDTH),)
    _round[grid](*rounding[:5], rounding.shift, numel, upper=upper, width=_WIDTH, num_warps=_WARPS)


def _launch(kernel, halves):
    numel, bits = halves.low.numel(), halves.flagged.element_size() == 1
    kernel[(triton.cdiv(numel, _WIDTH),)](*halves, numel, bits=bits, width=_WIDTH, num_warps=_WARPS)


@triton.jit
def _unpack(high_ptr, low_ptr, masters_ptr, flagged_ptr, numel, bits: tl.constexpr, width: tl.constexpr):
    place = tl.program_id(0) * width + tl.arange(0, width)
    inside = place < numel
    high = tl.load(high_ptr + place, mask=inside, other=0).to(tl.int32)
    low = tl.load(low_ptr + place, mask=inside, other=0).to(tl.int32)
    if bits:
        eight = tl.load(flagged_ptr + place // 8, mask=inside, other=0).to(tl.int32)
        is_up = ((eight >> (place % 8)) & 1) == 0
    else:
        flagged = tl.load(flagged_ptr + place, mask=inside, other=0)
        is_up = flagged >= 0
        tl.store(flagged_ptr + place, flagged & _MAGNITUDE, mask=inside)
    tl.store(masters_ptr + place, joined(high, low, is_up), mask=inside)


@triton.jit
def _pack(high_ptr, low_ptr, masters_ptr, flagged_ptr, numel, bits: tl.constexpr, width: tl.constexpr):
    place = tl.program_id(0) * width + tl.arange(0, width)
    inside = place < numel
    master = tl.load(masters_ptr + place, mask=inside, other=0)
    high, lower, flag = halved(master)
    tl.store(high_ptr + place, high.to(tl.int16), mask=inside)
    tl.store(low_ptr + place, lower.to(tl.int16), mask=inside)
    if bits:
        eights = tl.reshape(flag.to(tl.int32) << (place % 8), (width // 8, 8))
        byte = tl.program_id(0) * (width // 8) + tl.arange(0, width // 8)
        tl.store(flagged_ptr + byte, tl.sum(eights, axis=1).to(tl.uint8), mask=byte * 8 < numel)
    else:
        magnitude = tl.load(flagged_ptr + place, mask=inside, other=0) & _MAGNITUDE
        tl.store(flagged_ptr + place, tl.where(flag, magnitude | _SIGN, magnitude), mask=inside)


@triton.jit
def _round(
    stored_ptr,
    values_ptr,
    first_ptr,
    step_ptr,
    skipped_ptr,
    shift,
    numel,
    upper: tl.constexpr,
    width: tl.constexpr,
):
    place = tl.program_id(0) * width + tl.arange(0, width)
    # A step that is skipped writes nothing.
    inside = (place < numel) & (tl.load(skipped_ptr) == 0)
    bits = tl.load(values_ptr + place, mask=inside, other=0)
    first = tl.load(first_ptr).to(tl.int32)
    random = random_bits(place + shift + first, tl.load(step_ptr))
    noise = ((random >> 16) if upper else random) & 0xFFFF
    tl.store(stored_ptr + place, narrowed(bits, noise).to(tl.int16), mask=inside)


@triton.jit
def joined(high, low, is_up):
    """Return masters (int32) of weights and lower halves (both int32); `is_up` says which way a tie was rounded."""
    is_rounded_up = (low < 0) & is_up
    upper = tl.where(is_rounded_up, high - 1, high)
    # No master is rounded up to zero: other code has written the weight.
    is_written = is_rounded_up & ((high & 0x7FFF) == 0)
    return tl.where(is_written, high << 16, (upper << 16) | (low & 0xFFFF))


@triton.jit
def halved(master):
    """Return weights, lower halves (both int32) and flags of masters (int32)."""
    lower, upper = master & 0xFFFF, master >> 16
    # To nearest, ties to even; the upper half of NaN stays as it is.
    is_nan = (master & _MAGNITUDE) > _INFINITY
    rounds_up = ((lower > 0x8000) | ((lower == 0x8000) & ((upper & 1) == 1))) & (is_nan == 0)
    return tl.where(rounds_up, upper + 1, upper), lower, (lower >= 0x8000) & (rounds_up == 0)


@triton.jit
def narrowed(bits, noise):
    """Return fp32 bits (int32) rounded to bf16 by 16 bits of noise, as `packing.narrow`."""
    magnitude = bits & _MAGNITUDE
    finite = magnitude < _INFINITY
    rounded = tl.minimum((magnitude + tl.where(finite, noise, 0)) >> 16, 0x7F7F)
    special = (magnitude >> 16) | tl.where(magnitude > _INFINITY, 0x40, 0)
    result = tl.where(finite, rounded, special)
    return tl.where(bits < 0, result - 0x8000, result)


@triton.jit
def random_bits(number, step):
    """Return 32 random bits for each of the elements that have these numbers, as `packing.random_bits`."""
    return _mix(number.to(tl.int32) ^ _mix(step.to(tl.int32) + 1))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)
