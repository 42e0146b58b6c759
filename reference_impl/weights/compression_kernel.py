# SPDX-License-Identifier: Apache-2.0
"""Decompresses bf16 weights on a GPU: two Triton kernels, with the bits of `compression` on the twin.

Apart because triton comes with torch's builds for GPUs only; imported where it runs.

Explained in docs/layer-streaming.md, "Twelve bits for sixteen".
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bytes of codes of one program, each of two elements.
_WIDTH, _WARPS = 2048, 4


def decompress(target, form, rest, pairs, positions, values):
    """As `compression.decompress_on_host`, on the live current stream."""
    grid = (triton.cdiv(form.half, _WIDTH),)
    _join[grid](target, rest, pairs, form.numel, form.half, form.below, width=_WIDTH, num_warps=_WARPS)
    if form.exceptions:
        grid = (triton.cdiv(form.exceptions, _WIDTH),)
        _put[grid](target, positions, values, form.exceptions, width=_WIDTH, num_warps=_WARPS)


@triton.jit(do_not_specialize=["below"])
def _join(target_ptr, rest_ptr, pairs_ptr, numel, half, below, width: tl.constexpr):
    place = tl.program_id(0) * width + tl.arange(0, width)
    pair = tl.load(pairs_ptr + place, mask=place < half, other=0).to(tl.int32)
    _store(target_ptr, rest_ptr, place, place < half, pair & 0xF, below)
    _store(target_ptr, rest_ptr, place + half, place + half < numel, pair >> 4, below)


@triton.jit
def _store(target_ptr, rest_ptr, place, inside, code, below):
    rest = tl.load(rest_ptr + place, mask=inside, other=0).to(tl.int32)
    exponent = tl.where(code > 0, code + below, 0)
    bits = ((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7F)
    tl.store(target_ptr + place, bits.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["exceptions"])
def _put(target_ptr, positions_ptr, values_ptr, exceptions, width: tl.constexpr):
    place = tl.program_id(0) * width + tl.arange(0, width)
    inside = place < exceptions
    position = tl.load(positions_ptr + place, mask=inside, other=0)
    tl.store(target_ptr + position, tl.load(values_ptr + place, mask=inside, other=0), mask=inside)
