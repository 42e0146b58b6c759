# SPDX-License-Identifier: Apache-2.0
"""VeOmni's files: a file's framework, and an offload that no class has or no engine reads."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

HEAD = "model: {model_path: a/b}\ndata: {train_path: c}\n"


def run(accelerator: str, **given: list[str]) -> Config:
    return read_text(f"{HEAD}train: {{accelerator: {{{accelerator}}}}}\n", "train.yaml", **given)


def found(config: Config, release: str = "0.1.12") -> set[str]:
    return {finding.rule for finding in lint(config, versions={"veomni": release}).findings}


def test_a_train_section_without_an_accelerator_is_nobodys() -> None:
    with pytest.raises(Unrecognised):
        read_text(f"{HEAD}train: {{max_steps: 3}}\n", "train.yaml")


def test_names_of_earlier_releases_do_nothing() -> None:
    assert found(run("offload: {enable_activation: true}")) == {"veomni-name-passed-over"}
    config = read_text(f"{HEAD}train: {{accelerator: {{}}, enable_activation_offload: true}}\n", "train.yaml")
    assert found(config) == {"veomni-name-passed-over"}
    assert found(run("ulysses_size: 2, anything: 1")) == set()


@pytest.mark.parametrize(
    ("mode", "rules"), [("fsdp2", set()), ("ddp", {"veomni-offload-ddp"}), ("fsdp1", {"veomni-mode"})]
)
def test_only_fsdp2_offloads(mode: str, rules: set[str]) -> None:
    assert found(run(f"fsdp_config: {{fsdp_mode: {mode}, offload: true}}")) == rules


def test_one_offload_of_activations_at_a_time() -> None:
    both = run("offload_config: {enable_activation: true, enable_async_activation: true}")
    assert found(both) >= {"veomni-two-activation"}
    assert "veomni-two-activation" not in found(both, "0.1.11")


def test_the_command_counts_above_the_file() -> None:
    config = run("fsdp_config: {offload: true}", overrides=["--train.init_device=cuda"])
    assert found(config) == {"veomni-meta"}
