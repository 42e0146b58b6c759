# SPDX-License-Identifier: Apache-2.0
import os

import pytest

from reference_impl.memory.cores import idle_cores, leave_cores_to, local_ranks, own_cores


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


class Update:
    cores_in_use = 0


def test_a_cpu_update_keeps_its_cores_while_it_runs_and_training_two():
    update = Update()
    leave_cores_to(update)
    idle = []
    for in_use in (0, 5, 14, 20, 0):
        update.cores_in_use = in_use
        idle.append(idle_cores(16))
    assert idle == [14, 9, 1, 1, 14]
    update.cores_in_use = 5
    del update
    assert idle_cores(16) == 14
