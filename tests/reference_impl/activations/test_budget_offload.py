# SPDX-License-Identifier: Apache-2.0
"""The budget on a model: profile, plan, carry out."""

import copy
import dataclasses
import gc
import itertools

import pytest
import torch
from torch import nn

from reference_impl.activations import ActivationOffloader, activation_offloader
from reference_impl.activations.budget import BudgetError
from reference_impl.activations.budget_policy import BudgetPolicy
from reference_impl.activations.policy import Decision
from reference_impl.activations.tape import Tape
from reference_impl.memory.ledger import Ledger
from reference_impl.memory.rates import LinkSpeed
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.verification.kernels import kernels
from reference_impl.verification.model import decoder_loss

SMALL = {"min_bytes": 1024}
STEPS_BEFORE_A_PLAN = 2


@pytest.fixture
def long_trainee(trainee, device):
    """More tokens, so that activations outweigh weights, with kernels that repeat themselves bit by bit."""
    trainee.ids = torch.randint(512, (2, 8192 if device.is_accelerator else 512), device=device.torch_device)
    # The attention that adds in a fixed order takes half precision only.
    trainee.model.to(torch.bfloat16 if device.is_accelerator else torch.float32)
    with kernels(device, fixed_order=True):
        yield trainee


@pytest.fixture
def slow_link(monkeypatch):
    """A link so slow that much is computed again."""
    slow = LinkSpeed(d2h_bytes_per_s=1e8, h2d_bytes_per_s=1e8)
    monkeypatch.setattr(activation_offloader, "measure_link", lambda *_, **__: slow)


def peaks(trainee, ledger, steps):
    seen = []
    for _ in range(steps):
        trainee.model.zero_grad()
        ledger.reset_peak()
        trainee.loss().backward()
        seen.append(ledger.peak_device_bytes)
    return seen


def settled_peaks(trainee, ledger, device):
    """The peaks of the steps that a budget holds for: all but the two before the plan.

    On CUDA a peak that the allocator's rounding made is answered by less room, and then by another plan.
    """
    return peaks(trainee, ledger, 10)[7:] if device.is_accelerator else peaks(trainee, ledger, 5)[2:]


def extremes(trainee, device):
    """The peaks without offload and with everything offloaded."""
    with Ledger(device, track=trainee.model.parameters()) as ledger:
        (without,) = peaks(trainee, ledger, 1)
        with ActivationOffloader(trainee.model, in_flight_bytes=0, **SMALL):
            (everything,) = peaks(trainee, ledger, 1)
    return without, everything


@pytest.mark.parametrize(
    "share", [0.05, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.3, 0.7, 1.2))]
)
def test_the_budget_is_kept_and_the_step_is_bitwise_the_same(long_trainee, device, share):
    expected = long_trainee.step()
    without, everything = extremes(long_trainee, device)
    budget = int(everything + share * (without - everything)) + 2**16
    with (
        Ledger(device, track=long_trainee.model.parameters()) as ledger,
        ActivationOffloader(long_trainee.model, budget_bytes=budget, **SMALL) as offloader,
    ):
        assert max(settled_peaks(long_trainee, ledger, device)) <= budget
        assert long_trainee.step() == expected
        assert offloader.plan.predicted_peak_bytes <= budget
        assert (offloader.plan.bytes_of(Decision.KEEP) > 0) == (share > 0.1) or share == 0.05
        assert offloader.arena.live_bytes == 0


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize(
    "share", [0.02, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.05, 0.1, 0.3))]
)
def test_the_budget_is_kept_where_much_is_recomputed(long_trainee, device, share):
    expected = long_trainee.step()
    without, everything = extremes(long_trainee, device)
    budget = int(everything + share * (without - everything)) + 2**16
    with (
        Ledger(device, track=long_trainee.model.parameters()) as ledger,
        ActivationOffloader(long_trainee.model, budget_bytes=budget, **SMALL) as offloader,
    ):
        assert max(settled_peaks(long_trainee, ledger, device)) <= budget
        assert long_trainee.step() == expected
        assert offloader.plan.bytes_of(Decision.RECOMPUTE) > 0


