# SPDX-License-Identifier: Apache-2.0
import pytest

from skill_tools.dialects.layout import LocalParameters
from skill_tools.dialects.run import ActivationEngine, Mode, OptimizerEngine
from skill_tools.planning.cost import machine, pageable
from skill_tools.planning.model.memory import Memory

GB = 10**9
OWN = Mode(optimizer_fraction=1.0, streamed_fraction=1.0, optimizer_engine=OptimizerEngine.REFERENCE)


def pinning(size_bytes, ranks=1):
    return Memory(
        stage=0,
        parameters=LocalParameters(0, 0, 0, 0),
        gpu=(),
        host=(),
        ranks_on_node=ranks,
        in_flight=1,
        moved_bytes=0,
        copied_bytes=0,
        pinned_bytes=size_bytes,
    )


def test_what_exceeds_the_limit_is_pageable():
    found = pageable.within(pinning(10 * GB), OWN, 4 * GB)
    assert (found.pinned_bytes, found.pageable_bytes) == (4 * GB, 6 * GB)


def test_the_ranks_of_a_node_share_the_limit():
    found = pageable.within(pinning(10 * GB, ranks=4), OWN, 4 * GB)
    assert (found.pinned_bytes, found.pageable_bytes) == (GB, 9 * GB)


@pytest.mark.parametrize(
    ("mode", "limit"),
    [
        (OWN, None),
        (OWN, 20 * GB),
        (OWN, 1000),
        (OWN._replace(optimizer_engine=OptimizerEngine.HYBRID_DEVICE), 4 * GB),
        (OWN._replace(activation_engine=ActivationEngine.LAYERS), 4 * GB),
        (Mode(offload_parameters=True), 4 * GB),
        (Mode(state_offload=True), 4 * GB),
    ],
    ids=str,
)
def test_nothing_is_pageable_without_a_limit_that_is_met_or_with_peers(mode, limit):
    assert pageable.within(pinning(10 * GB), mode, limit) == pinning(10 * GB)


def test_copies_take_as_long_as_both_parts_of_their_bytes():
    known = machine.known("h100")._replace(h2d_copy=50e9, d2h_copy=50e9, duplex_copy=40e9, staged_copy=10e9)
    found = pageable.within(pinning(10 * GB), OWN, 5 * GB)
    slow = pageable.slowed(known, found)
    # Half of each byte at the link's rate, half at the ring's.
    assert slow.h2d_copy == slow.d2h_copy == pytest.approx(1 / (0.5 / 50e9 + 0.5 / 10e9))
    assert slow.duplex_copy == pytest.approx(1 / (0.5 / 40e9 + 0.5 / 10e9))
    assert pageable.slowed(known, pinning(10 * GB)) == known


def test_where_nobody_has_timed_it_host_memory_bounds_it():
    known = machine.known("h100")
    found = pageable.within(pinning(10 * GB), OWN, 5 * GB)
    staged = known.dram / machine.model_constants()["staged_dram_bytes"]
    assert pageable.slowed(known, found).h2d_copy == pytest.approx(1 / (0.5 / known.h2d_copy + 0.5 / staged))
