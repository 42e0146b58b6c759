# SPDX-License-Identifier: Apache-2.0
"""The next request, by a trial's result: on a GPU too, whose trials are played here."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.fitting import trial
from reference_impl.fitting.planner import RefusedPlanError
from reference_impl.fitting.search import Search
from reference_impl.fitting.trial import Task, Trial
from reference_impl.memory.ledger import Ledger

BUDGET = 1000
LEARNS = frozenset({"activation-budget"})
LAST_RESORT = LEARNS | {"trained-layer-streaming"}
STREAMS_ALL = LEARNS | {"optimizer-offload"}


def plan(allocated, *, mode="recompute", mechanisms=("recompute",), rivals=()):
    alternatives = [
        {"fits": True, "mechanisms": list(other), "time": {"least_s": least_s, "step_s": least_s + 0.1}}
        for other, least_s in rivals
    ]
    memory = {"allocated_bytes": allocated, "host_bytes_per_node": 500, "pinned_bytes_per_node": 400}
    option = {
        "label": mode,
        "mechanisms": list(mechanisms),
        "memory": memory,
        "time": {"step_s": allocated / 100, "most_s": allocated / 80},
    }
    return {
        "recommendation": {"option": option},
        "alternatives": alternatives,
        "execute": {
            "optimizer": {"offload_fraction": 0.5},
            "activations": {"mode": mode, "bytes": allocated},
        },
    }


def streaming(allocated):
    """A plan that streams trained layers."""
    return plan(allocated) | {"execute": {"trained_layers": {"bytes": allocated}}}


class Planner:
    """Answers with the requested plan, less a plan's exclusions; `plans` answer first.

    Of those that stream trained layers it has some for 100 bytes too.
    """

    host_bytes = 600
    pinned_bytes = None

    def __init__(self, *plans):
        self.plans, self.asked = list(plans), []

    def plan(self, tensor_bytes, *, without=frozenset()):
        self.asked.append((tensor_bytes, without))
        if tensor_bytes < 300:
            if without >= LAST_RESORT or tensor_bytes < 100:
                raise RefusedPlanError("nothing legal fits")
            return self.plans.pop(0) if self.plans else streaming(tensor_bytes - 5)
        return self.plans.pop(0) if self.plans else plan(tensor_bytes - 5)


@pytest.fixture
def played(monkeypatch):
    """Settle with trials from `answers` for each plan."""

    def play(planner, *answers, on_gpu=True, on_host=False, budget=BUDGET, other_bytes=0, first=None):
        left, limits = list(answers), []

        def run(task, tried, *, limit_bytes, say):
            limits.append(limit_bytes)
            answer = left.pop(0)
            return answer(tried) if callable(answer) else answer

        monkeypatch.setattr(trial, "run", run)
        device = SimpleNamespace(is_accelerator=on_gpu, allocator=object(), torch_device="cuda:0")
        task = SimpleNamespace(device=device, on_host=on_host)
        before = SimpleNamespace(restore=lambda: None)
        search = Search(task, before, planner, budget, other_bytes=other_bytes, error_share=0.0, first=first)
        chosen = search.find_best()
        assert set(limits) == {round(0.98 * budget)}
        assert not left
        return chosen

    return play


def took(peak, step_s=1.0, **others):
    return Trial(**{"steps": 2, "peak_device_bytes": peak, "peak_host_bytes": 0, "step_s": step_s, **others})


def test_the_first_question_leaves_headroom_and_a_good_plan_is_the_last(played):
    planner = Planner()
    chosen = played(planner, took(940))
    assert planner.asked == [(950, LAST_RESORT)]
    assert (chosen.steps, chosen.plans) == (2, 1)


def test_what_no_plan_counts_is_left_free_from_the_start(played):
    planner = Planner()
    chosen = played(planner, took(945), other_bytes=60)
    assert planner.asked == [(890, LAST_RESORT)]
    assert chosen.plans == 1


@pytest.mark.parametrize("on_host", [False, True])
def test_tensors_of_others_and_workspaces_are_counted_beside_the_weights(on_host):
    model = nn.Linear(300, 300)
    model.tied = model.weight
    device = SimpleNamespace(allocator=SimpleNamespace(live_bytes=10**6), torch_device="cpu")
    task = Task(
        model=model, optimizer=None, batch=None, loss=None, max_grad_norm=None, device=device, on_host=on_host
    )
    # 360,000 and 1,200 bytes in whole blocks of 512.
    assert task.other_bytes() == 10**6 - (0 if on_host else 360_448 + 1_536)


def test_a_peak_above_the_headroom_is_corrected_by_what_the_plan_was_wrong_by(played):
    planner = Planner(plan(945))
    chosen = played(planner, took(985), took(948))
    assert planner.asked[1][0] == 950 - (985 - 945)
    assert chosen.trial.peak_device_bytes == 948
    assert (chosen.steps, chosen.plans) == (4, 2)


def test_room_that_is_left_is_asked_for(played):
    planner = Planner(plan(945))
    chosen = played(planner, took(800), took(945, step_s=0.9))
    assert planner.asked[1][0] == 950 + (945 - 800)
    assert chosen.trial.peak_device_bytes == 945


def learning(seconds, *, rivals=()):
    """A plan whose engine learns, and takes `seconds`."""
    found = plan(945, mode="budget", mechanisms=("activation-budget", "optimizer-offload"), rivals=rivals)
    found["recommendation"]["option"]["time"] = {"step_s": seconds, "most_s": 1.2 * seconds}
    return found


def test_a_plan_whose_time_is_wrong_by_far_gives_way_to_another_mechanism_whatever_the_steps(played):
    planner = Planner(plan(945))
    given = learning(8.0, rivals=[(("optimizer-offload",), 9.0)])
    chosen = played(planner, took(800, steps=4, step_s=30.0), took(945, step_s=11.0), first=given)
    assert planner.asked == [(950, LAST_RESORT)]
    assert (chosen.trial.step_s, chosen.steps, chosen.plans) == (11.0, 6, 2)


def test_a_plan_that_is_a_little_slower_than_said_is_the_last_within_four_steps(played):
    given = learning(8.0, rivals=[(("optimizer-offload",), 9.0)])
    chosen = played(Planner(), took(940, steps=4, step_s=14.0), first=given)
    assert (chosen.steps, chosen.plans) == (4, 1)


def test_a_plan_that_has_to_learn_is_tried_where_nothing_else_fits(played):
    class Alone(Planner):
        def plan(self, tensor_bytes, *, without=frozenset()):
            if without >= LEARNS:
                raise RefusedPlanError("nothing legal fits")
            return learning(9.0)

    assert trial.learns(played(Alone(), took(940, steps=4)).plan)


def test_each_trial_is_logged_with_what_it_took(played, caplog):
    caplog.set_level("INFO", logger="reference_impl.fitting")
    played(Planner(plan(945)), took(800), took(1000, short_of="device", steps=1))
    assert [record.getMessage() for record in caplog.records] == [
        "fit tried recompute: 0.00 GiB on the device, 1.000 s a step",
        "fit tried recompute: too little device memory after 1 whole steps",
    ]


def test_a_correction_that_finds_no_memory_leaves_the_plan_before(played):
    chosen = played(Planner(plan(945)), took(800), took(1000, short_of="device", steps=1))
    assert chosen.trial.peak_device_bytes == 800


@pytest.mark.parametrize(
    ("short_of", "check"),
    [
        ("device", lambda planner: planner.asked[1][0] < planner.asked[0][0] - 70),
        ("host", lambda planner: planner.host_bytes == 460),
        ("pinned", lambda planner: planner.pinned_bytes == 200),
    ],
)
def test_what_lacked_is_asked_for_less(played, short_of, check):
    planner = Planner()
    chosen = played(planner, took(1000, short_of=short_of, steps=0), took(860))
    assert check(planner)
    assert (chosen.steps, chosen.plans) == (3, 2)


def test_a_budget_of_activations_that_is_not_kept_is_left_out(played):
    planner = Planner(plan(945, mode="budget"))
    played(planner, took(1000, short_of="device", steps=1), took(930))
    assert planner.asked[1] == (950, LAST_RESORT)


def test_where_the_cache_had_to_be_given_back_less_is_asked_for_and_kept(played):
    planner = Planner(plan(940))
    chosen = played(planner, took(940, retried=True, step_s=0.5), took(860, step_s=0.8))
    assert planner.asked[1][0] == 950 - 80
    assert chosen.trial.peak_device_bytes == 860
    assert "expandable_segments" not in chosen.summary(1000)


def test_a_cache_that_is_given_back_in_every_step_is_said(played):
    chosen = played(Planner(plan(940)), took(940, retried=True), took(860, retried=True))
    assert chosen.measured(1000)["retried"]
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in chosen.summary(1000)


@pytest.mark.parametrize(("rival_s", "chosen_s"), [(0.7, 0.7), (1.4, 1.0)])
def test_a_rival_that_may_be_faster_is_tried_and_the_faster_one_is_kept(played, rival_s, chosen_s):
    first = plan(945, rivals=[(("optimizer-offload",), 0.8)])
    planner = Planner(first, plan(930, mode="layers", mechanisms=("optimizer-offload",)))
    chosen = played(planner, took(940, step_s=1.0), took(930, step_s=rival_s))
    assert planner.asked[1] == (950, LAST_RESORT | {"recompute"})
    assert chosen.trial.step_s == chosen_s
    assert chosen.steps == 4


def test_an_alternative_with_more_mechanisms_hides_no_rival(played):
    first = plan(945, rivals=[(("recompute", "optimizer-offload"), 0.7), (("optimizer-offload",), 0.8)])
    planner = Planner(first, plan(930, mode="layers", mechanisms=("optimizer-offload",)))
    assert played(planner, took(940, step_s=1.0), took(930, step_s=0.9)).trial.step_s == 0.9
    assert planner.asked[1] == (950, LAST_RESORT | {"recompute"})


class Ways(Planner):
    """Has a plan for each of the two ways to divide states, with the seconds given, or refuses."""

    def __init__(self, *, stays, streams):
        super().__init__()
        self.ways = {LAST_RESORT: (plan(945), stays), STREAMS_ALL: (streaming(930), streams)}

    def plan(self, tensor_bytes, *, without=frozenset()):
        self.asked.append((tensor_bytes, without))
        found, step_s = self.ways[without]
        if step_s is None:
            raise RefusedPlanError("nothing legal fits")
        time = {"least_s": 0.8 * step_s, "step_s": step_s, "most_s": 1.2 * step_s}
        option = found["recommendation"]["option"] | {"time": time}
        return found | {"recommendation": {"option": option}}


@pytest.mark.parametrize(
    ("stays", "streams", "took_s", "settled_on"),
    [
        pytest.param(1.0, 0.9, [0.95, 1.0], (True, 4), id="the faster by prediction is first, and is"),
        pytest.param(1.0, 0.9, [1.1, 1.0], (False, 4), id="the faster by prediction is not"),
        pytest.param(0.9, 1.0, [1.0, 0.95], (True, 4), id="the other may be faster, and is"),
        pytest.param(1.0, 1.4, [1.1], (False, 2), id="streaming cannot be faster"),
        pytest.param(1.4, 1.0, [1.1], (True, 2), id="weights that stay cannot be faster"),
        pytest.param(1.0, None, [1.1], (False, 2), id="streaming does not fit"),
        pytest.param(None, 1.0, [1.1], (True, 2), id="nothing else fits"),
    ],
)
def test_weights_of_the_host_stay_there_where_that_is_faster(played, stays, streams, took_s, settled_on):
    planner = Ways(stays=stays, streams=streams)
    chosen = played(planner, *(took(930, step_s=each) for each in took_s), on_host=True)
    assert ("trained_layers" in chosen.plan["execute"], chosen.steps) == settled_on
    assert chosen.trial.step_s == min(took_s)


def test_the_other_way_is_tried_before_another_plan_of_the_same(played):
    class Rivals(Ways):
        def plan(self, tensor_bytes, *, without=frozenset()):
            alternative = {"fits": True, "mechanisms": [], "time": {"least_s": 0.1, "step_s": 0.2}}
            return super().plan(tensor_bytes, without=without) | {"alternatives": [alternative]}

    planner = Rivals(stays=1.0, streams=0.9)
    played(planner, took(930, step_s=0.95), took(930, step_s=1.0), on_host=True)
    assert planner.asked[-1] == (950, LAST_RESORT)


def test_weights_of_the_host_that_have_no_room_there_are_planned_on_the_device(played):
    class Full(Ways):
        def plan(self, tensor_bytes, *, without=frozenset()):
            if without == STREAMS_ALL and self.host_bytes < 500:
                raise RefusedPlanError("nothing legal fits")
            return super().plan(tensor_bytes, without=without)

    short = took(0, short_of="host", steps=0, was_applied=False)
    chosen = played(Full(stays=1.0, streams=0.9), short, took(940), on_host=True)
    assert "trained_layers" not in chosen.plan["execute"]


def test_a_plan_to_start_with_that_streams_is_corrected_by_one_that_streams(played):
    planner = Planner()
    chosen = played(planner, took(800), took(940, step_s=0.9), first=streaming(930))
    assert planner.asked == [(950 + 130, STREAMS_ALL)]
    assert chosen.trial.peak_device_bytes == 940


def test_two_plans_are_tried_to_their_end_however_slow_they_are(played):
    first = plan(945, mechanisms=("optimizer-offload", "recompute"), rivals=[(("recompute",), 10.0)])
    second = plan(940, rivals=[((), 10.0)])
    chosen = played(Planner(first, second), took(945, step_s=40.0), took(940, step_s=30.0))
    assert (chosen.trial.step_s, chosen.steps, chosen.plans) == (30.0, 4, 2)


def test_no_rival_is_tried_that_cannot_be_faster_nor_on_the_twin(played):
    for on_gpu, least_s in ((True, 1.2), (False, 0.1)):
        planner = Planner(plan(945, rivals=[(("optimizer-offload",), least_s)]))
        assert played(planner, took(940), on_gpu=on_gpu).plans == 1


def test_where_no_attempt_has_room_the_planner_has_the_last_word(played):
    none = [lambda tried: took(1000, short_of="device", steps=0)] * 11
    with pytest.raises(RefusedPlanError, match="nothing legal fits"):
        played(Planner(), *none)


def test_trained_layers_stream_where_nothing_else_is_left(played):
    planner = Planner()
    chosen = played(planner, took(190), budget=200)
    assert planner.asked == [(190, LAST_RESORT), (190, STREAMS_ALL)]
    assert "trained_layers" in chosen.plan["execute"]


def test_with_trained_layers_too_room_that_is_left_is_asked_for(played):
    planner = Planner(streaming(185))
    chosen = played(planner, took(150), took(190, step_s=0.9), budget=200)
    assert planner.asked[-1][0] == 190 + (185 - 150)
    assert chosen.trial.peak_device_bytes == 190


def test_after_attempts_without_room_they_are_the_last_resort_too(played):
    planner = Planner()
    short = took(1000, short_of="device", steps=1)
    chosen = played(planner, short, took(278), budget=330)
    assert planner.asked == [(314, LAST_RESORT), (309 - 26, LAST_RESORT), (309 - 26, STREAMS_ALL)]
    assert "trained_layers" in chosen.plan["execute"]


def test_weights_that_leave_no_room_to_stream_them_from_are_to_be_on_the_host(played):
    none = took(0, short_of="device", steps=0, was_applied=False)
    with pytest.raises(RefusedPlanError, match=r"try the model on the CPU, and device='cuda:0'"):
        played(Planner(), none, budget=200)
    assert played(Planner(), none, took(160), on_host=True, budget=200).plans == 2


def test_a_plan_is_taken_off_with_all_memory_where_the_limit_leaves_it_no_room():
    came_back = []

    class Applied:
        def close(self):
            came_back.append(torch.empty(2**20, dtype=torch.uint8))

    with Ledger(Device.of("cpu"), limit_bytes=2**10) as ledger, trial._closed_behind(Applied(), ledger):
        pass
    assert len(came_back) == 1
