# SPDX-License-Identifier: Apache-2.0
"""An untraceable model is planned by the formula if that describes it, and is refused otherwise."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from reference_impl import fit
from reference_impl.fitting import FitError
from reference_impl.fitting.planner import formula_parameters
from reference_impl.verification.model import Decoder, DecoderShape

IDS = torch.arange(4 * 64).reshape(4, 64) % 300


class Questions(Decoder):
    """Asks for a value, which a trace does not have."""

    def __init__(self):
        super().__init__(DecoderShape(hidden=64, ffn=128, layers=3, vocab=300))

    def forward(self, ids):
        assert int(ids.max()) < 300
        return super().forward(ids)


def loss_of(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def questions(**entries):
    """A model that cannot be traced, with a config.json of these entries."""
    model = Questions()
    model.config = SimpleNamespace(to_json_string=lambda use_diff: json.dumps(entries))
    return model, torch.optim.AdamW(model.parameters())


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.parametrize("layers", [3, 4])
def test_a_model_that_cannot_be_traced_is_planned_by_the_formula_of_its_config(caplog, layers):
    model, optimizer = questions(**LLAMA | {"num_hidden_layers": layers})
    counted = formula_parameters(LLAMA | {"num_hidden_layers": layers})
    off = max(0.08, abs(sum(p.numel() for p in model.parameters()) / counted - 1))
    assert (off > 0.08) == (layers == 4)
    with fit(model, optimizer, IDS, loss_of) as fitted:
        assert "traced" not in fitted.plan["model"]
    assert f"may be off by {round(100 * off)} %" in caplog.text


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.parametrize(
    "entries",
    [
        pytest.param(LLAMA | {"num_hidden_layers": 12}, id="layers that share their weights"),
        pytest.param({"model_type": "encodec", "num_layers": 3}, id="no decoder"),
    ],
)
def test_what_cannot_be_traced_and_no_formula_describes_is_refused(entries):
    model, optimizer = questions(**entries)
    with pytest.raises(FitError, match=r"Questions cannot be traced: the forward asks .*its weights take"):
        fit(model, optimizer, IDS, loss_of)
