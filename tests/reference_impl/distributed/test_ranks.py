"""What the ranks of a host share."""

import os

import pytest
import torch

from reference_impl.distributed.ranks import RankGroup, local_ranks, own_cores


@pytest.mark.parametrize(
    ("ours", "launchers", "ranks", "expected"),
    [
        # Nobody has bound them: all cores are shared.
        (16, 16, 1, 16),
        (64, 64, 4, 16),
        # The launcher has given each rank its own cores, which would be divided twice.
        (16, 64, 4, 16),
        # Two ranks a NUMA node.
        (32, 64, 4, 16),
        # More ranks than cores.
        (2, 2, 4, 1),
    ],
)
def test_a_ranks_own_cores(monkeypatch, ours, launchers, ranks, expected):
    masks = {0: set(range(ours)), os.getppid(): set(range(launchers))}
    monkeypatch.setattr("os.sched_getaffinity", masks.__getitem__)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert own_cores() == expected


def test_a_launcher_that_may_not_be_asked_is_like_us(monkeypatch):
    def affinity(process):
        if process:
            raise PermissionError
        return set(range(8))

    monkeypatch.setattr("os.sched_getaffinity", affinity)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert own_cores() == 4


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_ranks() == 1
    assert RankGroup.of([torch.zeros(3), torch.zeros(2)]) is None
    assert RankGroup.of([]) is None
