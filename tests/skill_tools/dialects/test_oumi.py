# SPDX-License-Identifier: Apache-2.0
"""Oumi's files: a file's framework, the stage that an offload needs, and keys without effect."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

HEAD = "model: {model_name: a/b}\ntraining: {trainer_type: TRL_SFT}\n"


def run(section: str, **given: list[str]) -> Config:
    return read_text(HEAD + section, "train.yaml", **given)


def found(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config, versions={"oumi": "0.9"}).findings}


def test_a_training_section_without_the_choice_of_a_trainer_is_nobodys() -> None:
    with pytest.raises(Unrecognised):
        read_text("model: {model_name: a/b}\ntraining: {max_steps: 3}\n", "train.yaml")


@pytest.mark.parametrize("stage", ["3", "'3'", "zero_3", "null"])
def test_a_stage_has_the_name_of_the_enumeration_alone(stage: str) -> None:
    config = run(f"deepspeed: {{enable_deepspeed: true, zero_stage: {stage}, offload_param: {{}}}}\n")
    assert "oumi-wrong-type" in found(config)
    assert not found(
        run("deepspeed: {enable_deepspeed: true, zero_stage: ZeRORuntimeStage.ZERO_3, offload_param: {}}\n")
    )


@pytest.mark.parametrize(("stage", "rules"), [("ZERO_3", set()), ("ZERO_2", {"oumi-param-stage"})])
def test_parameters_leave_at_stage_three_alone(stage: str, rules: set[str]) -> None:
    config = run(
        f"deepspeed: {{enable_deepspeed: true, zero_stage: {stage}, offload_param: {{device: CPU}}}}\n"
    )
    assert found(config) == rules


def test_null_is_no_offload() -> None:
    assert (
        found(run("deepspeed: {enable_deepspeed: true, offload_param: null, offload_optimizer: null}\n"))
        == set()
    )


def test_an_offload_is_checked_although_deepspeed_is_off() -> None:
    assert found(run("deepspeed: {offload_optimizer: {}}\n")) == {
        "oumi-optimizer-stage",
        "oumi-deepspeed-off",
    }


def test_what_the_command_sets_stands_above_the_file() -> None:
    config = run(
        "fsdp: {cpu_offload: true}\n", overrides=["--fsdp.enable_fsdp=true", "deepspeed.enable_deepspeed=yes"]
    )
    assert found(config) == {"oumi-two-engines"}


def test_names_of_other_sections_are_not_read() -> None:
    assert found(run("peft: {anything: 1}\ndata: {train: {datasets: []}}\n")) == set()
    assert found(run("fsdp_config: {cpu_offload: true}\n")) == {"oumi-unknown-key"}
