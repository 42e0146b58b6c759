# SPDX-License-Identifier: Apache-2.0
"""How parameters are cut into chunks."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_arithmetic.states import ALIGNMENT_ELEMENTS
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.chunks import plan_chunks


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=9),
    st.integers(1, 40),
    st.sampled_from([ALIGNMENT_ELEMENTS, 8 * ALIGNMENT_ELEMENTS]),
)
def test_chunks_are_as_few_as_fit_and_of_one_length(lengths, most, alignment):
    most *= alignment
    members = [Member(torch.zeros(length), 0, order, resident=0) for order, length in enumerate(lengths)]
    plans = plan_chunks(
        {member: range(member.param.numel()) for member in members},
        elements=lambda member: most,
        alignment=alignment,
    )
    total = sum(-(-length // alignment) * alignment for length in lengths)
    sizes = [numel for _, numel in plans]
    assert sum(sizes) == total
    assert len(set(sizes[:-1])) <= 1
    assert max(sizes) == sizes[0] <= most
    # The last may be shorter by the rounding of all others.
    assert len(plans) <= -(-total // most)
    for pieces, numel in plans:
        assert pieces[0].offset == 0
        for piece, following in pairwise(pieces):
            assert following.offset == -(-(piece.offset + piece.numel) // alignment) * alignment
        assert numel == -(-(pieces[-1].offset + pieces[-1].numel) // alignment) * alignment
    cut = [piece for pieces, _ in plans for piece in pieces]
    for member in members:
        own = [piece for piece in cut if piece.member is member]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])]
        assert own[-1].stop == member.param.numel()
