# SPDX-License-Identifier: Apache-2.0
"""Published slow-downs of Megatron's HybridDeviceOptimizer over the run without offload, within 15 percent."""

import pytest

from skill_tools.dialects.layout import Layout
from skill_tools.dialects.run import Mode, TrainingRun
from skill_tools.planning.cost import compute, machine, step_time
from skill_tools.planning.model import known_models, memory

H100 = machine.known("h100")
BRIDGE = TrainingRun(
    dialect="megatron-bridge",
    shape=known_models.shape("qwen3-30b-a3b"),
    layout=Layout(gpus=16, tensor=2, pipeline=2, expert=4, sequence_parallel=True),
    seq_length=4096,
    micro_batches=8,
)
NEMO_RL = TrainingRun(
    dialect="megatron-bridge", shape=known_models.shape("qwen3-0.6b"), layout=Layout(), seq_length=2048
)


@pytest.mark.parametrize(
    ("run", "baseline_s", "fraction", "overlap", "step_s"),
    [
        (BRIDGE, 0.996, 0.25, False, 1.871),
        (BRIDGE, 0.996, 0.5, False, 2.484),
        (BRIDGE, 0.996, 0.75, False, 3.187),
        (BRIDGE, 0.996, 1.0, False, 4.189),
        (BRIDGE, 0.996, 1.0, True, 3.877),
        (NEMO_RL, 0.752, 0.5, False, 1.187),
        (NEMO_RL, 0.752, 0.5, True, 1.216),
        (NEMO_RL, 0.752, 1.0, True, 1.678),
    ],
)
def test_slow_down_is_the_published_one(
    run: TrainingRun, baseline_s: float, fraction: float, overlap: bool, step_s: float
) -> None:
    mode = Mode(optimizer_fraction=fraction, overlap=overlap)
    found = memory.estimate(run, mode)
    speed = compute.pace(run, H100, found.parameters.shard, measured_step_s=baseline_s)
    predicted = step_time.estimate(run, mode, found, H100, speed)
    assert predicted.calibrated
    assert predicted.total_s / baseline_s == pytest.approx(step_s / baseline_s, rel=0.15)
