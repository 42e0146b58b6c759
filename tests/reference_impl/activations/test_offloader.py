# SPDX-License-Identifier: Apache-2.0
"""In the first forward host memory is made ready ahead of the blocks that need it."""

import pytest

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.memory.arena import HostArena

SMALL = {"min_bytes": 1024}


@pytest.fixture
def expected(monkeypatch):
    """All that an arena was told to expect."""
    told = []
    real = HostArena.expect

    def expect(arena, sizes):
        told.append(list(sizes))
        real(arena, sizes)

    monkeypatch.setattr(HostArena, "expect", expect)
    return told


@pytest.mark.parametrize("kind", [ActivationOffloader, CheckpointOffloader])
def test_two_blocks_ahead_in_the_first_forward_alone(trainee, expected, kind):
    wanted = trainee.step()
    with kind(trainee.model, **SMALL) as offloader:
        assert trainee.step() == wanted
        assert [len(sizes) > 0 for sizes in expected] == [True, True, True, False]
        assert len(expected[0]) == len(expected[1]) == 2 * len(expected[2])
        reserved = offloader.arena.reserved_bytes
        assert trainee.step() == wanted
        assert len(expected) == 4
        assert offloader.arena.reserved_bytes == reserved


def test_only_blocks_that_take_part_are_counted(trainee, expected):
    with ActivationOffloader(trainee.model, num_layers=2, **SMALL) as offloader:
        trainee.step()
        assert [len(sizes) > 0 for sizes in expected] == [True, False]
        # The second block is as large as the first, and nothing was made beyond the two.
        assert sum(expected[0]) == offloader.offloaded_bytes // 2


def test_modules_inside_the_blocks_count_for_their_blocks(trainee, expected):
    with ActivationOffloader(trainee.model, modules=["down"], **SMALL):
        trainee.step()
    assert [len(sizes) for sizes in expected] == [2, 2, 1, 0]


def test_evaluation_forecasts_nothing(trainee, expected):
    with ActivationOffloader(trainee.model, **SMALL):
        trainee.model.eval().requires_grad_(False)(trainee.ids)
    assert expected == []
