# SPDX-License-Identifier: Apache-2.0
"""The profiled step, and the answer to a step that differs from its profile."""

import torch
from torch import nn

from reference_impl.activations import ActivationOffloader, budget_policy
from reference_impl.activations.budget import ProfiledStorage, StepProfile
from reference_impl.activations.budget_policy import BudgetPolicy
from reference_impl.activations.policy import Decision
from reference_impl.memory.ledger import Ledger


def test_the_step_that_makes_host_memory_is_not_the_profile(trainee, device):
    """Launches wait while memory is being locked, so its times are those of the host."""
    with (
        Ledger(device, track=trainee.model.parameters()),
        ActivationOffloader(trainee.model, budget_bytes=2**40, min_bytes=1024) as offloader,
    ):
        trainee.step()
        made_bytes = offloader.arena.reserved_bytes
        # Whoever profiles records operations.
        assert offloader.engine.tape is None
        trainee.step()
        assert offloader.arena.reserved_bytes == made_bytes > 0
        assert offloader.engine.tape is not None
        assert offloader.plan is None
        trainee.step()
        assert offloader.plan is not None


def test_named_layers_give_a_budget_to_a_model_without_a_list_of_blocks(device):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks).to(device.torch_device)
    inputs = torch.randn(512, 64, device=device.torch_device)

    def step(ledger):
        ledger.reset_peak()
        model(inputs).square().mean().backward()
        gradients = [param.grad for param in model.parameters()]
        model.zero_grad()
        return gradients, ledger.peak_device_bytes

    with Ledger(device, track=model.parameters()) as ledger:
        expected, peak_bytes = step(ledger)
        options = {"layers": [str(n) for n in range(4)], "min_bytes": 1024}
        with ActivationOffloader(model, budget_bytes="least", **options) as offloader:
            for _ in range(4):
                gradients, budget_peak_bytes = step(ledger)
                assert all(map(torch.equal, gradients, expected))
            plan = offloader.plan
        with ActivationOffloader(model, plan=plan, **options) as offloader:
            gradients, plan_peak_bytes = step(ledger)
            assert all(map(torch.equal, gradients, expected))
            assert offloader.offloaded_bytes > 0
    assert plan is not None
    assert max(budget_peak_bytes, plan_peak_bytes) < peak_bytes


class Watched:
    """Stands for the headroom of an engine: a plan's measured step, and its reduced allowance."""

    def __init__(self):
        self.shrunk = []

    def learnt_peaks(self):
        return {"forward": [900], "loss": [1000], "backward": [900]}

    def measure_again(self, run, *, ceiling_bytes):
        pass

    def shrink(self, by_bytes):
        self.shrunk.append(by_bytes)


def test_a_step_above_the_budget_costs_headroom_first_and_then_a_smaller_plan(monkeypatch, device):
    headroom = Watched()
    policy = BudgetPolicy(headroom, device, lambda _: None, budget_bytes=10_000, plan=None)
    policy._profile = StepProfile(
        storages=tuple(
            ProfiledStorage(name="op", size_bytes=1000, saved_at_s=n, needed_at_s=8.0 - n) for n in range(8)
        ),
        forward_s=8.0,
        loss_s=0.0,
        backward_s=8.0,
        forward_peak_bytes=4000,
        backward_peak_bytes=(4000,) * 9,
        d2h_bytes_per_s=1e6,
        h2d_bytes_per_s=1e6,
    )
    policy._make_plan(None)
    first = policy.plan.bytes_of(Decision.KEEP)
    monkeypatch.setattr(budget_policy, "mark_peak", lambda _: None)
    monkeypatch.setattr(budget_policy, "marked_peak_bytes", lambda _: 11_300)
    policy.start_run(None)  # The plan's own first step was measured segment by segment.
    policy.start_run(None)
    assert headroom.shrunk == [1300]
    policy.start_run(None)
    assert policy.plan.bytes_of(Decision.KEEP) < first
    assert headroom.shrunk == [1300]
