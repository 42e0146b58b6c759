# SPDX-License-Identifier: Apache-2.0
"""FSDP runs with published GPU memory, each within 15 %, and plans of such settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.dialects import parameters
from skill_tools.dialects.assumptions import Assumption
from skill_tools.dialects.sharding import Sharding, precision_of
from skill_tools.planning.model import known_models

GIB, GB = 1 << 30, 10**9
TUNED = """\
base_model: {model}
sequence_len: {tokens}
micro_batch_size: {sequences}
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: true
{more}
fsdp_version: 2
fsdp_config:
  offload_params: {offloads}
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: SomeDecoderLayer
  reshard_after_forward: true
  activation_checkpointing: {checkpoints}
"""
CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]"
QLORA = "adapter: qlora\nload_in_4bit: true\nlora_target_linear: true\nlora_r: {}"
OFFLOADED = f"gradient_checkpointing: true\nactivation_offloading: true\n{CUT}"
Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Answer:
    def ask(model: str, gpus: int, more: str, **options: object) -> dict[str, Any]:
        given = {"tokens": 4096, "sequences": 1, "offloads": "true", "checkpoints": "false"} | options
        path = tmp_path / "run.yaml"
        path.write_text(TUNED.format(model=model, more=more, **given), encoding="utf-8")
        main(["plan", str(path), "--gpu", "h100", "--gpus", str(gpus), "--format", "json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return ask


def bytes_of(found: dict[str, Any]) -> dict[str, int]:
    return {line["name"]: line["bytes"] for line in found["as_it_is"]["memory"]["gpu"]}


@pytest.mark.parametrize(
    ("model", "gpus", "published_gib"), [("openai/gpt-oss-20b", 2, 21), ("openai/gpt-oss-120b", 8, 49)]
)
def test_whole_models_whose_shards_are_on_the_host(
    model: str, gpus: int, published_gib: float, as_it_is: Answer
) -> None:
    """Axolotl's examples: `device_mem_reserved` of full fine-tuning with FSDP2's CPU offload, 4,096 tokens."""
    found = as_it_is(model, gpus, OFFLOADED)["as_it_is"]["memory"]
    assert found["device_bytes"] / GIB == pytest.approx(published_gib, rel=0.05)


def test_a_4_bit_base_on_the_host(as_it_is: Answer) -> None:
    """Llama 3 70B, QLoRA, 3,072 tokens, FSDP with CPU offload: 21 GB of cards with 24."""
    more = f"{QLORA.format(16)}\ngradient_checkpointing: true"
    found = as_it_is("meta-llama/Meta-Llama-3-70B", 4, more, tokens=3072)
    assert found["as_it_is"]["memory"]["device_bytes"] / GB == pytest.approx(21, rel=0.15)
    host = {line["name"] for line in found["as_it_is"]["memory"]["host_per_rank"]}
    assert host >= {"base weights", "adapter weights and states"}


def test_a_4_bit_base_in_shards(as_it_is: Answer) -> None:
    """Llama 4 Scout with experts made linear layers, QLoRA, 2 x 4,096 tokens on four GPUs, FSDP2: 62.8 GB."""
    found = as_it_is(
        "meta-llama/Llama-4-Scout-17B-16E",
        4,
        f"{QLORA.format(32)}\nllama4_linearized_experts: true",
        sequences=2,
        offloads="false",
        checkpoints="true",
    )
    assert found["as_it_is"]["memory"]["device_bytes"] / GB == pytest.approx(62.8, rel=0.10)
    shape = known_models.shape("llama-4-scout")
    ends = 2 * shape.vocab * shape.hidden
    packed = 0.53 * (parameters.model(shape).total - ends) / shape.num_layers
    assert bytes_of(found)["gathered layers"] == pytest.approx(2 * packed, rel=1e-3)


def test_a_vision_tower_is_in_the_root_group_unless_a_text_model_is_loaded(as_it_is: Answer) -> None:
    tower = 871_932_416  # 108,641,793,536 parameters of the published model, less those of its decoder
    more, model = QLORA.format(32), "meta-llama/Llama-4-Scout-17B-16E"
    whole, text = (
        bytes_of(as_it_is(model, 4, f"{more}\nmodel_type: Llama4For{each}", offloads="false"))
        for each in ("ConditionalGeneration", "CausalLM")
    )
    assert whole["vision tower"] == pytest.approx(2 * tower / 4)
    root, alone = (found["gathered embedding and head"] for found in (whole, text))
    assert root - alone == 2 * tower
    assert "vision tower" not in text
    assert whole["base weights"] == text["base weights"]


def test_a_vision_tower_that_sees_no_image_has_no_gradients_and_no_states(as_it_is: Answer) -> None:
    whole, text = (
        bytes_of(as_it_is("google/gemma-3-4b-it", 8, f"model_type: {each}", offloads="false"))
        for each in ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM")
    )
    assert whole["vision tower"] == pytest.approx(4 * 419_816_304 / 8)  # full fine-tuning shards fp32
    assert (whole["gradients"], whole["moments"]) == (text["gradients"], text["moments"])


def test_fsdp_s_own_checkpointing_recomputes(as_it_is: Answer) -> None:
    kept, recomputed = (
        bytes_of(as_it_is("meta-llama/Llama-3.1-8B", 8, CUT, checkpoints=each))["activations"]
        for each in ("false", "true")
    )
    assert recomputed < kept / 10


def test_embedding_and_head_are_not_quantized(as_it_is: Answer) -> None:
    shape = known_models.shape("llama-3-70b")
    found = bytes_of(as_it_is("meta-llama/Meta-Llama-3-70B", 8, QLORA.format(16), offloads="false"))
    ends = 2 * shape.vocab * shape.hidden
    whole = parameters.model(shape).total
    assert found["base weights"] == pytest.approx((0.53 * (whole - ends) + 2 * ends) / 8, rel=1e-6)


def test_gradients_and_states_are_those_of_what_is_unfrozen(as_it_is: Answer) -> None:
    shape = known_models.shape("llama-3-8b")
    head = shape.vocab * shape.hidden
    more = f"{CUT}\nunfrozen_parameters: [^lm_head.weight$]"
    found = bytes_of(as_it_is("meta-llama/Llama-3.1-8B", 8, more, offloads="false"))
    assert found["moments"] == pytest.approx(8 * head / 8, rel=1e-3)
    assert found["gradients"] == pytest.approx(4 * head / 8, rel=1e-3)


def test_layers_before_what_is_unfrozen_save_nothing_unless_they_are_checkpointed(as_it_is: Answer) -> None:
    def saved(entries: str, **options: object) -> int:
        more = f"{CUT}\nunfrozen_parameters: {entries}"
        return bytes_of(as_it_is("meta-llama/Llama-3.1-8B", 8, more, offloads="false", **options)).get(
            "activations", 0
        )

    everything = saved("[^model.embed_tokens.weight$]")
    assert saved('["model.layers.2[4-9].mlp", "model.layers.3[01].mlp"]') == pytest.approx(
        everything / 4, rel=0.02
    )
    assert saved("[^lm_head.weight$]") < everything / 500  # the final norm's
    # Checkpointing has the embedding's result require gradients, so all layers keep their input.
    assert saved("[^lm_head.weight$]", checkpoints="true") == saved(
        "[^model.embed_tokens.weight$]", checkpoints="true"
    )


@pytest.mark.parametrize(
    ("optimizer", "whole", "sharded"),
    [
        ("adamw_torch_fused", 4, 8),
        ("adamw_bnb_8bit", 2, 2),
        ("paged_adamw_8bit", 2, 2),
        ("paged_adamw_32bit", 8, 8),
        ("adamw_torch_4bit", 1, 1),
        ("muon", 2, 4),
        ("lion_32bit", 4, 4),
        ("lion_8bit", 1, 1),
        ("adafactor", 0.1, 0.1),
    ],
)
def test_states_have_the_bytes_of_their_optimizer(optimizer: str, whole: float, sharded: float) -> None:
    """Two moments in the weights' dtype, bf16 or of shards fp32, unless the name says fewer or smaller ones."""
    said: list[Assumption] = []
    assert precision_of(Sharding(), optimizer, said, adapted=False).moments_bytes == whole
    assert precision_of(Sharding(3), optimizer, said, adapted=False).moments_bytes == sharded
    assert any("paged states" in each.text for each in said) == optimizer.startswith("paged")
