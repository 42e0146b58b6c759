# SPDX-License-Identifier: Apache-2.0
"""`fit` settles on a plan that holds, and leaves nothing of how it came there."""

import json
import random

import pytest
import torch
from failing_trials import failing_trials
from fit_trainee import IDS, Model, loss_of, make, peak_of, same, train, whole_peak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemas import assert_follows

from reference_impl import apply_plan, fit
from reference_impl.device import Device, PinningError
from reference_impl.device.cpu_twin import CpuTwin
from reference_impl.fitting import FitError
from reference_impl.fitting.before import copies_on_host
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger
from reference_impl.trained_layers import chunked_cross_entropy
from reference_impl.verification.model import Decoder, DecoderShape, add_lora


def test_a_plan_is_settled_on_that_holds_and_is_applied():
    model, optimizer = make()
    budget = round(0.8 * whole_peak())
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    random_state, python_state = torch.get_rng_state(), random.getstate()
    with fit(model, optimizer, IDS, loss_of, gpu_budget=budget) as fitted:
        assert same(before, [*model.parameters(), *model.buffers()])
        assert torch.equal(random_state, torch.get_rng_state())
        assert random.getstate() == python_state
        measured = fitted.plan["fitted"]
        assert measured["peak_device_bytes"] <= budget
        assert measured["steps"] <= 4
        assert fitted.summary.startswith("fit: ")
        assert "\n" not in fitted.summary
        found = train(model, fitted.optimizer)
    assert_follows(fitted.plan, "plan")
    assert fitted.plan["model"]["parameters"] == sum(param.numel() for param in model.parameters())
    assert peak_of(json.loads(json.dumps(fitted.plan))) <= budget
    model, optimizer = make()
    with apply_plan(model, optimizer, fitted.plan) as applied:
        assert all(same(*each) for each in zip(found, train(model, applied.optimizer), strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("planner_in_process")
def test_compiled_blocks_that_are_computed_again_train_with_the_same_bits():
    budget = round(0.4 * whole_peak())

    def trained(compiles):
        model, optimizer = make()
        for block in model.layers if compiles else ():
            block.compile(backend="aot_eager")
        with fit(model, optimizer, IDS, loss_of, gpu_budget=budget) as fitted:
            assert fitted.plan["execute"]["activations"]["mode"] in ("recompute", "checkpoint")
            return train(model, fitted.optimizer)

    assert all(same(*each) for each in zip(trained(True), trained(False), strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("planner_in_process")
def test_states_that_the_optimizer_has_go_on():
    model, optimizer = make()
    train(model, optimizer)
    expected = train(model, optimizer)
    model, optimizer = make()
    train(model, optimizer)
    with fit(model, optimizer, IDS, loss_of, gpu_budget=round(0.6 * whole_peak())) as fitted:
        assert fitted.plan["execute"]["optimizer"]["offload_fraction"] > 0
        assert all(same(*each) for each in zip(expected, train(model, fitted.optimizer), strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("planner_in_process")
def test_copies_of_weights_and_states_have_their_values_and_strides(device):
    made = torch.randn(4, 3, 5, 7, device=device.torch_device)
    tensors = [
        made,
        made.to(memory_format=torch.channels_last),
        made.permute(3, 1, 0, 2).bfloat16(),
        made[:, 1],
        made[0, 0, 0].expand(6, 7),
        torch.tensor(True, device=device.torch_device),
        torch.empty(0, 3, device=device.torch_device),
    ]
    copies = copies_on_host(tensors, device)
    for copy, tensor in zip(copies, tensors, strict=True):
        expected = tensor.to("cpu", copy=True)
        assert torch.equal(copy, expected)
        assert (copy.dtype, copy.stride(), copy.device.type) == (expected.dtype, expected.stride(), "cpu")
        copy.zero_()
    assert made.abs().min() > 0


@pytest.mark.usefixtures("planner_in_process")
def test_a_plan_for_more_memory_is_tried_first_and_corrected(tmp_path):
    model, optimizer = make()
    with fit(model, optimizer, IDS, loss_of) as fitted:
        (tmp_path / "plan.json").write_text(json.dumps(fitted.plan))
    whole = fitted.plan["fitted"]["peak_device_bytes"]
    model, optimizer = make()
    plan = tmp_path / "plan.json"
    with fit(model, optimizer, IDS, loss_of, plan=plan, gpu_budget=whole + 2**20) as again:
        assert again.plan["execute"] == fitted.plan["execute"]
        assert again.plan["fitted"]["plans"] == 1
    with fit(model, optimizer, IDS, loss_of, plan=plan, gpu_budget=round(0.8 * whole)) as smaller:
        assert smaller.plan["fitted"]["plans"] > 1
        assert smaller.plan["fitted"]["peak_device_bytes"] <= 0.8 * whole
    with pytest.raises(ValueError, match="predicts nothing"):
        fit(model, optimizer, IDS, loss_of, plan={"execute": {}})


def fitted_under(nth, monkeypatch, budget):
    """Fit with a failing n-th operation of the trials; return the losses of training, the plan and the count."""
    model, optimizer = make()
    with (
        failing_trials(nth, monkeypatch) as failing,
        fit(model, optimizer, IDS, loss_of, gpu_budget=budget) as fitted,
    ):
        pass
    with apply_plan(model, optimizer, fitted.plan) as applied:
        return train(model, applied.optimizer), fitted.plan, failing.done


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.parametrize(
    "share",
    [0.3, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 0.15, 0.45, 0.6, 0.75, 0.95))],
)
def test_an_attempt_without_memory_is_repeated_as_if_it_had_not_been(share, monkeypatch):
    budget = round(1.2 * whole_peak())
    expected, undisturbed, visits = fitted_under(-1, monkeypatch, budget)
    nth = 1 + int(share * visits)
    found, plan, done = fitted_under(nth, monkeypatch, budget)
    assert done >= nth, "the operation was not reached"
    assert all(same(*each) for each in zip(expected, found, strict=True))
    assert plan["fitted"]["peak_device_bytes"] <= budget
    assert plan["fitted"]["plans"] == undisturbed["fitted"]["plans"] + 1
    assert host_book.live_bytes == 0


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.integers(2, 5),
    hidden=st.sampled_from([32, 64, 96]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    share=st.floats(0.15, 1.3),
)
def test_no_budget_is_ever_exceeded(planner_in_process, layers, hidden, dtype, share):
    options = {"layers": layers, "hidden": hidden, "dtype": dtype}
    model, optimizer = make(**options)
    budget = round(share * whole_peak(**options))
    before = [param.clone() for param in model.parameters()]
    try:
        with fit(model, optimizer, IDS, loss_of, gpu_budget=budget) as fitted:
            pass
    except FitError:
        assert share < 0.8
    else:
        assert fitted.plan["fitted"]["peak_device_bytes"] <= budget
        assert peak_of(fitted.plan, **options) <= budget
    assert same(before, list(model.parameters()))
    assert host_book.live_bytes == 0


@pytest.mark.usefixtures("planner_in_process")
def test_the_twin_takes_what_is_predicted_where_gradients_of_the_cpus_share_have_left():
    options = {"hidden": 128, "layers": 4, "dtype": torch.bfloat16}
    model, optimizer = make(**options)
    with fit(model, optimizer, IDS[:1, :8], loss_of, gpu_budget=round(0.7 * whole_peak(**options))) as fitted:
        assert fitted.plan["execute"]["optimizer"]["split"]["cpu"] > 0.1
        predicted = fitted.plan["recommendation"]["option"]["memory"]["allocated_bytes"]
        # A parameter that is split is updated before the others; the plan counts it with them.
        assert fitted.plan["fitted"]["peak_device_bytes"] == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("planner_in_process")
def test_adapters_are_fitted_with_their_frozen_base():
    model, _ = make(layers=6, hidden=96)
    add_lora(model, 4)
    model.head.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    with fit(model, torch.optim.AdamW(trained), IDS, loss_of) as fitted:
        described = fitted.plan["model"]
        predicted = fitted.plan["recommendation"]["option"]["memory"]["allocated_bytes"]
        assert described["adapter"] == {"rank": 4, "parameters": sum(param.numel() for param in trained)}
        assert fitted.plan["fitted"]["peak_device_bytes"] == pytest.approx(predicted, rel=0.05)


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_which_some_weights_are_frozen_is_offloaded_too(dtype):
    """Unlike adapters it has most of its states."""

    def frozen():
        torch.manual_seed(0)
        model = Model(dtype=dtype)
        for module in (model.embedding, model.layers[0]):
            module.requires_grad_(False)
        return model, [param for param in model.parameters() if param.requires_grad]

    model, trained = frozen()
    plain = {"execute": {"optimizer": {"offload_fraction": 0.0}}}
    device = Device.of("cpu")
    with Ledger(device, track=[*model.parameters(), *model.buffers(), IDS]) as ledger:
        with apply_plan(model, torch.optim.AdamW(trained), plan=plain) as applied:
            expected = train(model, applied.optimizer)
        budget = round(0.6 * ledger.peak_device_bytes)
    model, trained = frozen()
    with fit(model, torch.optim.AdamW(trained), IDS, loss_of, gpu_budget=budget) as fitted:
        predicted = fitted.plan["recommendation"]["option"]["memory"]["allocated_bytes"]
        assert "optimizer-offload" in fitted.plan["recommendation"]["option"]["mechanisms"]
        assert fitted.plan["fitted"]["peak_device_bytes"] == pytest.approx(predicted, rel=0.06)
        assert all(same(*each) for each in zip(expected, train(model, fitted.optimizer), strict=True))


@pytest.mark.usefixtures("planner_in_process")
def test_a_trained_scalar_and_a_table_of_another_dtype_are_no_obstacle():
    model, _ = make()
    model.embedding.requires_grad_(requires_grad=False).double()
    model.embedding.register_forward_hook(lambda _, args, out: out.float())
    model.scale = torch.nn.Parameter(torch.tensor(1.0))

    def scaled(model, ids):
        return model.scale * loss_of(model, ids)

    trained = [param for param in model.parameters() if param.requires_grad]
    with fit(model, torch.optim.AdamW(trained), IDS, scaled) as fitted:
        fitted.loss(model, IDS).backward()
        fitted.optimizer.step()
    assert model.scale != 1


@pytest.mark.usefixtures("planner_in_process")
def test_buffers_have_room_beside_the_plan(caplog):
    caplog.set_level("INFO", "reference_impl.fitting")
    model, optimizer = make()
    budget = round(0.7 * whole_peak())
    mask_bytes = budget // 3
    model.register_buffer("mask", torch.zeros(mask_bytes, dtype=torch.uint8))
    with fit(model, optimizer, IDS, loss_of, gpu_budget=budget + mask_bytes) as fitted:
        assert fitted.plan["fitted"]["peak_device_bytes"] > 0.8 * budget + mask_bytes
    assert "too little device memory" not in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("planner_in_process")
def test_states_are_rounded_only_with_the_users_word():
    model, optimizer = make(hidden=128, layers=4, dtype=torch.bfloat16)
    elements = sum(param.numel() for param in model.parameters())
    # Exact states have no room on the host, compact ones have.
    budgets = {"gpu_budget": 14 * elements, "host_budget": 4 * elements}
    with pytest.raises(FitError, match="nothing fits"):
        fit(model, optimizer, IDS, loss_of, **budgets)
    with fit(model, optimizer, IDS, loss_of, allow_other_numerics=True, **budgets) as fitted:
        assert fitted.plan["execute"]["optimizer"]["streamed_states"].startswith("compact")
        assert "streamed as compact" in fitted.summary
        losses, _ = train(model, fitted.optimizer)
        assert losses.isfinite().all()


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False])
def test_a_machine_that_refuses_to_pin_gets_a_plan_that_pins_less(is_known, monkeypatch):
    def refuse(device, memory):
        raise PinningError("0.01 GiB are too much")

    options = {"hidden": 96, "layers": 8, "dtype": torch.bfloat16}
    budget = round(0.8 * whole_peak(**options))
    monkeypatch.setattr(CpuTwin, "pin", refuse)
    model, optimizer = make(**options)
    words = {"pinned_budget": 4096} if is_known else {}
    with fit(model, optimizer, IDS, loss_of, gpu_budget=budget, **words) as fitted:
        assert fitted.plan["fitted"]["plans"] == (1 if is_known else 2)
        assert fitted.plan["fitted"]["peak_device_bytes"] <= budget
        losses, _ = train(model, fitted.optimizer)
        assert losses.isfinite().all()


def lean(model, ids):
    """The loss in chunks of 32 tokens."""
    kept = []
    handle = model.head.register_forward_pre_hook(lambda _, args: kept.append(args[0]) or (args[0][:, :0],))
    try:
        model(ids)
    finally:
        handle.remove()
    return chunked_cross_entropy(model.head, kept[0], ids, chunk_tokens=32)


@pytest.mark.slow
@pytest.mark.usefixtures("planner_in_process")
def test_of_several_losses_the_fastest_that_fits_is_taken(monkeypatch):
    def made():
        torch.manual_seed(0)
        model = Decoder(DecoderShape(hidden=64, ffn=128, layers=3, vocab=8192))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = made()
    with fit(model, optimizer, IDS, [lean, loss_of]) as fitted:
        assert fitted.loss is loss_of
        assert fitted.plan["fitted"]["loss"] == 1
        whole = fitted.plan["fitted"]["peak_device_bytes"]
    model, optimizer = made()
    with pytest.raises(FitError, match="nothing fits"):
        fit(model, optimizer, IDS, loss_of, gpu_budget=round(0.45 * whole))
    with fit(model, optimizer, IDS, [loss_of, lean], gpu_budget=round(0.45 * whole)) as fitted:
        assert fitted.loss is lean
        assert fitted.plan["fitted"]["loss"] == 1
        assert fitted.plan["fitted"]["peak_device_bytes"] <= 0.45 * whole
        assert fitted.summary.endswith("; loss 1 of those given")
        assert_follows(fitted.plan, "plan")
        fitted.loss(model, IDS).backward()
        fitted.optimizer.step()


@pytest.mark.slow
@pytest.mark.usefixtures("planner_in_process")
def test_random_numbers_that_a_trace_takes_are_not_missing_later():
    def noisy(model, ids):
        return loss_of(model, ids) * (1 + random.random() + torch.rand(()).item())

    model, optimizer = make()
    states = torch.get_rng_state(), random.getstate()
    with fit(model, optimizer, IDS, noisy):
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]


@pytest.mark.usefixtures("planner_in_process")
def test_a_norm_of_zero_clips_nothing_to_the_bit():
    budget, found = round(0.8 * whole_peak()), []
    for max_grad_norm in (None, 0, 0.0):
        model, optimizer = make()
        with fit(model, optimizer, IDS, loss_of, gpu_budget=budget, max_grad_norm=max_grad_norm) as fitted:
            found.append(train(model, fitted.optimizer))
    assert all(same(*each) for other in found[1:] for each in zip(found[0], other, strict=True))
