# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed section in a plan: its stage, its offloaded tensors, and a ratio's effect."""

import json

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.deepspeed import mode as zero
from skill_tools.dialects.layout import Layout
from skill_tools.dialects.read import read_text
from skill_tools.dialects.run import TrainingRun
from skill_tools.planning.model.known_models import require

CPU = {"device": "cpu"}


def section(**fields: object) -> Config:
    return read_text(json.dumps({"zero_optimization": fields}), "ds.json", framework="deepspeed")


def run(gpus: int = 8) -> TrainingRun:
    return TrainingRun("deepspeed", require("llama-3-8b"), Layout(gpus=gpus), seq_length=2048)


@pytest.mark.parametrize(
    ("config", "stage", "optimizer", "weights"),
    [
        (section(stage=2, offload_optimizer=CPU), 2, True, False),
        (section(stage=3, offload_optimizer=CPU, offload_param=CPU), 3, True, True),
        (section(stage=2, offload_param=CPU), 2, False, False),
        (section(stage="auto", offload_optimizer=CPU), 0, False, False),
        (section(offload_optimizer=CPU), 0, False, False),
        (section(stage=1, offload_optimizer={"device": "nvme"}), 1, True, False),
        (read_text("base_model: a/b\nadapter: lora\n", "run.yaml"), None, False, False),
    ],
)
def test_what_a_section_asks_for(config: Config, stage: int | None, optimizer: bool, weights: bool) -> None:
    assert zero.stage(config) == stage
    assert (zero.offloads_optimizer(config), zero.offloads_parameters(config)) == (optimizer, weights)


@pytest.mark.parametrize(
    ("ratio", "grain", "share"),
    [
        (1.0, 1_000_000_000, 1.0),
        (0.5, 2_000_000_000, 1.0),  # one sub-group a rank is all or nothing
        (0.1, 2_000_000_000, 1.0),
        (0.5, 100_000_000, 6 / 11),  # 1.004 billion parameters a rank are 11 sub-groups
        (0.5, "auto", 0.5),  # two sub-groups of the default size
        (0.0, 100_000_000, 0.0),
    ],
)
def test_a_ratio_counts_whole_sub_groups(ratio: float, grain: object, share: float) -> None:
    config = section(stage=3, offload_optimizer={**CPU, "ratio": ratio}, sub_group_size=grain)
    assert zero.offloaded_share(config, run()) == pytest.approx(share)
    assert zero.mode(config, run()).optimizer_fraction == pytest.approx(share)


def test_parameter_offload_takes_the_states_along() -> None:
    mode = zero.mode(section(stage=3, offload_optimizer=CPU, offload_param=CPU), run())
    assert mode.offload_parameters
    assert mode.optimizer_fraction == 0.0
