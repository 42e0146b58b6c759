# SPDX-License-Identifier: Apache-2.0
"""Lets masters on a GPU take over weights that others have written: one Triton kernel for many weights, or for one.

Imported where it runs, because triton comes with torch's builds for GPUs only. It makes the values of
`masters` on the twin, and writes only where an element differs.

Explained in docs/optimizer-offloading.md, "Writing weights yourself".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH, _WARPS = 2048, 4

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def take_over_rows(rows, dtype, block_elements):
    """Compare each of `rows`, (blocks, 3) of int64: addresses of weights of `dtype` and of masters, elements."""
    _take_over_rows[(len(rows),)](
        rows, is_bf16=dtype == torch.bfloat16, block=block_elements, width=_WIDTH, num_warps=_WARPS
    )


def take_over(weight, master):
    """Compare one `weight` with its `master`."""
    is_bf16, numel = weight.dtype == torch.bfloat16, weight.numel()
    _take_over_one[(triton.cdiv(numel, _WIDTH),)](
        weight.view(torch.int16) if is_bf16 else weight,
        master.view(torch.int32) if is_bf16 else master,
        numel,
        is_bf16=is_bf16,
        width=_WIDTH,
        num_warps=_WARPS,
    )


@triton.jit
def _take_over_rows(rows_ptr, is_bf16: tl.constexpr, block: tl.constexpr, width: tl.constexpr):
    row = rows_ptr + 3 * tl.program_id(0)
    weight, master, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    for start in range(0, block, width):
        place = start + tl.arange(0, width)
        if is_bf16:
            _bf16(weight.to(tl.pointer_type(tl.int16)), master.to(tl.pointer_type(tl.int32)), place, numel)
        else:
            _fp16(
                weight.to(tl.pointer_type(tl.float16)), master.to(tl.pointer_type(tl.float32)), place, numel
            )


@triton.jit
def _take_over_one(weight_ptr, master_ptr, numel, is_bf16: tl.constexpr, width: tl.constexpr):
    place = tl.program_id(0) * width + tl.arange(0, width)
    if is_bf16:
        _bf16(weight_ptr, master_ptr, place, numel)
    else:
        _fp16(weight_ptr, master_ptr, place, numel)


@triton.jit
def _bf16(weight_ptr, master_ptr, place, numel):
    inside = place < numel
    weight = tl.load(weight_ptr + place, mask=inside, other=0).to(tl.int32) << 16
    master = tl.load(master_ptr + place, mask=inside, other=0)
    # To nearest, ties to even; a NaN master, or one that becomes NaN, stays so if its weight is NaN.
    rounded = (master + 0x7FFF + ((master >> 16) & 1)) & -0x10000
    is_nan = (master & _MAGNITUDE) > _INFINITY
    differs = tl.where(is_nan, (weight & _MAGNITUDE) <= _INFINITY, rounded != weight)
    tl.store(master_ptr + place, weight, mask=inside & differs)


@triton.jit
def _fp16(weight_ptr, master_ptr, place, numel):
    inside = place < numel
    weight = tl.load(weight_ptr + place, mask=inside, other=0)
    master = tl.load(master_ptr + place, mask=inside, other=0)
    differs = master.to(tl.float16) != weight
    tl.store(master_ptr + place, weight.to(tl.float32), mask=inside & differs)
