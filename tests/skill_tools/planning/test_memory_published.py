# SPDX-License-Identifier: Apache-2.0
"""The published Qwen3-30B-A3B rows: 16 H100, TP 2, PP 2, EP 4, allocated memory in decimal GB.

The reading that fits all five: allocated memory between steps, expert tensor parallel 1, fp32 main gradients,
distributed optimizer, precision-aware optimizer off, so that the moments move and the fp32 masters stay.
"""

import pytest

from skill_tools.dialects.layout import Layout
from skill_tools.dialects.run import Mode, TrainingRun
from skill_tools.planning.model import known_models
from skill_tools.planning.model.memory import estimate

ROWS = [(0.0, 47.2), (0.25, 43.4), (0.5, 39.6), (0.75, 35.6), (1.0, 32.0)]


def published_run(*, expert_tensor: int = 1) -> TrainingRun:
    return TrainingRun(
        dialect="megatron-bridge",
        shape=known_models.shape("qwen3-30b-a3b"),
        layout=Layout(
            gpus=16, tensor=2, pipeline=2, expert=4, expert_tensor=expert_tensor, sequence_parallel=True
        ),
        seq_length=4096,
        micro_batches=8,
    )


@pytest.mark.parametrize(("fraction", "published_gb"), ROWS)
def test_memory_between_steps_is_the_published_one(fraction: float, published_gb: float) -> None:
    memory = estimate(published_run(), Mode(optimizer_fraction=fraction))
    assert memory.between_steps_bytes / 1e9 == pytest.approx(published_gb, rel=0.01)


def test_splitting_experts_over_tensor_parallelism_would_not_fit_the_rows() -> None:
    memory = estimate(published_run(expert_tensor=2))
    assert memory.between_steps_bytes / 1e9 < 0.9 * ROWS[0][1]


def test_only_the_moments_move_without_the_precision_aware_optimizer() -> None:
    lines = {line.name: line.bytes for line in estimate(published_run(), Mode(optimizer_fraction=1.0)).gpu}
    assert "moments" not in lines
    assert lines["master weights"] == pytest.approx(4 * 30.5e9 / 16, rel=0.01)
