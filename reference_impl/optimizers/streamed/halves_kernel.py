"""Packs and unpacks hi/lo masters on a GPU: a Triton kernel for each, which makes the bits of `packing` on the twin.

Imported where it runs, because triton comes with torch's builds for GPUs only. The host launches one in a tenth of the
time that a kernel of `torch.compile` takes it. `packing` says what the halves are.

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


def _launch(kernel, halves):
    numel = halves.low.numel()
    kernel[(triton.cdiv(numel, _WIDTH),)](*halves, numel, width=_WIDTH, num_warps=_WARPS)


@triton.jit
def _unpack(high_ptr, low_ptr, masters_ptr, flagged_ptr, numel, width: tl.constexpr):
    place = tl.program_id(0) * width + tl.arange(0, width)
    inside = place < numel
    high = tl.load(high_ptr + place, mask=inside, other=0).to(tl.int32)
    low = tl.load(low_ptr + place, mask=inside, other=0).to(tl.int32)
    flagged = tl.load(flagged_ptr + place, mask=inside, other=0)
    upper = tl.where((low < 0) & (flagged >= 0), high - 1, high)
    tl.store(masters_ptr + place, (upper << 16) | (low & 0xFFFF), mask=inside)
    tl.store(flagged_ptr + place, flagged & _MAGNITUDE, mask=inside)


@triton.jit
def _pack(high_ptr, low_ptr, masters_ptr, flagged_ptr, numel, width: tl.constexpr):
    place = tl.program_id(0) * width + tl.arange(0, width)
    inside = place < numel
    bits = tl.load(masters_ptr + place, mask=inside, other=0)
    flagged = tl.load(flagged_ptr + place, mask=inside, other=0)
    lower, upper = bits & 0xFFFF, bits >> 16
    # To nearest, ties to even; the upper half of NaN stays as it is.
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    rounds_up = ((lower > 0x8000) | ((lower == 0x8000) & ((upper & 1) == 1))) & (is_nan == 0)
    flag = (lower >= 0x8000) & (rounds_up == 0)
    tl.store(high_ptr + place, tl.where(rounds_up, upper + 1, upper).to(tl.int16), mask=inside)
    tl.store(low_ptr + place, lower.to(tl.int16), mask=inside)
    magnitude = flagged & _MAGNITUDE
    tl.store(flagged_ptr + place, tl.where(flag, magnitude | _SIGN, magnitude), mask=inside)
