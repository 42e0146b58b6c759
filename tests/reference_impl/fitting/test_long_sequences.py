# SPDX-License-Identifier: Apache-2.0
"""`fit` of a sequence that is long beside the device finds and reports tiles and kept attention."""

import pytest
import torch
from long_decoder import LongDecoder
from schemas import assert_follows
from torch import nn
from torch.nn import functional

from reference_impl import CheckpointOffloader, SequenceTiles, fit
from reference_impl.device import Device
from reference_impl.fitting import FitError, trial
from reference_impl.verification.model import decoder_loss
from skill_tools.dialects.pytorch import candidates

TILE = 64
IDS = torch.arange(1024).reshape(1, -1) % 64
# It has no room for an MLP's tensors of all positions, but for those of its tiles.
BUDGET_BYTES = 14_000 * 2**10


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, planner_in_process):
    monkeypatch.setattr(candidates, "TILE_TOKENS", TILE)


def loss_of(model, ids):
    return decoder_loss(model(ids), ids)


def make(cls=LongDecoder):
    torch.manual_seed(0)
    model = cls(hidden=32, ffn=1024, heads=1, layers=3, vocab=64).bfloat16()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(model, optimizer):
    found = []
    for _ in range(2):
        found.append(loss_of(model, IDS))
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in found]


@pytest.mark.slow
def test_tiles_are_taken_where_nothing_else_fits_and_the_summary_says_why():
    model, optimizer = make()
    with fit(model, optimizer, IDS, loss_of, gpu_budget=BUDGET_BYTES, progress=False) as fitted:
        assert fitted.plan["execute"]["tiles"] == {"tile_tokens": TILE}
        assert fitted.plan["execute"]["activations"] == {"mode": "checkpoint", "keep_attention": True}
        assert fitted.plan["fitted"]["peak_device_bytes"] <= BUDGET_BYTES
        assert "attention kept: " in fitted.summary
        assert "without them it does not fit: GPU memory" in fitted.summary
        losses = train(model, fitted.optimizer)
    assert_follows(fitted.plan, "plan")
    # As with these mechanisms by hand.
    model, optimizer = make()
    with SequenceTiles(model, tile_tokens=TILE), CheckpointOffloader(model, keep_attention=True):
        assert train(model, optimizer) == losses


def test_where_there_is_room_nothing_runs_in_tiles():
    model, optimizer = make()
    with fit(model, optimizer, IDS, loss_of, gpu_budget=2 * BUDGET_BYTES, progress=False) as fitted:
        assert "tiles" not in fitted.plan["execute"]


class Written(nn.Module):
    """An MLP that is no module of its own: there is nothing to run in tiles."""

    def __init__(self, layer):
        super().__init__()
        self.attention, self.gate, self.up, self.down = (
            layer.attention,
            layer.mlp.gate,
            layer.mlp.up,
            layer.mlp.down,
        )
        self.attention.q_norm = self.attention.k_norm = nn.Identity()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class WrittenDecoder(LongDecoder):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.layers = nn.ModuleList(map(Written, self.layers))


class Blind(LongDecoder):
    """Without attention: there are no heads."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        for layer in self.layers:
            layer.attention = nn.Linear(32, 32)


@pytest.mark.parametrize(("cls", "without"), [(LongDecoder, set()), (Blind, {"head-groups"})])
def test_a_trial_says_which_mechanisms_have_found_no_module(cls, without):
    """Such a plan predicts the memory of another model; the search goes on without it."""
    torch.manual_seed(0)
    model = cls(hidden=32, ffn=64, heads=4, layers=2, vocab=64)
    task = trial.Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        batch=IDS,
        loss=loss_of,
        max_grad_norm=None,
        device=Device.of("cpu"),
        on_host=False,
    )
    execute = {"tiles": {"tile_tokens": TILE}, "head_groups": {"groups": 4, "longer_than": TILE}}
    found = trial.run(task, {"execute": execute}, limit_bytes=2**40)
    assert found.without_modules == without


def test_a_model_without_such_modules_is_planned_without_tiles():
    """After the first step has found none; its plan names another that fits."""
    model, optimizer = make(WrittenDecoder)
    with pytest.raises(FitError, match=r"nothing fits .*expected at least") as refused:
        fit(model, optimizer, IDS, loss_of, gpu_budget=BUDGET_BYTES, progress=False)
    assert "tiles of" not in str(refused.value)
