# SPDX-License-Identifier: Apache-2.0
"""Megatron Bridge's own theoretical memory report, weights and optimizer state in MiB of the most loaded GPU.

The numbers are those that `compute_weight_and_optimizer_memory` of `theoretical_memory_utils.py` gives for
these recipes with the distributed optimizer: 6 bytes a parameter and 12 over the data-parallel ranks.
"""

import pytest

from skill_tools.dialects.layout import Layout
from skill_tools.dialects.run import TrainingRun
from skill_tools.planning.model import known_models
from skill_tools.planning.model.memory import estimate


@pytest.mark.parametrize(
    ("model", "layout", "reported_mib"),
    [
        ("llama-3-8b", Layout(gpus=8), 57438.81),
        ("llama-3-70b", Layout(gpus=64, tensor=4, pipeline=4, sequence_parallel=True), 38975.92),
        ("qwen3-32b", Layout(gpus=16, tensor=8, sequence_parallel=True), 46867.51),
        ("llama-3.2-1b", Layout(gpus=8), 8839.72),
    ],
)
def test_weights_and_optimizer_state_agree_with_the_report(
    model: str, layout: Layout, reported_mib: float
) -> None:
    run = TrainingRun(
        dialect="megatron-bridge", shape=known_models.shape(model), layout=layout, seq_length=4096
    )
    assert estimate(run).between_steps_bytes / (1 << 20) == pytest.approx(reported_mib, rel=0.03)
