# SPDX-License-Identifier: Apache-2.0
"""Resources shared by the ranks of a host."""

import torch

from reference_impl.distributed.ranks import RankGroup


def test_parameters_of_one_process_have_no_ranks():
    assert RankGroup.of([torch.zeros(3), torch.zeros(2)]) is None
    assert RankGroup.of([]) is None
