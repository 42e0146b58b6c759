# SPDX-License-Identifier: Apache-2.0
"""`fit` and `apply_plan` of layers that stream with Muon: bytes as planned, and the bits of states on the device."""

from functools import cache, partial

import pytest
import torch
from schemas import assert_follows
from torch import nn

from offload_arithmetic import sizes
from reference_impl import TrainableLayerStreamer, apply_plan, fit
from reference_impl.memory.host import host_book
from reference_impl.optimizers import Streaming
from reference_impl.verification import apply
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss

IDS = torch.arange(32).reshape(2, 16) % 300
SHAPE = DecoderShape(hidden=64, ffn=512, heads=4, layers=12, vocab=300)
CHUNK_BYTES = 2**17


def loss_of(model, ids):
    return decoder_loss(model(ids), ids)


def make():
    torch.manual_seed(0)
    model = Decoder(SHAPE).bfloat16()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.add(id(model.head.weight))
    whole = [param for param in model.parameters() if param.dim() == 2 and id(param) not in tables]
    chosen = set(map(id, whole))
    rest = [param for param in model.parameters() if id(param) not in chosen]
    return model, [torch.optim.Muon(whole, lr=0.02), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def train(model, optimizer, steps=2):
    for _ in range(steps):
        loss_of(model, IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, planner_in_process):
    """As small beside a layer as they are in a large model; a chunk has a matrix or some."""
    monkeypatch.setattr(sizes, "STATE_CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(apply, "Streaming", partial(Streaming, chunk_bytes=CHUNK_BYTES))
    yield
    assert host_book.live_bytes == 0


@cache
def resident():
    model, optimizers = make()
    plan = {"execute": {"optimizer": {"formula": "muon", "offload_fraction": 0.0}}}
    with apply_plan(model, optimizers, plan) as applied:
        return train(model, applied.optimizer)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"backward_overlap": "update"}, {"split": {"resident": 0.4, "streamed": 0.6}}], ids=str
)
def test_a_plan_of_streamed_layers_takes_both_optimizers(options):
    model, optimizers = make()
    plan = {"execute": {"trained_layers": {"formula": "muon", "streamed_states": "exact", **options}}}
    with apply_plan(model, optimizers, plan) as applied:
        found = train(model, applied.optimizer)
        assert any(isinstance(each, TrainableLayerStreamer) for each in applied._streamers)
    assert same(found, resident())
    with pytest.raises(ValueError, match="the plan is for Muon; got AdamW"):
        apply_plan(model, torch.optim.AdamW(model.parameters()), plan)


@pytest.mark.slow
def test_a_model_larger_than_the_device_is_fitted_from_the_host():
    model, optimizers = make()
    budget = round(1.2 * sum(param.nbytes for param in model.parameters()))
    with fit(model, optimizers, IDS, loss_of, gpu_budget=budget, device="cpu") as fitted:
        plan = fitted.plan
        assert_follows(plan, "plan")
        assert plan["execute"]["trained_layers"]["formula"] == "muon"
        assert plan["fitted"]["peak_device_bytes"] <= budget
        memory = plan["recommendation"]["option"]["memory"]
        assert plan["fitted"]["peak_device_bytes"] == pytest.approx(memory["allocated_bytes"], rel=0.1)
        found = train(model, fitted.optimizer)
    assert same(found, resident())
    planned = {line["name"]: line["bytes"] for line in memory["host_per_rank"]}
    model, optimizers = make()
    with apply_plan(model, optimizers, {"execute": plan["execute"]}) as applied:
        (streamer,) = applied._streamers
        assert planned["gradients"] == streamer.report.host.gradients
        assert planned["masters and moments"] == pytest.approx(streamer.report.host.states, rel=0.01)
