# SPDX-License-Identifier: Apache-2.0
"""SkyRL's commands: words over closed dataclasses, the SFT trainer's own names, and Megatron's keys."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.rules.lint import lint

RL = "uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base trainer.policy.model.path=a/b"
SFT = "uv run -m skyrl.train.main_sft model.path=a/b"
FSDP = "trainer.policy.fsdp_config"
OPTIMIZER = "trainer.policy.megatron_config.optimizer_config_kwargs"
TRANSFORMER = "trainer.policy.megatron_config.transformer_config_kwargs"


def skyrl(words: str, start: str = RL) -> Config:
    return read_text(f"{start} {words}\n", "run.sh")


def found(config: Config, release: str = "0.3.0") -> set[str]:
    findings = lint(config, versions={"skyrl": release}).findings
    return {finding.rule for finding in findings if finding.severity != "info"}


def test_a_program_proves_it_and_so_do_two_of_its_sections() -> None:
    assert skyrl("").framework == "skyrl"
    own = "python -m my.entrypoint trainer.policy.model.path=a trainer.placement.colocate_all=true"
    assert read_text(own, "run.sh").framework == "skyrl"


def test_a_name_of_no_class_ends_the_run_and_one_of_a_subclass_does_not() -> None:
    assert found(skyrl(f"{FSDP}.param_offload=true")) == {"sky-unknown-key"}
    assert found(skyrl("trainer.algorithm.overlong_buffer_len=512")) == {"sky-unknown-key"}
    sections = "trainer.policy.model.path=a trainer.placement.colocate_all=true"
    dapo = f"uv run -m examples.train.algorithms.dapo.main_dapo {sections}"
    assert found(skyrl("trainer.algorithm.overlong_buffer_len=512", dapo)) == set()
    assert found(skyrl(f"{FSDP}.param_offload=true", dapo)) == {"sky-unknown-key"}


def test_a_module_that_takes_over_has_classes_of_its_own() -> None:
    config = skyrl("trainer.override_entrypoint=mine.entrypoint trainer.mine.offload=true")
    assert config.value("skyrl.program") == "rl"
    mine = "trainer.override_entrypoint=mine.entrypoint"
    assert found(skyrl(f"{mine} trainer.mine.rank=8 trainer.mine.offload_optimizer=true")) == set()
    assert found(skyrl(f"{mine} {FSDP}.param_offload=true")) == {"sky-unknown-key"}


def test_a_plus_is_refused_by_the_trainer_of_rl_alone() -> None:
    assert found(skyrl(f"+{FSDP}.cpu_offload=true")) == {"sky-plus"}
    assert found(skyrl("+fsdp_config.cpu_offload=true", SFT)) == {"sky-unknown-key"}


def test_values_are_omegaconfs_and_any_text_is_true() -> None:
    for text, value in (("True", True), ("no", False), ("null", None), ("None", True), ("''", None)):
        assert skyrl(f'{FSDP}.cpu_offload="{text}"').value("skyrl.policy.cpu_offload") is value, text
    assert found(skyrl(f"{FSDP}.cpu_offload=None")) == {"sky-text-is-true"}
    assert skyrl(f"'{FSDP}={{cpu_offload: true}}'").value("skyrl.policy.cpu_offload") is True


def test_the_sft_trainer_has_the_policys_sections_at_the_top() -> None:
    config = skyrl("strategy=fsdp fsdp_config.cpu_offload=true", SFT)
    assert (config.value("skyrl.strategy"), config.value("skyrl.policy.cpu_offload")) == ("fsdp", True)
    assert found(skyrl("strategy=fsdp2 optimizer_config.offload_after_step=true", SFT)) == {
        "sky-states-alone"
    }
    assert found(skyrl("strategy=fsdp")) == {"sky-unknown-key"}
    assert "sky-colocated-gpus" not in found(skyrl("placement.num_gpus_per_node=8", SFT))


def test_fsdp_is_another_fsdp_from_0_3_on() -> None:
    config = skyrl(f"trainer.strategy=fsdp {FSDP}.cpu_offload=true")
    assert found(config, "0.2.0") == {"sky-fsdp1-offload"}
    assert found(config, "0.3.0") == set()
    assert found(skyrl("strategy=fsdp", SFT), "0.2.0") == {"sky-sft-fsdp1"}


def test_megatrons_rules_read_the_policy_that_it_trains() -> None:
    given = f"{OPTIMIZER}.optimizer_cpu_offload=true {OPTIMIZER}.use_precision_aware_optimizer=true"
    assert found(skyrl(f"trainer.strategy=megatron {given}")) == {"oc-fraction-zero"}
    assert found(skyrl(f"trainer.strategy=fsdp {given}")) == {"sky-megatron-fsdp"}
    layers = f"trainer.strategy=megatron {TRANSFORMER}.cpu_offloading=true {TRANSFORMER}.cpu_offloading_num_layers=2"
    assert "la-recompute" in found(skyrl(layers))
    assert "la-recompute" not in found(skyrl(f"{layers} trainer.gradient_checkpointing=false"))


def test_a_kwarg_drops_the_other_defaults_up_to_0_2() -> None:
    layers = f"trainer.strategy=megatron {TRANSFORMER}.cpu_offloading=true {TRANSFORMER}.cpu_offloading_num_layers=2"
    assert "la-recompute" not in found(skyrl(layers), "0.2.0")


def test_offload_after_step_is_told_where_it_does_nothing() -> None:
    states = "trainer.policy.optimizer_config.offload_after_step"
    expected = {
        f"trainer.strategy=fsdp2 {FSDP}.cpu_offload=true {states}=true": {"sky-native-offload"},
        f"trainer.strategy=fsdp2 {states}=false": {"sky-states-stay"},
        f"trainer.strategy=megatron {states}=false": {"sky-states-megatron"},
        f"trainer.strategy=fsdp2 trainer.placement.colocate_all=false {states}=true": set(),
        "trainer.strategy=fsdp2 trainer.placement.colocate_all=false trainer.algorithm.use_kl_loss=false "
        f"{states}=true": {"sky-states-alone"},
    }
    wrong = [words for words, rules in expected.items() if found(skyrl(words)) != rules]
    assert wrong == []


def test_a_plan_says_why_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{RL}\n")
    assert main(["plan", str(script), "--gpu", "h200"]) == 2
    assert "SkyRL shares each GPU between training and vLLM" in capsys.readouterr().err
