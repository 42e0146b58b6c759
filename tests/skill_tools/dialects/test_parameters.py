# SPDX-License-Identifier: Apache-2.0
import pytest
from for_each import for_each

from skill_tools.dialects import parameters
from skill_tools.planning.model import known_models


@for_each(known_models.entries())
def test_counted_parameters_are_the_published_total(name: str) -> None:
    published = known_models.entries()[name]["parameters"]
    assert parameters.model(known_models.shape(name)).total == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "active"),
    [("qwen3-30b-a3b", 3.3e9), ("qwen3-235b-a22b", 22e9), ("mixtral-8x7b", 12.9e9), ("deepseek-v3", 37.5e9)],
)
def test_active_parameters_are_those_the_model_is_named_for(name: str, active: float) -> None:
    assert parameters.active(known_models.shape(name)) == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("qwen3_30b_a3b_pretrain_config", "qwen3-30b-a3b"),
        ("NousResearch/Llama-2-7b-hf", "llama-2-7b"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "llama-3.1-405b"),
        ("llama32_1b_finetune", "llama-3.2-1b"),
        ("axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16", "llama-4-scout"),
    ],
)
def test_a_model_is_found_by_its_hub_id_recipe_or_path(written: str, name: str) -> None:
    assert known_models.find(written) == name


@pytest.mark.parametrize(
    "written", ["Qwen/Qwen3-Omni-30B-A3B", "deepseek-ai/DeepSeek-V3.2-Exp", "google/gemma-4-31B", "gpt2"]
)
def test_a_model_that_only_looks_similar_is_not_found(written: str) -> None:
    assert known_models.find(written) is None
