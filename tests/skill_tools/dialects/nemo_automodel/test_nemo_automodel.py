# SPDX-License-Identifier: Apache-2.0
"""Recipes of NeMo AutoModel: a file's framework, an offload policy's key, and a strategy's refused names."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

HEAD = (
    "recipe: TrainFinetuneRecipeForNextTokenPrediction\n"
    "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained}\n"
)
POLICY = "{_target_: torch.distributed.fsdp.CPUOffloadPolicy}"


def recipe(section: str) -> Config:
    return read_text(HEAD + section, "recipe.yaml")


def found(config: Config, release: str = "0.7.0") -> set[str]:
    return {finding.rule for finding in lint(config, versions={"nemo-automodel": release}).findings}


@pytest.mark.parametrize(
    "text",
    [
        "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained}\nprompt: hello\n",
        "recipe: TrainFinetuneRecipeForNextTokenPrediction\nmodel: {_target_: other.Model}\n",
    ],
)
def test_what_is_no_recipe_of_its_classes_is_not_its_own(text: str) -> None:
    with pytest.raises(Unrecognised):
        read_text(text, "recipe.yaml")


@pytest.mark.parametrize(
    ("policy", "rules"),
    [
        (POLICY, set()),
        ("{}", set()),
        ("null", set()),
        ("none", set()),
        ("false", set()),
        ("true", {"am-policy-plain"}),
        ("cpu", {"am-policy-plain"}),
        ("{_target_: torch.distributed.fsdp.OffloadPolicy}", {"am-policy-base"}),
    ],
)
def test_only_a_section_becomes_a_policy(policy: str, rules: set[str]) -> None:
    assert found(recipe(f"distributed: {{offload_policy: {policy}}}\n")) == rules


@pytest.mark.parametrize("strategy", ["ddp", "mfsdp", "Megatron-FSDP", "megatron_fsdp"])
def test_a_strategy_without_the_field_refuses_it_with_null_too(strategy: str) -> None:
    text = f"distributed: {{strategy: {strategy}, offload_policy: null}}\n"
    assert found(recipe(text)) == {"am-policy-strategy"}


def test_a_name_is_refused_by_the_strategies_that_lack_it() -> None:
    for strategy, rules in (("fsdp2", set()), ("ddp", {"am-strategy-option"})):
        text = f"distributed: {{strategy: {strategy}, reshard_after_forward: true}}\n"
        assert found(recipe(text)) == rules, strategy


def test_the_name_of_diffusions_recipes_is_none_of_the_others() -> None:
    assert found(recipe("distributed: {cpu_offload: true}\n")) == {"am-cpu-offload-name"}
    assert found(recipe("fsdp: {cpu_offload: true}\n")) == set()


def test_what_the_command_sets_stands_above_the_file() -> None:
    config = read_text(
        HEAD + "distributed: {strategy: ddp}\n",
        "recipe.yaml",
        overrides=["--distributed.strategy=fsdp2", "--model.x=1", "distributed.pp_size=2"],
    )
    assert found(config) == {"am-pipeline"}