@pytest.mark.usefixtures("slow_link")
def test_the_least_is_found_without_a_number(long_trainee, device):
    expected = long_trainee.step()
    _, everything = extremes(long_trainee, device)
    with (
        Ledger(device, track=long_trainee.model.parameters()) as ledger,
        ActivationOffloader(long_trainee.model, budget_bytes="least", **SMALL) as offloader,
    ):
        assert max(settled_peaks(long_trainee, ledger, device)) <= everything * 1.01
        assert long_trainee.step() == expected
        # Without recomputing only where a step by the plan took more: CUDA's allocator rounds.
        assert offloader.plan.bytes_of(Decision.RECOMPUTE) > 0 or offloader._budget._over_bytes > 0


@pytest.mark.usefixtures("slow_link")
def test_steps_by_a_plan_are_recorded_and_not_timed(long_trainee, device, monkeypatch):
    expected = long_trainee.step()
    _, everything = extremes(long_trainee, device)
    with (
        Ledger(device, track=long_trainee.model.parameters()) as ledger,
        ActivationOffloader(long_trainee.model, budget_bytes=int(1.2 * everything), **SMALL) as offloader,
    ):
        peaks(long_trainee, ledger, STEPS_BEFORE_A_PLAN)
        marks = []
        monkeypatch.setitem(vars(device), "mark", lambda: marks.append(1))
        assert long_trainee.step() == expected
        assert offloader.plan.bytes_of(Decision.RECOMPUTE) > 0
        assert marks == []


def test_a_budget_in_words_other_than_least_is_refused(trainee):
    with pytest.raises(ValueError, match="budget_bytes='most'; expected a number of bytes, or 'least'"):
        ActivationOffloader(trainee.model, budget_bytes="most")


def plan_of(trainee, device, decision):
    """A plan that treats all storages alike."""
    with (
        Ledger(device, track=trainee.model.parameters()) as ledger,
        ActivationOffloader(trainee.model, budget_bytes=2**40, **SMALL) as offloader,
    ):
        peaks(trainee, ledger, STEPS_BEFORE_A_PLAN + 1)
        plan = offloader.plan
    return dataclasses.replace(plan, decisions=(decision,) * len(plan.decisions))


@pytest.mark.parametrize("decision", list(Decision))
def test_each_way_of_a_plan_is_bitwise_the_same(trainee, device, decision):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, plan=plan_of(trainee, device, decision), **SMALL) as offloader:
        for _ in range(3):
            assert trainee.step() == expected
        bytes_by_way = {
            Decision.KEEP: offloader.engine.kept_bytes,
            Decision.OFFLOAD: offloader.engine.offloaded_bytes,
            Decision.RECOMPUTE: offloader.engine.recomputed_bytes,
        }
        assert bytes_by_way[decision] == max(bytes_by_way.values()) > 0


def cheap_plan_of(trainee, device):
    """A plan that recomputes cheap results and keeps the rest."""
    plan = plan_of(trainee, device, Decision.KEEP)
    cheap = tuple(Decision.RECOMPUTE if name in ("silu", "mul") else Decision.KEEP for name in plan.names)
    return dataclasses.replace(plan, decisions=cheap)


def test_recomputing_needs_neither_device_nor_host_memory(long_trainee, device):
    without, _ = extremes(long_trainee, device)
    plan = cheap_plan_of(long_trainee, device)
    with (
        Ledger(device, track=long_trainee.model.parameters()) as ledger,
        ActivationOffloader(long_trainee.model, plan=plan, **SMALL),
    ):
        # One layer's share is there while backward works on it.
        assert peaks(long_trainee, ledger, 2)[-1] < without - 0.7 * plan.bytes_of(Decision.RECOMPUTE)
        assert ledger.peak_host_bytes == 0


@pytest.fixture
def cheap_plan(trainee, device):
    return cheap_plan_of(trainee, device)


def test_later_steps_record_only_what_is_computed_again(trainee, cheap_plan, monkeypatch):
    expected = trainee.step()
    recorded, record = [], Tape._record
    monkeypatch.setattr(Tape, "_record", lambda *given: (recorded[-1].append(1), record(*given)))
    with ActivationOffloader(trainee.model, plan=cheap_plan, **SMALL) as offloader:
        for steps in range(1, 4):
            recorded.append([])
            assert trainee.step() == expected
            assert offloader.engine.recomputed_bytes == steps * cheap_plan.bytes_of(Decision.RECOMPUTE)
    first, second, third = map(len, recorded)
    assert 0 < second == third < first / 2


