# SPDX-License-Identifier: Apache-2.0
"""Jobs of ai-toolkit: their framework, and a model's family."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint


def job(model: str, kind: str = "sd_trainer") -> Config:
    text = f"job: extension\nconfig:\n  name: x\n  process:\n    - type: {kind}\n      model: {{{model}}}\n"
    return read_text(text, "config.yaml")


def found(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config).findings}


@pytest.mark.parametrize(
    "text",
    [
        "job: extract\nconfig: {name: x, process: [{type: locon}]}\n",
        "job: train\nconfig: {process: sd_trainer}\n",
        "config: {name: x, process: [{type: sd_trainer}]}\n",
    ],
)
def test_what_trains_nothing_is_not_its_own(text: str) -> None:
    with pytest.raises(Unrecognised):
        read_text(text, "config.yaml", framework=None)


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("name_or_path: a, arch: 'qwen_image:2509'", "qwen_image"),
        ("name_or_path: a, arch: flex1", "flux"),
        ("name_or_path: a, is_xl: true", "sdxl"),
        ("name_or_path: a, is_xl: false", "sd1"),
    ],
)
def test_the_family_is_that_of_arch_or_of_an_older_switch(model: str, family: str) -> None:
    assert job(model).value("aitk.arch", "sd1") == family


def test_the_older_loader_keeps_all_layers_on_the_gpu() -> None:
    assert found(job("name_or_path: a, is_flux: true, layer_offloading: true")) == {"at-no-offload"}
    assert found(job("name_or_path: a, arch: 'wan22_14b:t2i', layer_offloading: true")) == set()


def test_a_section_that_no_rule_is_about_may_hold_anything() -> None:
    assert not job("name_or_path: a, model_kwargs: {train_high_noise: true}", "ui_trainer").unknown
