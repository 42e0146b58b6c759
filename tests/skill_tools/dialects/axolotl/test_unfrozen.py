# SPDX-License-Identifier: Apache-2.0
import pytest

from skill_tools.dialects import parameters
from skill_tools.dialects.axolotl import unfrozen
from skill_tools.planning.model import known_models


class Settings:
    """A configuration that has one key."""

    def __init__(self, written):
        self.written = written

    def value(self, key):
        return self.written if key == "unfrozen_parameters" else None


def share(written, model="mixtral-8x22b"):
    said = []
    return unfrozen.trained(Settings(written), known_models.shape(model), said).share, said


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "llama-3.2-1b"])
def test_the_tensors_are_the_model(model):
    shape = known_models.shape(model)
    assert sum(size for _, size in unfrozen.tensors(shape)) == pytest.approx(
        parameters.model(shape).total, rel=1e-3
    )


def test_entries_match_the_beginning_of_names_and_a_dot_is_a_dot():
    shape = known_models.shape("llama-3-8b")
    whole = parameters.model(shape).total
    table, mlp = shape.vocab * shape.hidden, 3 * shape.hidden * shape.ffn
    assert share(["^lm_head.weight$"], "llama-3-8b")[0] == pytest.approx(table / whole)
    assert share(["^model.embed_tokens.weight$[:32000]"], "llama-3-8b")[0] == pytest.approx(table / whole)
    assert share(["model.layers.3[01].mlp"], "llama-3-8b")[0] == pytest.approx(2 * mlp / whole)
    assert share("model.layers.2[0-9]+.mlp.gate_proj", "llama-3-8b")[0] == pytest.approx(10 * mlp / 3 / whole)


def test_a_mixture_s_experts_go_by_their_model_s_name():
    shape = known_models.shape("mixtral-8x7b")
    experts = 3 * shape.experts * shape.hidden * shape.moe_ffn
    found, said = share(["model.layers.3[01]+.block_sparse_moe.experts"], "mixtral-8x7b")
    assert found == pytest.approx(2 * experts / parameters.model(shape).total)
    assert "of the weights to be trained" in said[0].text


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        (["^lm_head.weight$"], 32),
        (["^lm_head.weight$", "model.layers.3[01].mlp"], 30),
        (["model.layers.3[01].mlp", "^model.embed_tokens.weight$[:32000]"], 0),
        (["model.layers.[0-9]+.self_attn"], 0),
    ],
)
def test_the_layers_before_all_that_is_trained_are_counted(written, layers):
    said = []
    found = unfrozen.trained(Settings(written), known_models.shape("llama-3-8b"), said)
    assert found.layers_without == layers
    assert (f"the {layers} layers before them save nothing" in said[0].text) == (layers > 0)


@pytest.mark.parametrize("written", [["(a+)+$"], ["model.layers.["], ["nothing.of.it"], ["x" * 300], [3.5]])
def test_what_is_not_understood_trains_everything_and_says_so(written):
    found, said = share(written, "llama-3-8b")
    assert found == 1.0
    assert "is not understood" in said[0].text


def test_no_entry_trains_everything_without_a_word():
    assert share(None, "llama-3-8b") == (1.0, [])
