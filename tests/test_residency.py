# SPDX-License-Identifier: Apache-2.0
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload_arithmetic.residency import (
    allowances,
    copied_once,
    device_bytes,
    fraction_within,
    kept_bytes,
    pinned_within,
)

BLOCKS = st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=8), min_size=1, max_size=12)
# A layer of the published decoder, in bytes: fused qkv, out, gate, up, down in bf16.
PUBLISHED = [[100_663_296, 33_554_432, 117_440_512, 117_440_512, 117_440_512]] * 16


def stays(blocks, fraction):
    return [kept_bytes(s, a) for s, a in zip(blocks, allowances(blocks, fraction), strict=True)]


@given(BLOCKS, st.floats(0, 1))
def test_no_more_stays_than_the_share(blocks, fraction):
    total, largest = sum(map(sum, blocks)), max(map(max, blocks))
    assert sum(stays(blocks, fraction)) <= fraction * total
    assert sum(stays(blocks, fraction)) > fraction * total - largest - 1


@given(BLOCKS)
def test_the_ends(blocks):
    assert stays(blocks, 0.0) == [0] * len(blocks)
    assert stays(blocks, 1.0) == [sum(sizes) for sizes in blocks]


def test_half_of_the_published_decoder_is_half_of_every_layer():
    half = stays(PUBLISHED, 0.5)
    assert min(half) > 0.45 * sum(PUBLISHED[0])
    saved = sum(map(sum, PUBLISHED)) - device_bytes(PUBLISHED, 0.5, window_blocks=3)
    assert saved > 3.0e9


@settings(max_examples=40)
@given(BLOCKS, st.integers(0, 20_000), st.integers(1, 4))
@example([[300, 30], [1] * 8], 700, 4)
def test_a_budget_is_kept_or_refused(blocks, budget_bytes, window):
    try:
        fraction = fraction_within(blocks, budget_bytes, window)
    except ValueError as refused:
        assert budget_bytes < device_bytes(blocks, 0.0, window)
        named = int(re.search(r"expected at least (\d+)", str(refused))[1])
        assert budget_bytes < named
        assert device_bytes(blocks, fraction_within(blocks, named, window), window) == named
    else:
        assert device_bytes(blocks, fraction, window) <= budget_bytes


def test_what_stays_may_need_less_than_nothing_that_stays():
    """Four windows of the first block, of which 300 bytes stay: 300 + 4 * 30 instead of 4 * 330."""
    blocks = [[300, 30], [1] * 8]
    assert device_bytes(blocks, 0.0, 4) == 1320
    assert device_bytes(blocks, fraction_within(blocks, 700, 4), 4) <= 700


def test_blocks_that_a_step_copies_twice_are_pinned_first_and_spread():
    seldom = copied_once(16, 3)
    assert seldom == {0, 1, 2, 13, 14, 15}
    some = pinned_within([10] * 16, 40, seldom=seldom)
    assert [index for index, is_pinned in enumerate(some) if is_pinned] == [5, 7, 10, 12]
    many = pinned_within([10] * 16, 130, seldom=seldom)
    assert [index for index, is_pinned in enumerate(many) if not is_pinned] == [0, 2, 14]
    assert copied_once(4, 3) == {0, 1, 2, 3}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 700), st.integers(1, 4))
def test_what_is_pinned_keeps_the_limit_and_leaves_less_than_a_block_of_each_kind(sizes, limit_bytes, window):
    seldom = copied_once(len(sizes), window)
    pinned = pinned_within(sizes, limit_bytes, seldom=seldom)
    taken = sum(size for size, is_pinned in zip(sizes, pinned, strict=True) if is_pinned)
    assert taken <= limit_bytes
    often = [is_pinned for index, is_pinned in enumerate(pinned) if index not in seldom]
    assert all(often) or not any(pinned[index] for index in seldom)
    assert all(pinned) or limit_bytes < sum(sizes)
