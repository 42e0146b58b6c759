# SPDX-License-Identifier: Apache-2.0
"""`fit` of a model on the host whose weights have no room on the device: its layers stream."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from failing_trials import failing_trials

from offload_arithmetic import sizes
from reference_impl import apply_plan, fit
from reference_impl.activations.headroom import Headroom
from reference_impl.device import Device
from reference_impl.fitting import FitError, trial
from reference_impl.fitting.trial import Task
from reference_impl.memory.host import host_book, host_storages
from reference_impl.memory.ledger import Ledger, on_host
from reference_impl.optimizers import Streaming
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.verification import apply
from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss
from reference_impl.weights.storages import move

IDS = torch.arange(32).reshape(2, 16) % 300
SHAPE = DecoderShape(hidden=64, ffn=512, heads=4, layers=12, vocab=300)
# Of which layers are large enough to stream.
WIDER = DecoderShape(hidden=192, ffn=768, heads=4, layers=12, vocab=300)
CHUNK_BYTES = 2**17


def loss_of(model, ids):
    return decoder_loss(model(ids), ids)


def make():
    torch.manual_seed(0)
    model = Decoder(SHAPE).bfloat16()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def train(model, optimizer, steps=2):
    losses = []
    for _ in range(steps):
        losses.append(loss_of(model, IDS))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def weights_bytes():
    return sum(param.nbytes for param in make()[0].parameters())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, planner_in_process):
    """As small beside a layer as they are in a large model."""
    monkeypatch.setattr(sizes, "STATE_CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(apply, "Streaming", partial(Streaming, chunk_bytes=CHUNK_BYTES))
    yield
    assert host_book.live_bytes == 0


def trained(fitted, model):
    """The losses of two steps, and the weights after them."""
    return [*train(model, fitted.optimizer), *(value.clone() for value in model.state_dict().values())]


@pytest.mark.slow
def test_a_model_larger_than_the_device_is_fitted_from_the_host():
    model, optimizer = make()
    before, noted = [param.clone() for param in model.parameters()], set(host_storages)
    budget = round(0.9 * weights_bytes())
    with fit(model, optimizer, IDS, loss_of, gpu_budget=budget, device="cpu") as fitted:
        assert list(fitted.plan["execute"]) == ["trained_layers"]
        assert fitted.plan["fitted"]["peak_device_bytes"] <= budget
        assert same(before, model.state_dict().values())
        found = trained(fitted, model)
    assert host_storages == noted
    # As without offload, with its recomputation.
    model, optimizer = make()
    plan = {"execute": {"optimizer": {"offload_fraction": 0.0}, "activations": {"mode": "recompute"}}}
    with apply_plan(model, optimizer, plan) as applied:
        assert same(found, trained(applied, model))
    # The plan keeps the budget by itself.
    model, optimizer = make()
    with on_host(model.parameters()):
        ledger = Ledger(Device.of("cpu"), track=[IDS], limit_bytes=budget)
        with ledger, apply_plan(model, optimizer, fitted.plan, device="cpu") as applied:
            train(model, applied.optimizer)


def partly_trained(what):
    """A model with few trained weights, and their optimizer."""
    model = Decoder(WIDER).bfloat16().requires_grad_(False)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.02 * torch.randn(param.shape))
    match what:
        case "adapters":
            add_lora(model, 4)
        case "last layer":
            model.layers[-1].requires_grad_(True)
        case "head":
            model.head.requires_grad_(True)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, fused=True)


@pytest.mark.parametrize(
    "what", ["adapters", *(pytest.param(what, marks=pytest.mark.slow) for what in ("last layer", "head"))]
)
def test_frozen_layers_of_a_model_larger_than_the_device_stream_from_the_host(what):
    model, optimizer = partly_trained(what)
    plan = {"execute": {"optimizer": {"offload_fraction": 0.0}}}
    with apply_plan(model, optimizer, plan) as applied:
        expected = trained(applied, model)
    model, optimizer = partly_trained(what)
    before, noted = [param.clone() for param in model.parameters()], set(host_storages)
    budget = round(0.75 * sum(param.nbytes for param in model.parameters()))
    with fit(model, optimizer, IDS, loss_of, gpu_budget=budget, device="cpu") as fitted:
        option = fitted.plan["recommendation"]["option"]
        assert "layer-streaming" in option["mechanisms"]
        assert fitted.plan["fitted"]["peak_device_bytes"] <= budget
        assert fitted.plan["fitted"]["peak_device_bytes"] == pytest.approx(
            option["memory"]["allocated_bytes"], rel=0.04
        )
        assert same(before, model.state_dict().values())
        found = trained(fitted, model)
    assert same(found, expected)
    assert host_storages == noted


@pytest.mark.slow
def test_frozen_weights_on_the_device_that_fill_it_are_better_on_the_host():
    model, optimizer = partly_trained("head")
    weights_bytes = sum(param.nbytes for param in model.parameters())
    with pytest.raises(
        FitError, match=r"no room on the device to stream them from; .*; try the model on the CPU"
    ):
        fit(model, optimizer, IDS, loss_of, gpu_budget=round(0.9 * weights_bytes))


def operations_until(nth, monkeypatch, plan=None, *, make=make, budget_share=1.1, mechanism="trained_layers"):
    """Fit where the n-th operation of the trials fails, and find nothing changed; return how many there were."""
    model, optimizer = make()
    before = [param.clone() for param in model.parameters()]
    budget = round(budget_share * sum(param.nbytes for param in model.parameters()))
    with failing_trials(nth, monkeypatch) as failing:
        try:
            with fit(model, optimizer, IDS, loss_of, gpu_budget=budget, plan=plan, device="cpu") as fitted:
                assert mechanism in fitted.plan["execute"]
                assert same(before, model.state_dict().values())
        except FitError:
            # Where the plan with the least memory had too little, there is none with less.
            assert nth > 0
    assert same(before, model.parameters())
    train(model, optimizer, steps=1)
    return failing.done


@cache
def updated_in_backward():
    """A plan whose updates begin in backward."""
    with fit(*make(), IDS, loss_of, gpu_budget=round(1.1 * weights_bytes()), device="cpu") as fitted:
        return fitted.plan | {
            "execute": fitted.plan["execute"] | {"trained_layers": {"backward_overlap": "update"}}
        }


@cache
def operations(plan_of=lambda: None):
    """How many there are in trials in which none fails."""
    with pytest.MonkeyPatch.context() as patch:
        return operations_until(-1, patch, plan_of())


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.15, 0.3, 0.5, 0.8])
def test_an_attempt_without_memory_leaves_everything_as_it_was(share, monkeypatch):
    nth = 1 + int(share * operations())
    assert operations_until(nth, monkeypatch) >= nth


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.15, 0.35, 0.6])
def test_so_does_one_whose_update_has_begun_in_backward(share, monkeypatch):
    nth = 1 + int(share * operations(updated_in_backward))
    assert operations_until(nth, monkeypatch, updated_in_backward()) >= nth


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.2644, 0.7505, 0.79])
def test_so_does_one_whose_frozen_layers_stream_while_a_graph_holds_their_weights(share, monkeypatch):
    """When the plan is attached, in two forwards and in the second backward."""
    options = {"make": partial(partly_trained, "adapters"), "budget_share": 0.75, "mechanism": "weights"}
    whole = operations_until(-1, monkeypatch, **options)
    nth = 1 + int(share * whole)
    assert operations_until(nth, monkeypatch, **options) >= nth


def task_of(model, optimizer):
    device = Device.of("cpu")
    return Task(
        model=model, optimizer=optimizer, batch=IDS, loss=loss_of, max_grad_norm=None, device=device, on_host=True
    )  # fmt: skip


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory (injected)")


@pytest.mark.parametrize("when", ["in backward", pytest.param("before the step", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "execute",
    [
        {"optimizer": {"offload_fraction": 1.0}},
        {"optimizer": {"offload_fraction": 0.5, "backward_overlap": "update"}},
        pytest.param({"trained_layers": {}}, marks=pytest.mark.slow),
        {"trained_layers": {"backward_overlap": "update"}},
    ],
)
def test_gradients_that_had_left_do_not_stay_when_the_model_moves_back(execute, when, monkeypatch):
    def moving(model, device):
        for param in model.parameters():
            if param.grad is not None:
                # As a move to another device does; on the twin no tensor has to move.
                param.grad.to("meta")
        move(model, device)

    model, optimizer = make()
    if when == "in backward":
        model.layers[0].register_full_backward_pre_hook(out_of_memory)
    else:
        monkeypatch.setattr(Task, "step", lambda task, _: out_of_memory(task.loss(model, IDS).backward()))
    monkeypatch.setattr(trial, "move", moving)
    found = trial.run(task_of(model, optimizer), {"execute": execute}, limit_bytes=2**40)
    assert (found.short_of, found.steps) == ("device", 0)
    assert not any(isinstance(param.grad, GradientStandIn) for param in model.parameters())


@pytest.mark.slow
def test_a_budget_has_learnt_all_before_the_step_that_is_timed(monkeypatch):
    steps, learnt_in = [], []
    step, measure_again = Task.step, Headroom.measure_again
    monkeypatch.setattr(Task, "step", lambda *given: (steps.append(1), step(*given)))
    monkeypatch.setattr(
        Headroom,
        "measure_again",
        lambda *given, **named: (learnt_in.append(len(steps)), measure_again(*given, **named)),
    )
    model, optimizer = make()
    task = replace(task_of(model, optimizer), batch=torch.arange(4096).reshape(4, 1024) % 300)
    plan = {"execute": {"activations": {"mode": "budget", "budget_bytes": 2**40}}}
    found = trial.run(task, plan, limit_bytes=2**40)
    assert found.short_of == ""
    # The second step is profiled, the third is the first under a plan.
    assert learnt_in == [2, 3]
    assert (found.steps, len(steps)) == (4, 4)


def test_closing_without_zero_grad_moves_the_model_back_too():
    model, optimizer = make()
    task = task_of(model, optimizer)
    plan = {"execute": {"optimizer": {"offload_fraction": 1.0}}}
    with task.moved(plan), task.apply(plan) as applied:
        loss_of(model, IDS).backward()
        applied.optimizer.step()
        assert all(isinstance(param.grad, GradientStandIn) for param in model.parameters())
    assert all(param.grad is None for param in model.parameters())


def test_weights_on_the_device_that_fill_it_are_better_on_the_host():
    model, optimizer = make()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(
        FitError, match=r"no room on the device to stream them from; .*; try the model on the CPU"
    ):
        fit(model, optimizer, IDS, loss_of, gpu_budget=weights_bytes())
    assert same(before, model.parameters())


def test_layers_that_stay_count_on_the_device_and_the_others_on_the_host():
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    in_blocks = sum(param.nbytes for block in model.layers for param in block.parameters())
    whole = sum(param.nbytes for param in model.parameters())
    plan = {"execute": {"trained_layers": {"resident_layers": 6}}}
    with on_host(model.parameters()), Ledger(Device.of("cpu")) as ledger:
        with apply_plan(model, optimizer, plan, device="cpu"):
            streamed = in_blocks / 2
            assert ledger.device_bytes >= whole - 1.05 * streamed
            # Beside them gradients, and the two moments of weights that are their own masters.
            assert ledger.host_bytes == pytest.approx(streamed + 3 * whole, rel=0.02)
        # The mover brings remaining tensors back.
        assert ledger.device_bytes < whole - 0.9 * streamed
