# SPDX-License-Identifier: Apache-2.0
"""MaxText's commands and files: their framework, the program that refuses an offload, and the policy that asks for
tensors."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

TRAIN = "pre_train.train"


def run(program: str, settings: str) -> Config:
    return read_text(f"python3 -m maxtext.trainers.{program} base.yml run_name=a {settings}\n", "run.sh")


def found(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config, versions={"maxtext": "0.2.5"}).findings}


def test_a_file_without_its_base_is_nobodys() -> None:
    with pytest.raises(Unrecognised):
        read_text("optimizer_memory_host_offload: true\nremat_policy: full\n", "model.yml")


@pytest.mark.parametrize(
    ("program", "rules"),
    [
        (TRAIN, set()),
        ("post_train.rl.train_rl", {"mt-post-training"}),
        ("post_train.sft.train_sft", {"mt-post-training"}),
        ("post_train.dpo.train_dpo", {"mt-post-training"}),
        ("post_train.sft.train_sft_native", set()),
    ],
)
def test_post_training_keeps_the_optimizer(program: str, rules: set[str]) -> None:
    assert found(run(program, "optimizer_memory_host_offload=true")) == rules


def test_parameters_need_another_scan_axis_than_the_default() -> None:
    assert found(run(TRAIN, "parameter_memory_host_offload=True")) == {"mt-scan-axis"}
    assert found(run(TRAIN, "parameter_memory_host_offload=True param_scan_axis=0")) == set()


def test_the_custom_policy_alone_asks_for_tensors() -> None:
    assert found(run(TRAIN, "mlpwi=offload")) == {"mt-tensors-unread"}
    assert found(run(TRAIN, "mlpwi=offload remat_policy=custom")) == set()
    assert found(run(TRAIN, "mlpwi=host remat_policy=custom")) == {"mt-location"}


def test_a_file_is_laid_over_the_base() -> None:
    text = "base_config: base.yml\nparameter_memory_host_offload: true\noffload_optimizer: true\nlearning_rate: 1.e-5\n"
    assert found(read_text(text, "mine.yml")) == {"mt-scan-axis", "mt-unknown-key"}
    config = read_text(text, "mine.yml", overrides=["param_scan_axis=0"])
    assert found(config) == {"mt-unknown-key"}