def test_a_model_that_calls_other_operations_in_every_second_step_finds_its_recipes_again(
    trainee, cheap_plan
):
    expected = trainee.step()
    recomputed, calls = [], itertools.count()

    def other_operations(_, given):
        if next(calls) % 2:
            given[0].detach().abs().exp()

    trainee.model.layers[0].down.register_forward_pre_hook(other_operations)
    with ActivationOffloader(trainee.model, plan=cheap_plan, **SMALL) as offloader:
        for _ in range(10):
            before = offloader.engine.recomputed_bytes
            assert trainee.step() == expected
            recomputed.append(offloader.engine.recomputed_bytes - before)
    whole = cheap_plan.bytes_of(Decision.RECOMPUTE)
    assert recomputed[0] == whole
    assert recomputed[1] < whole
    assert recomputed[6:] == [whole] * 4


def test_another_plan_computes_other_results_again_from_its_first_step(trainee, cheap_plan, device):
    expected = trainee.step()
    other = plan_of(trainee, device, Decision.RECOMPUTE)
    with ActivationOffloader(trainee.model, plan=cheap_plan, **SMALL) as offloader:
        for _ in range(2):
            assert trainee.step() == expected
        start_run = BudgetPolicy.start_run

        def with_another_plan(policy, run):
            start_run(policy, run)
            policy.plan = other

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(BudgetPolicy, "start_run", with_another_plan)
            before = offloader.engine.recomputed_bytes
            assert trainee.step() == expected
            assert offloader.engine.recomputed_bytes - before > 1.2 * cheap_plan.bytes_of(Decision.RECOMPUTE)


def test_retained_graphs_can_be_recomputed_twice(trainee, device):
    plan = plan_of(trainee, device, Decision.RECOMPUTE)

    def gradients():
        trainee.model.zero_grad()
        loss = trainee.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad.clone() for p in trainee.model.parameters()]

    expected = gradients()
    with ActivationOffloader(trainee.model, plan=plan, **SMALL):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


class Writing(nn.Module):
    """Saves results written in place, random, or changed unseen by PyTorch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class WritingLayer(nn.Linear):
    def forward(self, x):
        y = super().forward(x).sin()
        y = y.relu_() * nn.functional.dropout(y, 0.5)
        hidden = y * 3
        hidden.data.mul_(0.5)
        return hidden.exp().tanh()


def test_results_that_cannot_be_recomputed_are_found_out(device):
    model = Writing().to(device.torch_device)
    model.layers = nn.ModuleList(WritingLayer(64, 64) for _ in range(3)).to(device.torch_device)
    x = torch.randn(32, 64, device=device.torch_device)

    def gradients():
        torch.manual_seed(5)
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with (
        Ledger(device, track=model.parameters()),
        ActivationOffloader(model, budget_bytes=2**40, min_bytes=1024) as offloader,
    ):
        for _ in range(STEPS_BEFORE_A_PLAN + 1):
            gradients()
        plan = offloader.plan
    for decision in (Decision.OFFLOAD, Decision.RECOMPUTE):
        chosen = dataclasses.replace(plan, decisions=(decision,) * len(plan.decisions))
        with ActivationOffloader(model, plan=chosen, min_bytes=1024):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


class QueueLayer(nn.Linear):
    """Adds what a buffer held, and writes the buffer, which autograd does not save."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("queue", torch.ones(32, 64))

    def forward(self, x):
        y = (super().forward(x) + self.queue.exp()).sin()
        self.queue.mul_(1)
        return y


