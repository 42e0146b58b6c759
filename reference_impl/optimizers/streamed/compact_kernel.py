# SPDX-License-Identifier: Apache-2.0
"""The update of compact states on a GPU: one Triton kernel a piece, with the bytes of `compact` on the twin.

Imported where it runs, because triton comes with torch's builds for GPUs only. Products and sums are not fused, and
quotients and roots follow IEEE 754, so that each operation of `compact.new_tables` gives the same bits here. `compact`
describes the format.

Explained in docs/optimizer-state-offloading.md, "Compact states".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from reference_impl.optimizers.streamed.formula_kernels import adam

# Blocks that one program updates with its warps: eight elements a thread, which are one load of a bf16 gradient.
_ROWS, _WARPS = 16, 4

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def update(operands: Any, scalars: Sequence[Any], constants: Mapping[str, int]) -> None:
    """Update one piece on the live current stream, by Adam or AdamW. A step that is skipped writes nothing.

    `operands` are `compact.CompactOperands`, `scalars` are `packing.Scalars`, `constants` are `compact.CONSTANTS`.
    """
    numel = operands.gradient.numel()
    _kernel[(triton.cdiv(numel, _ROWS * constants["block"]),)](
        operands.weight,
        operands.low,
        operands.master,
        operands.gradient,
        *operands.codes,
        *operands.scales,
        *scalars,
        numel,
        **constants,
        rows=_ROWS,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit
def _kernel(
    weight_ptr,
    low_ptr,
    master_ptr,
    gradient_ptr,
    average_codes_ptr,
    square_codes_ptr,
    average_scales_ptr,
    square_scales_ptr,
    first_ptr,
    step_ptr,
    numbers_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    numel,
    block: tl.constexpr,
    least_signed_scale: tl.constexpr,
    least_root_scale: tl.constexpr,
    rows: tl.constexpr,
):
    if tl.load(found_inf_ptr) != 0:
        return
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    place = row[:, None] * block + tl.arange(0, block)[None, :]
    # Codes and low bits are of whole blocks, weights and gradients may not fill the last one.
    has_row, inside = row * block < numel, place < numel
    in_block = has_row[:, None]

    codes = tl.load(average_codes_ptr + place, mask=in_block, other=0)
    scales = tl.load(average_scales_ptr + row, mask=has_row, other=0)
    average = _signed_values(codes, _scale(scales.to(tl.int32)))
    codes = tl.load(square_codes_ptr + place, mask=in_block, other=0)
    scales = tl.load(square_scales_ptr + row, mask=has_row, other=0)
    square = _root_values(codes, _scale(scales.to(tl.int32)))
    master = _master(weight_ptr, low_ptr, master_ptr, place, inside, in_block)
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gradient = gradient * tl.div_rn(1.0, tl.load(grad_scale_ptr))

    master, average, square, root = adam(master, gradient, average, square, numbers_ptr)

    step = tl.load(step_ptr).to(tl.int32) + 1
    number = place + tl.load(first_ptr).to(tl.int32)
    random = _mix(number.to(tl.uint32) ^ _mix(step.to(tl.uint32)))
    scales = _scale_bits(average, least_signed_scale)
    codes = _signed_codes(average, scales, random)
    tl.store(average_codes_ptr + place, codes.to(tl.int8), mask=in_block)
    tl.store(average_scales_ptr + row, scales.to(tl.int16), mask=has_row)
    scales = _scale_bits(square, least_root_scale)
    codes = _root_codes(square, root, scales, random)
    tl.store(square_codes_ptr + place, codes.to(tl.uint8), mask=in_block)
    tl.store(square_scales_ptr + row, scales.to(tl.int16), mask=has_row)
    _write(weight_ptr, low_ptr, master_ptr, place, inside, in_block, master, (random & 0xFF).to(tl.int32))


# The next four as in `compact`.
@triton.jit
def _signed_values(codes, scale):
    wide = codes.to(tl.float32)
    return tl.div_rn(wide, 254.0 - tl.abs(wide)) * scale[:, None]


@triton.jit
def _signed_codes(average, scales, random):
    unit = ((15 + 2 * 127 - (scales >> 7)) << 23).to(tl.float32, bitcast=True)
    value = tl.abs(average) * unit[:, None]
    share = tl.div_rn(254.0 * value, value + (_scale(scales) * unit)[:, None])
    # Six bits of noise, from the ninth on, and half of the last.
    share += (random & 0x3F00).to(tl.float32) * (1.0 / 2**14) + 1.0 / 2**7
    codes = tl.where(scales[:, None] < _INFINITY >> 16, tl.minimum(share.to(tl.int32), 127), 127)
    return tl.where(average < 0, -codes, codes)


@triton.jit
def _root_values(codes, scale):
    wide = codes.to(tl.float32)
    return wide * wide * (scale * (1.0 / 65025.0))[:, None]


@triton.jit
def _root_codes(square, root, scales, random):
    share = root * (tl.div_rn(1.0, tl.sqrt_rn(_scale(scales))) * 255.0)[:, None]
    # Fourteen bits of noise, the upper ones, and half of the last.
    share += (random >> 18).to(tl.float32) * (1.0 / 2**14) + 1.0 / 2**15
    codes = tl.maximum(tl.minimum(share.to(tl.int32), 255), (square != 0).to(tl.int32))
    return tl.where(scales[:, None] < _INFINITY >> 16, codes, 255)


# `join` of `compact`, or the master as it is.
@triton.jit
def _master(weight_ptr, low_ptr, master_ptr, place, inside, in_block):
    if low_ptr is None:
        master = tl.load(master_ptr + place, mask=inside, other=0.0)
    else:
        high = tl.load(weight_ptr + place, mask=inside, other=0).to(tl.int32) << 16
        low = tl.load(low_ptr + place, mask=in_block, other=0).to(tl.int32)
        if low_ptr.dtype.element_ty == tl.int8:
            low = low << 8
        low = tl.where((low < 0) & ((high & _MAGNITUDE) == 0), 0, low)
        master = (high + low).to(tl.float32, bitcast=True)
    return master


# `rounded` and `split` of `compact`, or the master as it is.
@triton.jit
def _write(weight_ptr, low_ptr, master_ptr, place, inside, in_block, master, noise):
    if low_ptr is None:
        tl.store(master_ptr + place, master, mask=inside)
        if weight_ptr is not None:
            tl.store(weight_ptr + place, master.to(weight_ptr.dtype.element_ty), mask=inside)
    else:
        bits = master.to(tl.int32, bitcast=True)
        magnitude = bits & _MAGNITUDE
        if low_ptr.dtype.element_ty == tl.int8:
            rounded = tl.minimum(magnitude + noise, _INFINITY - 1) & -256
            bits = tl.where(magnitude < _INFINITY, (bits & -0x80000000) | rounded, bits)
        is_nan = magnitude > _INFINITY
        # The rest, and the upper half that goes with it: rounded to nearest, ties away from zero.
        low = tl.where(is_nan, 0, bits.to(tl.int16).to(tl.int32))
        high = tl.where(is_nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
        tl.store(weight_ptr + place, high.to(tl.int16), mask=inside)
        if low_ptr.dtype.element_ty == tl.int8:
            low = low >> 8
        tl.store(low_ptr + place, low.to(low_ptr.dtype.element_ty), mask=in_block)


@triton.jit
def _scale_bits(values, least: tl.constexpr):
    """Return the scale of each row of values, as bf16 bits (int32)."""
    largest = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, 1)
    upper = tl.maximum((tl.minimum(largest, 0x7FC00000) + 0xFFFF) >> 16, least)
    return tl.where(largest < _INFINITY, tl.minimum(upper, 0x7F7F), upper)


@triton.jit
def _scale(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)
