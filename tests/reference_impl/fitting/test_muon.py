# SPDX-License-Identifier: Apache-2.0
"""`fit` and `apply_plan` with Muon: bitwise torch's Muon and AdamW over fp32 masters, within the budget."""

import copy

import pytest
import torch
from schemas import assert_follows
from torch import nn
from torch.nn import functional

from reference_impl import OptimizerStateOffloader, apply_plan, fit
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.model import Decoder, DecoderShape

CHUNK_BYTES = 32 * 1024
pytestmark = pytest.mark.usefixtures("planner_in_process", "small_chunks")

IDS = torch.arange(2 * 32).reshape(2, 32) % 100
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few matrices, in the planner too: by default one holds a toy as a whole, and nothing is gained."""
    monkeypatch.setitem(OptimizerStateOffloader.__init__.__kwdefaults__, "chunk_bytes", CHUNK_BYTES)
    for module in ("offload_arithmetic.sizes", "skill_tools.planning.cost.optimizer"):
        monkeypatch.setattr(f"{module}.STATE_CHUNK_BYTES", CHUNK_BYTES)


def loss_of(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def made(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Decoder(DecoderShape(hidden=64, ffn=160, layers=4, vocab=100)).to(dtype)


def two(model, **adamw):
    """Return Muon of the blocks' matrices and AdamW of all else."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.add(id(model.head.weight))
    whole = [param for param in model.parameters() if param.dim() == 2 and id(param) not in tables]
    chosen = set(map(id, whole))
    rest = [param for param in model.parameters() if id(param) not in chosen]
    return [torch.optim.Muon(whole, **MUON), torch.optim.AdamW(rest, **{**ADAMW, **adamw})]


def train(model, optimizer, steps=3):
    for _ in range(steps):
        loss_of(model, IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    getattr(optimizer, "synchronize", lambda: None)()
    return [param.detach().clone() for param in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def resident(steps=3):
    """Weights and peak where nothing leaves."""
    model = made()
    plan = {"execute": {"optimizer": {"formula": "muon", "offload_fraction": 0.0}}}
    with Ledger(Device.of("cpu"), track=[*model.parameters(), IDS]) as ledger:
        with apply_plan(model, two(model), plan) as applied:
            weights = train(model, applied.optimizer, steps)
        return weights, ledger.peak_device_bytes


def test_it_settles_on_a_plan_that_streams_both_parts_to_the_same_weights():
    expected, peak_bytes = resident()
    model = made()
    given = two(model, fused=None)
    schedulers = [torch.optim.lr_scheduler.ConstantLR(each, factor=1.0) for each in given]
    budget = round(0.8 * peak_bytes)
    with fit(model, given, IDS, loss_of, gpu_budget=budget) as fitted:
        assert isinstance(fitted.optimizer, OptimizerStateOffloader)
        assert_follows(fitted.plan, "plan")
        found = fitted.plan["execute"]["optimizer"]
        assert found["formula"] == "muon"
        assert found["offload_fraction"] > 0
        assert fitted.plan["fitted"]["peak_device_bytes"] <= budget
        for scheduler in schedulers:
            scheduler.step()
        assert same(train(model, fitted.optimizer), expected)
    assert given[1].param_groups[0]["fused"] is None
    for each in given:
        each.step()


def test_a_plan_predicts_the_peak():
    """Of one that streams everything, on the CPU twin."""
    _, peak_bytes = resident()
    model = made()
    with fit(model, two(model), IDS, loss_of, gpu_budget=round(0.7 * peak_bytes)) as fitted:
        predicted = fitted.plan["recommendation"]["option"]["memory"]["allocated_bytes"]
        assert fitted.plan["fitted"]["peak_device_bytes"] == pytest.approx(predicted, rel=0.1)


def test_states_are_kept_and_given_to_what_is_fitted():
    model = made()
    given = two(model)
    loss_of(model, IDS).backward()
    for each in given:
        each.step()
    states = [copy.deepcopy(each.state_dict()["state"]) for each in given]
    model.zero_grad()
    with fit(model, given, IDS, loss_of) as fitted:
        for before, after in zip(states, fitted.optimizer.state_dicts(), strict=True):
            for key, state in before.items():
                for name, value in state.items():
                    assert torch.equal(value.float(), after["state"][key][name].float()), (key, name)


@pytest.mark.parametrize(
    ("optimizers", "execute", "says"),
    [
        (lambda m: torch.optim.AdamW(m.parameters()), {"formula": "muon"}, "the plan is for Muon; got AdamW"),
        (two, {"split": {"streamed": 1.0}}, "the plan offloads AdamW's state; got Muon, AdamW"),
        (lambda m: [torch.optim.SGD(m.parameters())], {"formula": "muon"}, "the plan is for Muon; got SGD"),
        (two, {"formula": "muon", "split": {"cpu": 1.0}}, "split"),
        (two, {"formula": "dion"}, "formula"),
    ],
    ids=["adamw", "both", "sgd", "split", "dion"],
)
def test_a_plan_for_another_optimizer_is_refused(optimizers, execute, says):
    model = made()
    with pytest.raises(ValueError, match=says):
        apply_plan(model, optimizers(model), {"execute": {"optimizer": {"offload_fraction": 1.0, **execute}}})


@pytest.mark.parametrize(
    "given", [lambda m: [], lambda m: [*two(m), two(m)[1]], lambda m: torch.optim.SGD(m.parameters())]
)
def test_what_fit_takes_is_named(given):
    model = made()
    with pytest.raises(ValueError, match=r"AdamW and of Muon.*got.*expected.*try"):
        fit(model, given(model), IDS, loss_of)


def test_a_table_that_muon_would_update_is_refused_and_nothing_is_changed():
    model = made()
    table = model.get_parameter(
        next(name for name, m in model.named_modules() if isinstance(m, nn.Embedding)) + ".weight"
    )
    muon = torch.optim.Muon([table], **MUON)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="table of an embedding"):
        fit(model, muon, IDS, loss_of)
    assert same(before, model.parameters())
    table.grad = torch.ones_like(table)
    muon.step()