def test_an_input_that_the_step_writes_makes_no_recipe(device):
    model = Writing()
    model.layers = nn.ModuleList(QueueLayer(64, 64) for _ in range(3))
    model.to(device.torch_device)
    x = torch.randn(32, 64, device=device.torch_device)

    def gradients():
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with Ledger(device), ActivationOffloader(model, budget_bytes="least", min_bytes=1024) as offloader:
        for _ in range(STEPS_BEFORE_A_PLAN + 2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
        assert offloader.plan is not None


def test_a_budget_below_the_least_is_refused_before_the_second_step(trainee, device):
    expected = trainee.step()
    with (
        Ledger(device, track=trainee.model.parameters()),
        ActivationOffloader(trainee.model, budget_bytes=1, **SMALL),
    ):
        assert trainee.step() == expected
        with pytest.raises(BudgetError, match="expected at least"):
            trainee.step()
    assert trainee.step() == expected


def test_gradients_that_wait_for_a_streamed_update_are_no_part_of_the_least(trainee, device):
    """They lie on the device when the second forward begins, and go before the step's peak."""

    def losses_and_peak(**offloading):
        seen = []
        gc.collect()  # An allocator counts the model of the last call, too.
        with Ledger(device) as ledger:
            model = copy.deepcopy(trainee.model)
            with (
                HybridDeviceOptimizer(model.parameters(), lr=1e-3, split=(0.1, 0.9, 0.0)) as optimizer,
                ActivationOffloader(model, **offloading, **SMALL),
            ):
                optimizer.attach(model)
                for _ in range(5):
                    loss = decoder_loss(model(trainee.ids), trainee.ids)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(loss.item())
        return seen, ledger.peak_device_bytes

    expected, peak_bytes = losses_and_peak(in_flight_bytes=0)
    seen, _ = losses_and_peak(budget_bytes=peak_bytes + 2**18)
    assert seen == expected


def test_the_twin_needs_somebody_who_counts(trainee, device):
    if device.is_accelerator:
        pytest.skip("CUDA counts by itself")
    expected = trainee.step()
    with (
        ActivationOffloader(trainee.model, budget_bytes=2**30, **SMALL),
        pytest.raises(ValueError, match="open Ledger"),
    ):
        trainee.step()
    assert trainee.step() == expected


def test_another_length_than_planned_is_offloaded(trainee, device):
    plan = plan_of(trainee, device, Decision.KEEP)
    trainee.ids = trainee.ids[:, :64]
    expected = trainee.step()
    with ActivationOffloader(trainee.model, plan=plan, min_bytes=256) as offloader:
        assert trainee.step() == expected
        assert offloader.offloaded_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_error_before_the_plan_is_survived(long_trainee, device, steps_before):
    expected = long_trainee.step()
    without, everything = extremes(long_trainee, device)
    budget = (without + everything) // 2
    with (
        Ledger(device, track=long_trainee.model.parameters()) as ledger,
        ActivationOffloader(long_trainee.model, budget_bytes=budget, **SMALL) as offloader,
    ):
        for _ in range(steps_before):
            assert long_trainee.step() == expected
        hook = long_trainee.model.layers[1].down.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            long_trainee.step()
        hook.remove()
        assert long_trainee.step() == expected
        # The next steps show the tensors that the broken step did not.
        assert max(peaks(long_trainee, ledger, 10)[7:]) <= budget
        assert long_trainee.step() == expected
        assert offloader.plan is not None


def test_tensors_of_inference_mode_are_no_part_of_a_plan(trainee, device):
    """They have no version counter: an embedding made in inference mode, and all of an evaluation there."""
    hidden = trainee.model.layers[0].up.in_features
    with torch.inference_mode():
        added = torch.ones(hidden, device=device.torch_device)
    trainee.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] + added, *args[1:]))
    expected = trainee.step()
    with Ledger(device), ActivationOffloader(trainee.model, budget_bytes="least", **SMALL):
        for _ in range(4):
            assert trainee.step() == expected
            with torch.inference_mode():
                trainee.loss()


@pytest.mark.slow
def test_evaluation_between_the_steps_of_a_budget_changes_nothing(long_trainee, device):
    expected = long_trainee.step()
    without, everything = extremes(long_trainee, device)
    budget = (without + everything) // 2
    with (
        Ledger(device, track=long_trainee.model.parameters()) as ledger,
        ActivationOffloader(long_trainee.model, budget_bytes=budget, **SMALL),
    ):
        for _ in range(4):
            assert long_trainee.step() == expected
            with torch.no_grad():
                long_trainee.loss()
        assert max(settled_peaks(long_trainee, ledger, device)) <= budget
