# SPDX-License-Identifier: Apache-2.0
"""ROLL's files: their framework, the strategy that reads an offload, and the pipeline that asks for one."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

RL = "actor_infer: {strategy_args: {strategy_name: vllm, strategy_config: {cpu_offload_gb: 4}}}\n"


def run(role: str, strategy: str, settings: str, more: str = "", **given: list[str]) -> Config:
    text = f"{role}: {{strategy_args: {{strategy_name: {strategy}, strategy_config: {{{settings}}}}}}}\n"
    return read_text(text + more, "config.yaml", **given)


def found(config: Config, release: str = "0.3.0") -> set[str]:
    return {finding.rule for finding in lint(config, versions={"roll": release}).findings}


def test_a_role_without_a_strategy_is_nobodys() -> None:
    with pytest.raises(Unrecognised):
        read_text("actor_train: {model_args: {dtype: bf16}}\n", "config.yaml")


@pytest.mark.parametrize("role", ["actor_train", "sft_train", "student_train", "student", "critic"])
def test_no_strategy_offloads_by_megatrons_name(role: str) -> None:
    trained = "" if role != "critic" else "actor_train: {strategy_args: {strategy_name: fsdp2_train}}\n"
    setting = "optimizer_cpu_offload: true"
    assert found(run(role, "megatron_train", setting, trained)) == {"roll-optimizer-offload"}
    assert found(run(role, "fsdp2_train", setting, trained)) == {"roll-optimizer-fsdp2"}


def test_the_policy_is_fsdp2s() -> None:
    assert found(run("actor_train", "fsdp2_train", "offload_policy: true", RL)) == set()
    assert found(run("actor_train", "megatron_train", "offload_policy: false", RL)) == {
        "roll-policy-megatron"
    }
    assert found(run("actor_train", "fsdp2_train", "cpu_offload: true", RL)) == {"roll-unknown-offload"}


def test_deepspeed_went_with_a_release() -> None:
    config = run("actor_train", "deepspeed_train", "", RL)
    assert found(config) == {"roll-deepspeed-gone"}
    assert found(config, "0.2.1") == set()


@pytest.mark.parametrize(
    ("role", "more", "rules"),
    [
        ("actor_train", RL, {"roll-states-unread"}),
        ("sft_train", "", {"roll-states-unread"}),
        ("actor_train", "reference: {}\n", set()),
        ("student", "teacher: {}\n", set()),
    ],
)
def test_only_two_pipelines_ask_what_leaves(role: str, more: str, rules: set[str]) -> None:
    assert found(run(role, "megatron_train", "", more, overrides=["is_offload_states=true"])) == rules


def test_interpolations_are_resolved() -> None:
    role = "{offload_nccl: '${offload_nccl}', strategy_args: {strategy_name: fsdp2_train}}"
    text = f"offload_nccl: true\nsft_train: {role}\n"
    assert found(read_text(text, "config.yaml")) == {"roll-offload-nccl"}
