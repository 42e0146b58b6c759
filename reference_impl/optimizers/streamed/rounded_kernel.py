# SPDX-License-Identifier: Apache-2.0
"""The update of bf16 moments on a GPU: one Triton kernel a piece, with the bits of `packing` on the twin.

Imported where it runs, because triton comes with torch's builds for GPUs only. The host launches it in a tenth of the
time that a kernel of `torch.compile` takes it. `packing` describes the format.

Explained in docs/optimizer-state-offloading.md, "Fewer bytes".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from reference_impl.optimizers.algorithms import Formula
from reference_impl.optimizers.algorithms.adam import adam_formula
from reference_impl.optimizers.algorithms.sgd import sgd_formula
from reference_impl.optimizers.streamed.formula_kernels import adam, sgd
from reference_impl.optimizers.streamed.halves_kernel import halved, joined, narrowed, random_bits

# Elements of one program: eight a thread, which are one load of bf16 values.
_WIDTH, _WARPS = 1024, 4

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)

# The formulas that the kernel has, and whether they have a second moment.
_HAS_SQUARES: dict[Formula, bool] = {adam_formula: True, sgd_formula: False}


def has(formula: Formula) -> bool:
    """Return whether the kernel has `formula`."""
    return formula in _HAS_SQUARES


def update(formula: Formula, operands: Any, scalars: Sequence[Any]) -> None:
    """Update one piece on the live current stream. A step that is skipped writes nothing.

    `formula` is one of `_HAS_SQUARES`, `operands` are `packing.Operands`, `scalars` are `packing.Scalars`.
    """
    numel = operands.gradient.numel()
    average, square = (*operands.moments, None)[:2]
    _kernel[(triton.cdiv(numel, _WIDTH),)](
        *operands[:4],
        average,
        square,
        *scalars,
        numel,
        has_squares=_HAS_SQUARES[formula],
        width=_WIDTH,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit
def _kernel(
    weight_ptr,
    low_ptr,
    master_ptr,
    gradient_ptr,
    average_ptr,
    square_ptr,
    first_ptr,
    step_ptr,
    numbers_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    numel,
    has_squares: tl.constexpr,
    width: tl.constexpr,
):
    if tl.load(found_inf_ptr) != 0:
        return
    place = tl.program_id(0) * width + tl.arange(0, width)
    inside = place < numel
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.div_rn(gradient, tl.load(grad_scale_ptr).to(tl.float32))
    average = _widened(average_ptr, place, inside).to(tl.float32, bitcast=True)
    random = random_bits(place + tl.load(first_ptr).to(tl.int32), tl.load(step_ptr))
    if not has_squares:
        master = tl.load(master_ptr + place, mask=inside, other=0.0)
        master, average = sgd(master, gradient, average, numbers_ptr)
    else:
        bits = _widened(square_ptr, place, inside)
        if low_ptr is None:
            master = tl.load(master_ptr + place, mask=inside, other=0.0)
        else:
            high = tl.load(weight_ptr + place, mask=inside, other=0).to(tl.int32)
            low = tl.load(low_ptr + place, mask=inside, other=0).to(tl.int32)
            # The sign of the square, which has none of its own, tells ties apart.
            master = joined(high, low, bits >= 0).to(tl.float32, bitcast=True)
            bits = bits & _MAGNITUDE
        square = bits.to(tl.float32, bitcast=True)
        master, average, square, _ = adam(master, gradient, average, square, numbers_ptr)
        stored = narrowed(square.to(tl.int32, bitcast=True), (random >> 16) & 0xFFFF)
        if low_ptr is not None:
            high, lower, flag = halved(master.to(tl.int32, bitcast=True))
            tl.store(weight_ptr + place, high.to(tl.int16), mask=inside)
            tl.store(low_ptr + place, lower.to(tl.int16), mask=inside)
            stored = (stored & 0x7FFF) - (flag.to(tl.int32) << 15)
        tl.store(square_ptr + place, stored.to(tl.int16), mask=inside)
    stored = narrowed(average.to(tl.int32, bitcast=True), random & 0xFFFF)
    tl.store(average_ptr + place, stored.to(tl.int16), mask=inside)
    if low_ptr is None:
        tl.store(master_ptr + place, master, mask=inside)
        if weight_ptr is not None:
            tl.store(weight_ptr + place, master.to(weight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _widened(stored_ptr, place, inside):
    """Return the fp32 bits (int32) of moments that are stored as the bits of bf16 (int16)."""
    return tl.load(stored_ptr + place, mask=inside, other=0).to(tl.int32) << 16
