# SPDX-License-Identifier: Apache-2.0
"""A plan of an Axolotl file without a change: the numbers of the file as it runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skill_tools.dialects.axolotl import run as axolotl_run
from skill_tools.dialects.read import read
from skill_tools.planning.cost import machine
from skill_tools.planning.model import known_models
from skill_tools.planning.search import planner
from skill_tools.planning.search.options import Budget
from skill_tools.planning.search.planner import Plan
from skill_tools.units import GIB

ADAPTER = {
    "base_model": "Qwen/Qwen3-8B",
    "adapter": "lora",
    "lora_r": 16,
    "sequence_len": 2048,
    "micro_batch_size": 1,
    "optimizer": "adamw_torch_fused",
    "bf16": True,
    "gradient_checkpointing": True,
}
SHARDED: dict[str, dict[str, Any]] = {
    "alone": {},
    "deepspeed": {"deepspeed": "zero.json"},
    "fsdp": {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}},
}


def plan(folder: Path, values: Mapping[str, Any], zero: Mapping[str, Any], gpu_gib: int = 200) -> Plan:
    """Return the plan of a file with `values`, beside a DeepSpeed file with `zero`."""
    path = folder / "run.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    (folder / "zero.json").write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    config = read([str(path)])
    run = axolotl_run.build(config, known_models.shape("qwen3-8b"), gpus=2)
    budget = Budget(gpu_gib * GIB, None)
    return planner.make_plan(config, run, machine.known("h100"), budget, shape_source="", versions={})


@pytest.mark.parametrize("sharding", SHARDED)
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("gpu_gib", [9, 14, 24, 200])
def test_nothing_to_change_means_the_run_as_it_is(
    tmp_path: Path, sharding: str, streams: bool, gpu_gib: int
) -> None:
    values = ADAPTER | SHARDED[sharding] | {"layer_offloading": streams}
    found = plan(tmp_path, values, {"stage": 2}, gpu_gib)
    best, change = found.recommendation, found.patch
    if best is None or change is None:
        return
    if not change.settings:
        assert best.memory == found.as_it_is.memory
        assert best.time == found.as_it_is.time
    if sharding != "alone" and streams:
        assert change.settings["layer_offloading"] is False


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_no_stage_shards_stay_on_the_gpu(tmp_path: Path, stage: int) -> None:
    values = ADAPTER | SHARDED["deepspeed"]
    told = plan(tmp_path, values, {"stage": stage, "offload_param": {"device": "cpu"}})
    silent = plan(tmp_path, values, {"stage": stage})
    assert told.as_it_is.memory == silent.as_it_is.memory


def test_parameters_leave_at_stage_3(tmp_path: Path) -> None:
    values = ADAPTER | SHARDED["deepspeed"]
    told = plan(tmp_path, values, {"stage": 3, "offload_param": {"device": "cpu"}})
    silent = plan(tmp_path, values, {"stage": 3})
    assert told.as_it_is.memory.device_bytes < silent.as_it_is.memory.device_bytes
