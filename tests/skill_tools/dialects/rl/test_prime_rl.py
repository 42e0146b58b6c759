# SPDX-License-Identifier: Apache-2.0
"""prime-rl's TOML: where each kind of run has its trainer."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import UnusableInput
from skill_tools.rules.lint import lint

RL = "[orchestrator]\nbatch_size = 1\n\n[trainer.model]\n"


def prime(text: str) -> Config:
    config = read_text(text, "run.toml")
    assert config.framework == "prime-rl"
    return config


def found(config: Config, version: str = "0.8.1.dev0") -> set[str]:
    return {finding.rule for finding in lint(config, versions={"prime-rl": version}).findings}


def test_the_trainer_of_an_rl_run() -> None:
    config = prime(f"{RL}fsdp_cpu_offload = true\n")
    assert config.settings["trainer.model.fsdp_cpu_offload"].place.line == 5
    assert found(config) == {"pr-offload-both"}


def test_an_sft_run_has_it_at_the_top() -> None:
    config = prime("max_steps = 1\n[model]\nfsdp_cpu_offload = true\noptim_cpu_offload = false\n")
    assert config.value("trainer.model.fsdp_cpu_offload") is True
    assert not found(config)


def test_the_model_of_an_rl_run_is_shared() -> None:
    config = prime(f"{RL}optim_cpu_offload = false\n\n[model]\nname = 'x'\nfsdp_cpu_offload = true\n")
    assert [each.written for each in config.unknown] == ["model.fsdp_cpu_offload"]
    assert config.value("trainer.model.fsdp_cpu_offload") is None


@pytest.mark.parametrize(
    "written", ["full_offload = true", "[trainer.model.full_offload]", "full_offload = {}"]
)
def test_full_offload_is_a_switch_or_a_section(written: str) -> None:
    assert "pr-full-and-optim" in found(prime(f"{RL}{written}\n"))


def test_the_text_none_is_null() -> None:
    config = prime(f'{RL}full_offload = "None"\n[trainer.optim]\nmax_norm = "None"\n')
    assert config.value("trainer.model.full_offload") is None
    assert config.value("trainer.optim.max_norm") is None


def test_the_default_came_with_a_release() -> None:
    config = prime(f"{RL}fsdp_cpu_offload = true\n")
    assert not found(config, "0.6.0")
    (unstated,) = lint(config).findings
    assert (str(unstated.severity), unstated.depends_on) == ("warning", ("prime-rl>=0.7",))


def test_a_file_of_the_inference_server_has_other_fields() -> None:
    config = read_text("[model]\nmax_model_len = 1\n[parallel]\ntp = 1\n", "x.toml", framework="prime-rl")
    assert not config.unknown


def test_yaml_and_overrides_are_refused() -> None:
    with pytest.raises(UnusableInput, match="is YAML"):
        read_text("model: {}\n", "x.yaml", framework="prime-rl")
    with pytest.raises(UnusableInput, match="model"):
        read_text(f"{RL}\n", "x.toml", overrides=["--trainer.model.fsdp-cpu-offload"], framework="prime-rl")
