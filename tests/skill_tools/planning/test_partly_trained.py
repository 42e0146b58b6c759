# SPDX-License-Identifier: Apache-2.0
"""Plans by profiles of models of which a part is trained: adapters, tables, layers; and parameters without a
gradient."""

import json
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.bundle import knowledge_path


@pytest.fixture
def profile() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(knowledge_path("traces", "qwen3-4b.json").read_text())
    return data


def planned(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--gpu", "h100", "--format", "json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_adapters_are_planned_by_the_profile_of_the_model_that_has_them(
    profile: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = 33_030_144
    path = tmp_path / "lora.json"
    profile |= {
        "parameters": 4_022_468_096 + trained,
        "trained_parameters": trained,
        "largest_parameter": [151936, 2560],
        "adapter_rank": 16,
        "gradients_bytes": 4 * trained,
        "weights_bytes": profile["weights_bytes"] + 4 * trained,
    }
    path.write_text(json.dumps(profile))
    plan = planned(capsys, "--trace", path)
    assert plan["model"]["adapter"] == {"rank": 16, "parameters": trained}
    lines = {line["name"]: line["bytes"] for line in plan["without_offload"]["memory"]["gpu"]}
    assert lines["base weights"] == 2 * 4_022_468_096
    # An fp32 weight is its own master: 4 B of it and 8 of moments.
    assert lines["adapter weights and states"] == 12 * trained


@pytest.mark.parametrize(("share", "rank"), [(0.9, 1024), (0.2, 1024), (0.03, 0)])
def test_a_model_of_which_some_weights_are_frozen_has_states_of_the_others(
    share: float, rank: int, profile: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However few they are if blocks have no backward, and then no rank of adapters."""
    elements = profile["weights_bytes"] // 2
    trained = round(share * elements)
    counts = {"parameters": elements, "trained_parameters": trained, "adapter_rank": rank}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**profile, **counts, "gradients_bytes": 2 * trained}))
    words = ("--trace", path, "--framework", "pytorch", "--gpus", "1")
    plan = planned(capsys, *words, "--gpu-memory", "140GiB")
    assert "adapter" not in plan["model"]
    lines = {line["name"]: line["bytes"] for line in plan["recommendation"]["option"]["memory"]["gpu"]}
    assert lines["weights"] == 2 * elements
    assert lines["moments"] == pytest.approx(8 * trained, abs=16)
    said = f"frozen: {elements - trained:,} of {elements:,} elements, as they were traced"
    assert said in plan["assumptions"]
    less = plan["recommendation"]["option"]["memory"]["allocated_bytes"] - 4 * trained
    plan = planned(capsys, *words, "--tensor-memory", f"{less}B", "--only", "optimizer")
    assert "optimizer-offload" in plan["recommendation"]["option"]["mechanisms"]


@pytest.mark.parametrize(("width", "adapts"), [(16, True), (512, True), (2560, False)])
def test_a_table_that_is_trained_beside_adapters_has_states_that_may_leave(
    width: int, adapts: bool, profile: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elements = profile["weights_bytes"] // 2
    trained = elements // 20
    counts = {
        "parameters": elements,
        "trained_parameters": trained,
        "gradients_bytes": 2 * trained,
        "adapter_rank": 16,
        "trained_width": width,
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**profile, **counts}))
    plan = planned(capsys, "--trace", path, "--framework", "pytorch", "--gpus", "1", "--gpu-memory", "140GiB")
    assert ("adapter" in plan["model"]) == adapts


def test_layers_of_which_a_part_is_frozen_stream_and_states_leave_too(
    profile: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last two layers are trained: the window has room for three of the others, and backward reads none again."""
    elements, layers = profile["weights_bytes"] // 2, len(profile["steps"][0]["layers"])
    block_bytes = 200_000_000
    counts = {
        "parameters": elements,
        "trained_parameters": 2 * block_bytes // 2,
        "gradients_bytes": 2 * block_bytes,
        "frozen_layers": [block_bytes] * (layers - 2) + [0, 0],
        "frozen_tensors": [90_000_000, 90_000_000, 20_000_000],
        "layers_without_backward": layers - 2,
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**profile, **counts}))
    words = ("--trace", path, "--framework", "pytorch", "--gpus", "1", "--gpu", "h200")
    plan = planned(
        capsys, *words, "--tensor-memory", "17.25GiB", "--only", "optimizer-offload,layer-streaming"
    )
    option = plan["recommendation"]["option"]
    assert option["mechanisms"] == ["optimizer-offload", "layer-streaming"]
    assert plan["execute"]["weights"] == {"resident_layers": 0, "compress": True}
    lines = {line["name"]: line["bytes"] for line in option["memory"]["gpu"]}
    buffers_bytes = 2 * 0.9 * 90_000_000
    assert lines["weights"] == round(2 * elements - (layers - 2 - 3) * block_bytes + buffers_bytes)
    hosted = {line["name"]: line["bytes"] for line in option["memory"]["host_per_rank"]}
    assert hosted["base weights"] == 0.76 * (layers - 2) * block_bytes
    costs = {cost["name"]: cost["work_s"] for cost in option["time"]["costs"]}
    assert costs["frozen layers for forward"] > 0
    assert costs["frozen layers for backward"] == 0


def test_trained_parameters_without_a_gradient_have_weights_and_states_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At few tokens the update is the worst moment, where all gradients are."""
    profile = json.loads(knowledge_path("traces", "llama-3-8b.json").read_text(encoding="utf-8"))
    lines = []
    for without in (0, 100_000_000):
        path = tmp_path / f"{without}.json"
        path.write_text(json.dumps(profile | {"without_gradients": without}))
        plan = planned(capsys, "--trace", path, "--overrides", "seq_length=128")
        lines.append({line["name"]: line["bytes"] for line in plan["as_it_is"]["memory"]["gpu"]})
    whole, fewer = lines
    assert whole["gradients"] == profile["gradients_bytes"]
    assert fewer == whole | {"gradients": whole["gradients"] - 2 * 100_000_000}


def test_of_few_parameters_those_without_a_gradient_are_not_widened(
    tmp_path: Path, profile: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = 10_000_000
    small = {"parameters": trained, "trained_parameters": trained, "largest_parameter": [1000, 1000]}
    bytes_of = dict.fromkeys(("weights_bytes", "weights_allocated_bytes", "gradients_bytes"), 2 * trained)
    nothing = {"fixed": 0, "per_token": 0, "per_token_and_length": 0}
    for step in profile["steps"]:
        for name in ("peaks", "peaks_without_gradients"):
            step[name] = dict.fromkeys(step[name], nothing)
        step["layers"] = [nothing for _ in step["layers"]]
    del profile["config"]
    path = tmp_path / "small.json"
    path.write_text(json.dumps(profile | small | bytes_of | {"without_gradients": 1_000_000}))
    plan = planned(capsys, "--trace", path)
    held = {line["name"]: line["bytes"] for line in plan["as_it_is"]["memory"]["gpu"]}
    assert held["fp32 gradients"] == 4 * 9_000_000
    assert held["gradients"] == 2 * 9_000_000
    assert held["moments"] == 8 * trained


def test_adapters_that_get_no_gradient_have_weights_and_states_alone(
    profile: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, without = 33_030_144, 3_000_000
    path = tmp_path / "lora.json"
    profile |= {
        "parameters": 4_022_468_096 + trained,
        "trained_parameters": trained,
        "without_gradients": without,
        "adapter_rank": 16,
        "gradients_bytes": 4 * trained,
        "weights_bytes": profile["weights_bytes"] + 4 * trained,
    }
    for step in profile["steps"]:
        # All finished gradients, and nothing else, are there at the end of backward.
        step["peaks_without_gradients"] = {
            name: dict.fromkeys(growth, 0) for name, growth in step["peaks"].items()
        }
        step["peaks"] = {
            name: dict.fromkeys(growth, 0) | {"fixed": 4 * (trained - without)}
            for name, growth in step["peaks"].items()
        }
        step["layers"] = [dict.fromkeys(growth, 0) for growth in step["layers"]]
    path.write_text(json.dumps(profile))
    plan = planned(capsys, "--trace", path)
    held = {line["name"]: line["bytes"] for line in plan["without_offload"]["memory"]["gpu"]}
    assert held["adapter weights and states"] == 12 * trained
    assert held["gradients"] == 4 * (trained - without)
