# SPDX-License-Identifier: Apache-2.0
"""The planner: arithmetic on profiles."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.activations.budget import (
    BudgetError,
    BudgetPlan,
    ProfiledStorage,
    StepProfile,
    plan_budget,
    simulate,
)
from reference_impl.activations.policy import Decision

KEEP, OFFLOAD, RECOMPUTE = Decision.KEEP, Decision.OFFLOAD, Decision.RECOMPUTE


def profile(storages, *, link=100.0, base=1000):
    """Forward 1 s, loss 0.5 s, backward 2 s, with storages (bytes, recompute seconds) saved evenly."""
    count = len(storages)
    return StepProfile(
        storages=tuple(
            ProfiledStorage(
                name=f"op{index}",
                size_bytes=size,
                saved_at_s=index / count,
                needed_at_s=2 * (count - 1 - index) / count,
                recompute_s=seconds,
            )
            for index, (size, seconds) in enumerate(storages)
        ),
        forward_s=1.0,
        loss_s=0.5,
        backward_s=2.0,
        forward_peak_bytes=base,
        backward_peak_bytes=(base,) * (count + 1),
        d2h_bytes_per_s=link,
        h2d_bytes_per_s=link,
    )


storages = st.lists(
    st.tuples(st.integers(1, 60), st.none() | st.floats(0, 1, allow_subnormal=False)), min_size=1, max_size=6
)


@given(storages, st.integers(0, 300), st.floats(1, 1000))
def test_the_peak_stays_within_the_budget(storages, extra, link):
    measured = profile(storages, link=link)
    plan = plan_budget(measured, 1000 + extra)
    assert plan.predicted_peak_bytes <= 1000 + extra
    assert plan.predicted_peak_bytes == 1000 + plan.bytes_of(KEEP)
    for storage, decision in zip(measured.storages, plan.decisions, strict=True):
        assert decision is not RECOMPUTE or storage.recompute_s is not None


@given(storages, st.integers(0, 300), st.integers(0, 300), st.floats(1, 1000))
def test_more_memory_never_takes_more_time(storages, less, more, link):
    measured = profile(storages, link=link)
    small = plan_budget(measured, 1000 + min(less, more))
    large = plan_budget(measured, 1000 + max(less, more))
    # Storages are indivisible and the keeping is greedy, so one storage's time is the grain.
    grain = max(2 * size / link for size, _ in storages)
    assert large.predicted_s <= small.predicted_s + grain + 1e-9


def best_of_all(measured, budget):
    def fits(decisions):
        kept = sum(s.size_bytes for s, d in zip(measured.storages, decisions, strict=True) if d is KEEP)
        return measured.peak_bytes + kept <= budget

    def possible(decisions):
        return all(
            d is not RECOMPUTE or s.recompute_s is not None
            for s, d in zip(measured.storages, decisions, strict=True)
        )

    every = itertools.product(Decision, repeat=len(measured.storages))
    return min(simulate(measured, d) for d in every if fits(d) and possible(d))


@settings(max_examples=60)
@given(storages, st.integers(0, 300), st.floats(5, 1000))
def test_it_is_near_the_best_of_all_plans(storages, extra, link):
    measured = profile(storages, link=link)
    plan = plan_budget(measured, 1000 + extra)
    grain = max(2 * size / link for size, _ in storages)
    assert plan.predicted_s <= best_of_all(measured, 1000 + extra) + 2 * grain + 1e-9


def test_everything_is_kept_where_it_fits():
    plan = plan_budget(profile([(10, 0.1)] * 5), 1050)
    assert set(plan.decisions) == {KEEP}
    assert plan.predicted_s == pytest.approx(3.5)


def test_cheap_results_are_recomputed_before_a_full_link_is_paid_for():
    plan = plan_budget(profile([(50, 0.001), (50, 5.0)] * 4, link=200.0), 1000)
    assert plan.decisions == (RECOMPUTE, OFFLOAD) * 4


def test_a_free_link_is_used_before_dear_recomputation():
    plan = plan_budget(profile([(10, 0.5)] * 5, link=1000.0), 1000)
    assert set(plan.decisions) == {OFFLOAD}


def test_what_backward_needs_first_is_kept():
    plan = plan_budget(profile([(10, None)] * 4, link=10.0), 1020)
    assert plan.decisions == (OFFLOAD, OFFLOAD, KEEP, KEEP)


def test_a_peak_in_backward_limits_what_is_kept_until_then():
    measured = profile([(10, None)] * 2, link=10.0)
    late = StepProfile(**{**measured.__dict__, "backward_peak_bytes": (1000, 1000, 1020)})
    # Nothing kept is left after the last storage was needed.
    assert plan_budget(late, 1020).decisions == (KEEP, KEEP)
    middle = StepProfile(**{**measured.__dict__, "backward_peak_bytes": (1000, 1015, 1000)})
    assert plan_budget(middle, 1020).decisions == (OFFLOAD, KEEP)


def chain(count):
    """Each result is made from the one before it, and only the last ones are needed at first."""
    measured = profile([(10, 0.0)] * count, link=0.1)
    made = tuple(
        dataclasses.replace(storage, made_from=(index - 1,) if index else ())
        for index, storage in enumerate(measured.storages)
    )
    return dataclasses.replace(measured, storages=made)


def test_a_chain_of_recomputation_counts_all_that_it_holds():
    # Recomputing the last result brings every earlier one back, and each stays until its own turn.
    plan = plan_budget(chain(8), 1000)
    assert OFFLOAD in plan.decisions
    assert plan.predicted_peak_bytes <= 1000
    assert set(plan_budget(chain(8), 1080).decisions) <= {KEEP, RECOMPUTE}


def test_a_plan_can_do_without_recomputing():
    assert set(plan_budget(chain(4), 1000, recomputing=False).decisions) == {OFFLOAD}


def test_the_least_possible_is_named():
    with pytest.raises(BudgetError, match="expected at least 1000") as error:
        plan_budget(profile([(10, None)]), 999)
    assert error.value.least_bytes == 1000


def test_a_plan_survives_json():
    plan = plan_budget(profile([(10, 0.1), (20, None), (30, 0.001)], link=20.0), 1020)
    assert BudgetPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_plan_can_be_read():
    text = str(plan_budget(profile([(2**30, 0.0)] * 2, base=2**30, link=1e9), 2**30))
    assert "op0" in text
    assert "recompute" in text
    assert "peak 1.00 GiB" in text
