# SPDX-License-Identifier: Apache-2.0
"""`apply_plan` takes over the optimizer that it is given: its states, groups, defaults, schedulers and clipping."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from planned_decoder import STEPPED, adamw, decoder, losses

from reference_impl.verification.apply import apply_plan
from reference_impl.verification.model import Decoder


def test_state_that_the_optimizer_has_already_is_taken_over() -> None:
    reference, model = decoder(), decoder()
    reference_optimizer, optimizer = adamw(reference), adamw(model)
    losses(reference, reference_optimizer, steps=2)
    losses(model, optimizer, steps=2)
    expected = losses(reference, reference_optimizer)
    with apply_plan(model, optimizer, {"execute": {"optimizer": {"offload_fraction": 1.0}}}) as applied:
        assert torch.stack(losses(model, applied.optimizer)).equal(torch.stack(expected))


@pytest.mark.parametrize("execute", STEPPED, ids=str)
def test_groups_and_defaults_are_taken_over_whole(execute: Mapping[str, Any]) -> None:
    def make(model: Decoder) -> torch.optim.AdamW:
        group = {"params": list(model.parameters()), "maximize": True, "initial_lr": 2e-3, "name": "all"}
        return torch.optim.AdamW([group], lr=1e-3, betas=(0.5, 0.6), fused=True)

    reference, model = decoder(), decoder()
    expected = losses(reference, make(reference))
    with apply_plan(model, make(model), {"execute": execute}) as applied:
        assert torch.stack(losses(model, applied.optimizer)).equal(torch.stack(expected))
        (group,) = applied.optimizer.param_groups
        assert (group["initial_lr"], group["name"]) == (2e-3, "all")
        assert applied.optimizer.defaults["betas"] == (0.5, 0.6)
    amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
    if "activations" not in execute:
        with pytest.raises(ValueError, match="amsgrad is True; expected False"):
            apply_plan(model, amsgrad, {"execute": execute})


@pytest.mark.parametrize("execute", [*STEPPED, {}], ids=str)
def test_a_norm_is_clipped_under_every_plan_until_it_is_closed(execute: Mapping[str, Any]) -> None:
    def make(model: Decoder) -> torch.optim.AdamW:
        # With a small eps Adam steps as far whatever the gradients' scale.
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, fused=True)

    clipped, unclipped, model, closed = (decoder() for _ in range(4))
    optimizer = make(clipped)
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(clipped.parameters(), 1e-3) and None
    )
    expected, others = losses(clipped, optimizer), losses(unclipped, make(unclipped))
    assert (expected[-1] - others[-1]).abs() > 1e-2
    with apply_plan(model, make(model), {"execute": execute}, max_grad_norm=1e-3) as applied:
        torch.testing.assert_close(losses(model, applied.optimizer), expected, rtol=0, atol=1e-4)
    plain = make(closed)
    apply_plan(closed, plain, {"execute": execute}, max_grad_norm=1e-3).close()
    assert torch.stack(losses(closed, plain)).equal(torch.stack(others))


def test_a_norm_is_that_of_gradients_without_their_scale() -> None:
    def weights(scale: float) -> list[torch.Tensor]:
        model = decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with apply_plan(model, optimizer, {"execute": {}}, max_grad_norm=1e-3) as applied:
            ids = torch.arange(64).view(2, 32)
            loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            scaler.scale(loss).backward()
            scaler.step(applied.optimizer)
        return [param.detach() for param in model.parameters()]

    torch.testing.assert_close(weights(2.0**10), weights(1.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("execute", [*STEPPED, {"optimizer": {"offload_fraction": 0.0}}], ids=str)
def test_a_scheduler_that_was_made_before_sets_the_rate_of_what_steps(execute: Mapping[str, Any]) -> None:
    def train(
        model: Decoder, optimizer: torch.optim.Optimizer, scheduler: Any, group: Any
    ) -> list[torch.Tensor]:
        found = []
        for step in range(4):
            if step == 2:
                # As a checkpoint is resumed from.
                optimizer.load_state_dict(optimizer.state_dict())
            group["weight_decay"] = 0.1 * step
            found += losses(model, optimizer, steps=1)
            scheduler.step()
        return found

    def prepared(model: Decoder) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = adamw(model)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3)

    reference, model = decoder(), decoder()
    plain, plain_scheduler = prepared(reference)
    expected = train(reference, plain, plain_scheduler, _Last(plain))
    given, scheduler = prepared(model)
    with warnings.catch_warnings():
        # Such as a scheduler's about its unstepped optimizer.
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*moves nothing")
        with apply_plan(model, given, {"execute": execute}) as applied:
            found = train(model, applied.optimizer, scheduler, _Last(given))
            assert torch.stack(found).equal(torch.stack(expected))
            assert applied.optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert given.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


class _Last:
    """The first group that an optimizer has now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __setitem__(self, name: str, value: Any) -> None:
        self._optimizer.param_groups[0][name] = value


@pytest.mark.parametrize("execute", STEPPED[:2], ids=str)
def test_an_optimizer_that_was_given_away_refuses_to_step_until_the_plan_is_closed(
    execute: Mapping[str, Any],
) -> None:
    model = decoder()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    with apply_plan(model, given, {"execute": execute}) as applied:
        losses(model, applied.optimizer, steps=1)
        for use in (
            given.step,
            given.state_dict,
            lambda: given.load_state_dict(applied.optimizer.state_dict()),
        ):
            with pytest.raises(RuntimeError, match=f"expected the {type(applied.optimizer).__name__}"):
                use()
    assert given.param_groups[0]["foreach"] is True
    assert given.param_groups[0]["fused"] is None
    assert len(losses(model, given, steps=1)) == 1


@pytest.mark.parametrize("execute", STEPPED[:2], ids=str)
def test_states_that_are_taken_over_are_held_once(execute: Mapping[str, Any]) -> None:
    model = decoder()
    optimizer = adamw(model)
    losses(model, optimizer, steps=1)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad"):
        apply_plan(model, optimizer, {"execute": execute})
    assert optimizer.state, "a plan that was refused has taken the states"
    optimizer.param_groups[0]["amsgrad"] = False
    with apply_plan(model, optimizer, {"execute": execute}) as applied:
        assert not optimizer.state
        assert applied.optimizer.state_dict()["state"]


def test_masters_that_torch_has_rounded_are_refused() -> None:
    model = decoder().bfloat16()
    with apply_plan(model, adamw(model), {"execute": STEPPED[0]}) as applied:
        losses(model, applied.optimizer, steps=1)
        saved = applied.optimizer.state_dict()
    optimizer = adamw(model)
    optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"'master_param'\] is of dtype torch.bfloat16; expected float32"):
        apply_plan(model, optimizer, {"execute": STEPPED[0]})


def test_another_optimizer_is_refused_by_name() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD"):
        apply_plan(model, optimizer, {"execute": {"optimizer": {"offload_fraction": 1.0}}})
