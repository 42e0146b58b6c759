# SPDX-License-Identifier: Apache-2.0
"""Adds up weights on a GPU: one Triton kernel for all of them, one program a block.

Imported where it runs, because triton comes with torch's builds for GPUs only. The sums differ from the twin's, and
nobody compares the two.

A lane of a program takes each `_WIDTH`th word of the block and multiplies its sum by an odd number before it adds
the next, twice, with two numbers. So a word that changes always changes its lane. The sums of lanes are mixed with
their number, and then added up: words that change places change the sum, too.

Explained in docs/optimizer-offloading.md, "Writing weights yourself".
"""

from __future__ import annotations

import triton
import triton.language as tl

# Words of four bytes that one program reads at once: eight a thread, which are two loads of 16 bytes.
_WIDTH, _WARPS = 1024, 4


def add_up(rows, sums, broken):
    """Write the sums of the blocks in `rows`, or mark in `broken`, if it is given, the blocks with other `sums`.

    `rows` is (blocks, 3), int64: address, bytes, index of the mark; `sums` (blocks), int64.
    """
    compares = broken is not None
    _add_up[(len(rows),)](
        rows,
        sums,
        broken if compares else sums,
        compares=compares,
        width=_WIDTH,
        num_warps=_WARPS,
    )


@triton.jit
def _add_up(
    rows_ptr,
    sums_ptr,
    broken_ptr,
    compares: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0)
    address = tl.load(rows_ptr + 3 * row)
    size_bytes = tl.load(rows_ptr + 3 * row + 1)
    lane = tl.arange(0, width)
    first = tl.zeros((width,), dtype=tl.int32)
    second = tl.zeros((width,), dtype=tl.int32)
    if address % 16 == 0:
        words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
        count = size_bytes // 4
        # Without a mask loads are as wide as they can be.
        start = tl.zeros((), dtype=tl.int64)
        while start + width <= count:
            word = tl.load(words + start + lane)
            first = first * -0x61C88647 + word
            second = second * -0x7A143589 + word
            start += width
        place = start + lane
        word = tl.load(words + place, mask=place < count, other=0)
    else:
        # A weight that begins between words: half of each at a time.
        halves = address.to(tl.pointer_type(tl.int16))
        number = size_bytes // 4 * 2
        start = tl.zeros((), dtype=tl.int64)
        while start + width <= number:
            half = tl.load(halves + start + lane).to(tl.int32)
            first = first * -0x61C88647 + half
            second = second * -0x7A143589 + half
            start += width
        place = start + lane
        word = tl.load(halves + place, mask=place < number, other=0).to(tl.int32)
    first = first * -0x61C88647 + word
    second = second * -0x7A143589 + word
    upper = _mix(first + lane).to(tl.int64) << 32
    lower = _mix(second ^ (lane * 0x27D4EB2F)).to(tl.int64) & 0xFFFFFFFF
    total = tl.sum(upper | lower, axis=0)
    if size_bytes % 4 == 2:
        # The last of an odd number of elements of two bytes.
        last = tl.load((address + size_bytes - 2).to(tl.pointer_type(tl.int16)))
        total = total * 31 + last.to(tl.int64)
    if compares:
        if total != tl.load(sums_ptr + row):
            tl.store(broken_ptr + tl.load(rows_ptr + 3 * row + 2), 1)
    else:
        tl.store(sums_ptr + row, total)


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)
