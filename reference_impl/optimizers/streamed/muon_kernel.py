# SPDX-License-Identifier: Apache-2.0
"""The steps before and behind Muon's products as one Triton kernel each, where operators take six launches each.

`before` scales the gradient, updates the mean and rounds the direction; `after` unpacks a hi/lo master, lets it decay,
adds the result and packs it. Each reads and writes an element once: 12 and 10 bytes, where operators move 56 and 42.
All is rounded at the operators' places: a product is fused with a sum if their kernels fuse it. `matrix_parts`
compares both on the device, and uses these kernels only if no bit differs.

Explained in docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

import triton
import triton.language as tl

from reference_impl.optimizers.algorithms.muon import decay_and_rate
from reference_impl.optimizers.streamed.halves_kernel import halved, joined, narrowed, random_bits

_WIDTH, _WARPS = 1024, 4
# Of a tile, whose rows are of memory; results may be transposed.
_ROWS, _COLUMNS = 32, 64


def before(matrix, direction, group, grad_scale, skipped):
    """Update the mean of gradients of a `matrix_parts.Matrix`, and write the direction, with the same strides."""
    (average,) = matrix.moments
    momentum, numel = group["momentum"], matrix.gradient.numel()
    rounds = average.element_size() == 2
    _before[(triton.cdiv(numel, _WIDTH),)](
        matrix.gradient,
        average,
        direction,
        skipped if grad_scale is None else grad_scale,
        skipped,
        matrix.first if rounds else skipped,
        matrix.counter if rounds else skipped,
        matrix.shift,
        float(1 - momentum),
        float(momentum),
        numel,
        scaled=grad_scale is not None,
        nesterov=group["nesterov"],
        rounds=rounds,
        width=_WIDTH,
        num_warps=_WARPS,
    )


def after(matrix, result, shape, group, skipped):
    """Let the packed master of a `matrix_parts.Matrix` decay, and add the result, of any strides."""
    (rows, columns), strides = matrix.gradient.shape, result.stride()
    if matrix.gradient.stride(1) != 1:
        rows, columns, strides = columns, rows, strides[::-1]
    kept, rate = decay_and_rate(shape, group)
    packed = matrix.master
    _after[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        packed.high,
        packed.low,
        packed.ties,
        result,
        skipped,
        float(kept),
        float(-rate),
        rows,
        columns,
        *strides,
        tile_rows=_ROWS,
        tile_columns=_COLUMNS,
        num_warps=_WARPS,
    )


@triton.jit
def _before(
    gradient_ptr,
    average_ptr,
    direction_ptr,
    scale_ptr,
    skipped_ptr,
    first_ptr,
    step_ptr,
    shift,
    new_share,
    momentum,
    numel,
    scaled: tl.constexpr,
    nesterov: tl.constexpr,
    rounds: tl.constexpr,
    width: tl.constexpr,
):
    place = tl.program_id(0) * width + tl.arange(0, width)
    inside = place < numel
    skipped = tl.load(skipped_ptr) != 0
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    average = tl.load(average_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if scaled:
        gradient = tl.math.div_rn(gradient, tl.load(scale_ptr).to(tl.float32))
    gradient = tl.where(skipped, average, gradient)
    average = _lerp(average, gradient, new_share)
    direction = _lerp(gradient, average, momentum) if nesterov else average
    # To nearest by arithmetic: Triton's interpreter cuts bits off.
    high, _, _ = halved(direction.to(tl.int32, bitcast=True))
    tl.store(direction_ptr + place, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    if rounds:
        noise = random_bits(place + shift + tl.load(first_ptr).to(tl.int32), tl.load(step_ptr)) & 0xFFFF
        stored = narrowed(average.to(tl.int32, bitcast=True), noise).to(tl.int16)
        tl.store(average_ptr + place, stored.to(tl.bfloat16, bitcast=True), mask=inside & (skipped == 0))
    else:
        tl.store(average_ptr + place, average, mask=inside)


# Flags of a later matrix begin at a multiple of 8 bytes only.
@triton.jit(do_not_specialize_on_alignment=["ties_ptr"])
def _after(
    high_ptr,
    low_ptr,
    ties_ptr,
    result_ptr,
    skipped_ptr,
    kept,
    minus_rate,
    rows,
    columns,
    row_stride,
    column_stride,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows))[:, None]
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    place, inside = row * columns + column, (row < rows) & (column < columns)
    high = tl.load(high_ptr + place, mask=inside, other=0).to(tl.int32)
    low = tl.load(low_ptr + place, mask=inside, other=0).to(tl.int32)
    eight = tl.load(ties_ptr + place // 8, mask=inside, other=0).to(tl.int32)
    master = joined(high, low, ((eight >> (place % 8)) & 1) == 0).to(tl.float32, bitcast=True)
    result = tl.load(result_ptr + row * row_stride + column * column_stride, mask=inside, other=0.0)
    skipped = tl.load(skipped_ptr) != 0
    master = master * tl.where(skipped, 1.0, kept)
    master = tl.math.fma(result.to(tl.float32), tl.zeros_like(master) + minus_rate, master)
    high, lower, flag = halved(master.to(tl.int32, bitcast=True))
    tl.store(high_ptr + place, high.to(tl.int16), mask=inside)
    tl.store(low_ptr + place, lower.to(tl.int16), mask=inside)
    # A row has whole bytes of flags.
    eights = tl.reshape(flag.to(tl.int32) << (place % 8), (tile_rows, tile_columns // 8, 8))
    byte = tl.program_id(1) * (tile_columns // 8) + tl.arange(0, tile_columns // 8)[None, :]
    whole = (row < rows) & (byte * 8 < columns)
    tl.store(ties_ptr + row * (columns // 8) + byte, tl.sum(eights, axis=2).to(tl.uint8), mask=whole)


@triton.jit
def _lerp(start, end, weight):
    """Return the mean that `torch.lerp` returns, with its two forms."""
    difference, weight = end - start, tl.zeros_like(start) + weight
    near = tl.math.fma(weight, difference, start)
    far = tl.math.fma(-difference, 1.0 - weight, end)
    return tl.where(tl.abs(weight) < 0.5, near, far)
