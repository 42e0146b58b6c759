"""`fit` settles on a plan that holds, and leaves nothing of how it came there."""

import json
import random

import jsonschema
import pytest
import torch
from failing_trials import failing_trials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from reference_impl import apply_plan, fit
from reference_impl.device import Device
from reference_impl.device.cpu_twin import CpuTwin
from reference_impl.fitting import FitError
from reference_impl.fitting.before import copies_on_host
from reference_impl.memory import slab
from reference_impl.memory.host import HostMemoryError, host_book
from reference_impl.memory.ledger import Ledger
from reference_impl.trained_layers import chunked_cross_entropy
from reference_impl.verification.model import Decoder, DecoderShape, add_lora
from skill_tools.bundle import schema_path

IDS = torch.arange(4 * 64).reshape(4, 64) % 300


class Model(Decoder):
    """Random numbers in forward, and a buffer that training changes."""

    def __init__(self, layers=3, hidden=64, dtype=torch.float32):
        super().__init__(DecoderShape(hidden=hidden, ffn=2 * hidden, layers=layers, vocab=300))
        self.to(dtype)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids):
        self.calls.add_(1)
        return functional.dropout(super().forward(ids), 0.1, training=True)


def loss_of(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def make(**options):
    torch.manual_seed(0)
    model = Model(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def train(model, optimizer, steps=3):
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        losses.append(loss_of(model, IDS))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    getattr(optimizer, "synchronize", lambda: None)()
    return torch.stack(losses).detach(), [param.detach().clone() for param in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def peak_of(plan, **options):
    """The most bytes of a training under `plan` that nobody limits."""
    model, optimizer = make(**options)
    device = Device.of("cpu")
    with Ledger(device, track=[*model.parameters(), *model.buffers(), IDS]) as ledger:
        with apply_plan(model, optimizer, plan) as applied:
            train(model, applied.optimizer)
        return ledger.peak_device_bytes


def whole_peak(**options):
    """The peak where nothing is offloaded."""
    return peak_of({"execute": {"optimizer": {"offload_fraction": 0.0}}}, **options)


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
    jsonschema.validate(fitted.plan, json.loads(schema_path("plan").read_text()))
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
def test_a_host_without_room_for_a_copy_of_the_weights_says_so_first(monkeypatch):
    model, optimizer = make()
    train(model, optimizer)
    weights, calls = [param.detach().clone() for param in model.parameters()], model.calls.clone()
    states = [value for state in optimizer.state.values() for value in state.values()]
    reserved = host_book.reserved_bytes
    with monkeypatch.context() as patched:
        patched.setattr(slab, "available_bytes", lambda *_: slab.RESERVE_BYTES + 1000)
        with pytest.raises(HostMemoryError, match="fit holds a copy of the trained weights"):
            fit(model, optimizer, IDS, loss_of)
    assert same([*model.parameters(), model.calls], [*weights, calls])
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert all(one is other for one, other in zip(states, kept, strict=True))
    assert host_book.reserved_bytes == reserved
    with fit(model, optimizer, IDS, loss_of) as fitted:
        train(model, fitted.optimizer)


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
    """Fit where the n-th operation of the trials fails; return what training then gives, the plan and the count."""
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
        raise RuntimeError("cudaHostRegister of 0.01 GiB failed with code 2; expected 0")

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


class Questions(Model):
    def forward(self, ids):
        out = super().forward(ids)
        return out if out.detach().sum().item() > 1e9 else 2 * out


class Silent(Model):
    def forward(self, ids):
        super().forward(ids)


class Checkpointed(Model):
    is_gradient_checkpointing = True


class Shared(Model):
    def __init__(self):
        super().__init__()
        self.layers[1] = self.layers[0]


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept.update(model=Questions()), "asks for the value"),
        (lambda kept: kept.update(model=Shared()), "5 blocks of Shared have 3 backwards"),
        (lambda kept: kept.update(model=nn.Embedding(300, 300)), "no nn.ModuleList"),
        (lambda kept: kept.update(batch=(IDS,), loss=None), "the batch is tuple"),
        (lambda kept: kept.update(batch={}), "holds no tensor"),
        (
            lambda kept: kept.update(model=Checkpointed()),
            "Checkpointed has gradient_checkpointing switched on",
        ),
        (lambda kept: kept.update(gpu_budget=-1), "gpu_budget is -1"),
        (lambda kept: kept.update(host_budget="much"), "host_budget is 'much'"),
        (lambda kept: kept.update(pinned_budget=0), "pinned_budget is 0"),
        (lambda kept: kept.update(gpu_budget="24GiB"), "gpu_budget is '24GiB'; expected bytes above zero"),
        (
            lambda kept: kept.update(gpu_budget=1000),
            "nothing fits 1,000 bytes: .* at least [0-9.]+ MiB a GPU .*optimizer offload 100%",
        ),
        (lambda kept: kept.update(model=kept["model"].to("meta")), "Model is on meta"),
        (lambda kept: kept.update(batch=IDS.to("meta")), "batch is on meta, and the model runs on cpu"),
        (lambda kept: kept.update(batch={"ids": IDS.to("meta")}), "batch is on meta"),
        (lambda kept: kept.update(device="gpu"), "device is 'gpu'; expected a torch device"),
        (lambda kept: kept.update(max_grad_norm=-1.0), "max_grad_norm is -1.0"),
        (lambda kept: kept.update(max_grad_norm=float("nan")), "max_grad_norm is nan"),
        (lambda kept: kept.update(loss="mean"), "loss is 'mean'; expected loss"),
        (lambda kept: kept.update(loss=[]), r"loss is \[\]"),
        (lambda kept: kept.update(loss=lambda model, ids: model(ids)), r"a tensor of shape \(4, 64, 300\)"),
        (lambda kept: kept.update(loss=lambda model, ids: 1.0), "the loss returned float; expected a scalar"),
        (lambda kept: kept.update(loss=lambda *given: loss_of(*given).detach()), "requires no gradient"),
        (lambda kept: kept.update(model=Silent(), loss=None), "returned NoneType without a loss"),
        (
            lambda kept: kept.update(kind=lambda *_, **__: torch.optim.AdamW(make()[0].parameters())),
            "24 parameters that Model has not, one of shape",
        ),
        (lambda kept: kept.update(kind=torch.optim.SGD), "SGD"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_a_sentence_and_nothing_has_changed(change, said):
    kept = {"model": make()[0], "batch": IDS, "loss": loss_of, "kind": torch.optim.AdamW}
    change(kept)
    model, batch, loss = kept.pop("model"), kept.pop("batch"), kept.pop("loss")
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=said):
        fit(model, kept.pop("kind")(model.parameters(), lr=0.1), batch, loss, **kept)
    # Tensors on meta have no values to compare.
    assert before[0].is_meta or same(before, model.parameters())


PREDICTED = {
    "label": "no offload",
    "mechanisms": [],
    "memory": {"allocated_bytes": 1, "host_bytes_per_node": 0, "pinned_bytes_per_node": 0},
    "time": {"step_s": 1.0, "least_s": 0.5},
}


@pytest.mark.parametrize(
    ("recommendation", "named"),
    [
        (5, "recommendation is 5; expected an object"),
        ({"option": "the first"}, "recommendation.option is 'the first'"),
        ({"option": PREDICTED | {"label": None}}, "recommendation.option.label is None; expected a string"),
        ({"option": PREDICTED | {"mechanisms": "all"}}, "mechanisms is 'all'; expected a list of strings"),
        ({"option": PREDICTED | {"memory": []}}, r"option.memory is \[\]; expected an object"),
        ({"option": PREDICTED | {"time": {"step_s": 1.0}}}, "option.time.least_s is None; expected a number"),
    ],
)
def test_a_plan_whose_prediction_cannot_be_read_is_refused(recommendation, named):
    model, optimizer = make()
    with pytest.raises(ValueError, match=named):
        fit(model, optimizer, IDS, loss_of, plan={"recommendation": recommendation, "execute": {}})


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
        jsonschema.validate(fitted.plan, json.loads(schema_path("plan").read_text()))
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


def test_a_norm_of_zero_clips_nothing_to_the_bit():
    found = []
    for max_grad_norm in (None, 0, 0.0):
        model, optimizer = make()
        budget = round(0.8 * whole_peak())
        with fit(model, optimizer, IDS, loss_of, gpu_budget=budget, max_grad_norm=max_grad_norm) as fitted:
            found.append(train(model, fitted.optimizer))
    assert all(same(*each) for other in found[1:] for each in zip(found[0], other, strict=True))
