# SPDX-License-Identifier: Apache-2.0
"""Model profiles: those that ship, and a user's own."""

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from schemas import assert_follows

from skill_tools.__main__ import main
from skill_tools.bundle import knowledge_path
from skill_tools.dialects import parameters
from skill_tools.planning.model import known_models, traces

QWEN = knowledge_path("traces", "qwen3-4b.json")


@pytest.fixture
def profile() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(QWEN.read_text())
    return data


def planned(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--gpu", "h100", "--format", "json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["plan", *map(str, words), "--gpu", "h100"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def source(plan: dict[str, Any]) -> str:
    return next(line for line in plan["assumptions"] if line.startswith("memory"))


@pytest.mark.parametrize("name", traces.names())
def test_what_ships_is_the_known_models(name: str) -> None:
    data = json.loads(knowledge_path("traces", f"{name}.json").read_text())
    assert_follows(data, "model-profile")
    shape = known_models.shape(name)
    found = traces.of_shape(shape)
    assert found is not None
    assert len(found.plain.layers) == shape.num_layers
    tower = known_models.entries()[name].get("tower", 0) if found.images else 0
    assert found.weights_bytes == pytest.approx(2 * (parameters.model(shape).total + tower), rel=0.002)


@pytest.mark.parametrize("name", traces.names())
def test_a_plan_reads_what_was_traced(name: str) -> None:
    """The index has differences in the place of numbers; they add up to the same, to the last bit."""
    traced = traces.model_of(json.loads(knowledge_path("traces", f"{name}.json").read_text()))
    found = traces.of_shape(known_models.shape(name))
    assert found is not None
    assert tuple(found) == tuple(traced)


def test_a_model_that_takes_images_ships_traced_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its whole, 7,063,427,072 parameters: two bytes of each weight, two of its gradient, twelve of its states."""
    plan = planned(capsys, "--model", "llava-hf/llava-1.5-7b-hf")
    assert source(plan).endswith(", sdpa, an image a sequence")
    assert plan["as_it_is"]["memory"]["between_steps_bytes"] == pytest.approx(14 * 7_063_427_072, rel=0.01)
    profile = json.loads(knowledge_path("traces", "llava-1.5-7b.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(profile["config"]))
    assert source(planned(capsys, tmp_path / "config.json")) == source(plan)


def test_a_known_model_is_planned_by_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--model", "llama-3-8b")
    assert "LlamaForCausalLM traced, transformers 5." in source(plan)
    assert source(plan).endswith(", sdpa")


def test_a_config_of_the_same_sizes_is_that_model(
    tmp_path: Path, profile: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(profile["config"]))
    assert "Qwen3ForCausalLM traced" in source(planned(capsys, tmp_path / "config.json"))


@pytest.mark.parametrize("words", [["num_layers=12"], ["lora_rank=16"]])
def test_another_model_or_adapters_go_by_the_formula(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(capsys, "--model", "llama-3-8b", "--overrides", *words)
    assert not any("traced" in line for line in plan["assumptions"])


def test_a_profile_of_ones_own_is_used(
    tmp_path: Path, profile: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = planned(capsys, "--model", "qwen3-4b")["as_it_is"]["memory"]["allocated_bytes"]
    for step in profile["steps"]:
        for peaks in (step["peaks"], step["peaks_without_gradients"]):
            for growth in peaks.values():
                growth["fixed"] += 2**30
    (tmp_path / "own.json").write_text(json.dumps(profile))
    plan = planned(capsys, "--model", "qwen3-4b", "--framework", "pytorch", "--trace", tmp_path / "own.json")
    assert plan["as_it_is"]["memory"]["allocated_bytes"] == before + 2**30


@pytest.mark.parametrize("has_config", [True, False])
def test_a_profile_of_another_model_is_refused(
    has_config: bool, tmp_path: Path, profile: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_config:
        del profile["config"]
    (tmp_path / "own.json").write_text(json.dumps(profile))
    said = refusal(capsys, "--model", "llama-3-8b", "--trace", tmp_path / "own.json")
    assert "is of another model: Qwen3ForCausalLM with 36 layers and 4,022,468,096 parameters" in said
    assert main(["plan", "--model", "qwen3-4b", "--gpu", "h100", "--trace", str(tmp_path / "own.json")]) == 0


def test_a_profile_says_nothing_of_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--model", "qwen3-4b", "--trace", QWEN, "--overrides", "lora_rank=16")
    assert "adapters" in said


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: "{",
        lambda data: "[]",
        lambda data: data.pop("steps"),
        lambda data: data["steps"].pop(),
        lambda data: data["steps"][0]["layers"].pop(),
        lambda data: data["steps"][0]["flops"].update(fixed=float("nan")),
        # Finite, and not times a number of tokens.
        lambda data: data["steps"][0]["layers"][0].update(per_token=1e308),
        lambda data: data["steps"][0].update(peaks=3),
        lambda data: data.update(weights_bytes=0),
        lambda data: data.update(without_gradients=-1),
        lambda data: data.update(without_gradients=data["trained_parameters"]),
        lambda data: data.update(dtype="int3"),
        lambda data: data.update(config={"model_type": "qwen3"}),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(
    damage: Any, tmp_path: Path, profile: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = copy.deepcopy(profile)
    text = damage(damaged)
    (tmp_path / "own.json").write_text(text if text in ("{", "[]") else json.dumps(damaged))
    refusal(capsys, "--model", "qwen3-4b", "--trace", tmp_path / "own.json")


def test_where_the_logits_decide_a_fused_loss_is_offered_with_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = ["--model", "qwen3-4b", "--overrides", "seq_length=16384"]
    answers = {each["change"]: each["answer"] for each in planned(capsys, *long)["sensitivity"]}
    assert "use_liger_kernel=True" in answers["a fused linear cross entropy"]
    assert main(["plan", *long, "--gpu", "h100", "--gpu-memory", "18GiB"]) == 2
    said = capsys.readouterr()
    assert "nothing legal fits 18.0 GiB" in said.err
    assert "1. a fused linear cross entropy" in said.out
    assert "--overrides fused_loss=true" in said.out


@pytest.mark.slow
def test_what_ships_is_what_a_trace_gives(tmp_path: Path) -> None:
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    shipped = knowledge_path("traces", "llama-3.2-1b.json")
    assert main(["trace", str(shipped), "--out", str(tmp_path / "again.json")]) == 0
    again, before = (json.loads(path.read_text()) for path in (tmp_path / "again.json", shipped))
    assert {**again, "versions": None} == {**before, "versions": None}


def test_a_profile_alone_names_its_model(profile: dict[str, Any], tmp_path: Path) -> None:
    """Nothing else names the model: not its config, nor, for a counted model, its parameters."""
    counted = {name: profile.pop(name) for name in ("parameters", "trained_parameters", "largest_parameter")}
    by_config = dict(profile)
    (tmp_path / "config.json").write_text(json.dumps(by_config))
    del profile["config"]
    (tmp_path / "counted.json").write_text(json.dumps(profile | counted))
    peaks = [_allocated("--trace", str(tmp_path / name)) for name in ("config.json", "counted.json")]
    assert peaks[0] == peaks[1] == _allocated("--model", "qwen3-4b")


def _allocated(*words: str) -> int:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["plan", *words, "--gpu", "h100", "--format", "json"]) == 0
    found: int = json.loads(said.getvalue())["without_offload"]["memory"]["allocated_bytes"]
    return found


def test_tensor_memory_sets_nothing_aside(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--model", "qwen3-4b", "--tensor-memory", "30GiB")
    memory = plan["recommendation"]["option"]["memory"]
    assert memory["device_bytes"] == memory["allocated_bytes"] <= 30 * 2**30
    assert "--gpu-memory and --tensor-memory" in refusal(
        capsys, "--model", "qwen3-4b", "--tensor-memory", "30GiB", "--gpu-memory", "40GiB"
    )


def test_no_gradient_waits_where_copies_are_synchronous(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen3-4b", "--tensor-memory", "30GiB"]
    options = [
        planned(capsys, *words, *flag)["recommendation"]["option"] for flag in ([], ["--gradients-at-once"])
    ]
    waiting, at_once = (
        {line["name"]: line["bytes"] for line in option["memory"]["gpu"]} for option in options
    )
    assert waiting["gradients to the host"] == 512 * 2**20
    assert "gradients to the host" not in at_once
    # The room that is left keeps more states on the GPU.
    assert at_once["moments"] > waiting["moments"]


def test_a_mechanism_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen3-4b", "--tensor-memory", "20GiB"]
    used = set(planned(capsys, *words)["recommendation"]["option"]["mechanisms"])
    left_out = planned(capsys, *words, "--without", "recompute")["recommendation"]["option"]["mechanisms"]
    assert "recompute" in used
    assert "recompute" not in left_out


def test_states_are_rounded_only_where_that_is_allowed_and_then_it_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "llama-3-8b", "--gpu-memory", "48GiB"]
    exact = planned(capsys, *words)
    rounded = planned(capsys, *words, "--allow-other-numerics")
    assert "streamed_states" not in exact["execute"]["optimizer"]
    states = rounded["execute"]["optimizer"]["streamed_states"]
    option = rounded["recommendation"]["option"]
    assert f"streamed as {states} states" in option["label"]
    assert option["time"]["step_s"] < 0.95 * exact["recommendation"]["option"]["time"]["step_s"]
    assert_follows(rounded, "plan")


def test_exact_states_are_kept_where_rounding_gains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--model", "llama-3.2-1b", "--gpu-memory", "70GiB", "--allow-other-numerics")
    assert "optimizer" not in plan["execute"]


def test_pinned_memory_is_a_budget_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen3-4b", "--gpu-memory", "60GiB"]
    free = planned(capsys, *words)["recommendation"]["option"]
    capped = planned(capsys, *words, "--pinned-memory", "1GiB")
    option = capped["recommendation"]["option"]
    assert option["memory"]["pinned_bytes_per_node"] <= 2**30 < free["memory"]["pinned_bytes_per_node"]
    assert capped["budget"]["pinned_bytes_per_node"] == capped["execute"]["pinned_limit_bytes"] == 2**30
    assert option["time"]["step_s"] >= free["time"]["step_s"]
    assert_follows(capped, "plan")


def test_what_may_not_be_pinned_is_pageable_and_never_faster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-3-8b", "--gpu-memory", "30GiB"]
    free, capped, tight = (
        planned(capsys, *words, *limit)["recommendation"]["option"]
        for limit in ([], ["--pinned-memory", "8GiB"], ["--pinned-memory", "1GiB"])
    )
    assert "pageable_bytes_per_node" not in free["memory"]
    for option, limit in ((capped, 8 << 30), (tight, 1 << 30)):
        assert option["memory"]["pinned_bytes_per_node"] == limit
        assert option["memory"]["pageable_bytes_per_node"] > 0
    assert free["time"]["step_s"] <= capped["time"]["step_s"] <= tight["time"]["step_s"]


def test_less_than_a_ring_takes_is_a_limit_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", "llama-3-8b", "--gpu-memory", "48GiB", "--pinned-memory", "1000bytes"]) == 2
    )
    said = capsys.readouterr()
    assert "the least pins" in said.out
    assert "of pinned memory a node" in said.err


def test_a_probe_that_met_the_limit_says_it_to_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {
        "gpu_memory_bytes": 60 << 30, "host_memory_bytes": 200 << 30, "pinned_memory_bytes": 1 << 30,
        "bf16_matmul_TFLOPs": 700, "h2d_pinned_GBs": 55, "d2h_pinned_GBs": 55, "duplex_total_GBs": 100,
        "host_triad_GBs": 100, "cpu_adam_fused_Gparam_s": 4, "cpu_adam_perparam_fused_Gparam_s": 2,
    }  # fmt: skip
    (tmp_path / "machine.json").write_text(json.dumps(rates))
    words = ["plan", "--model", "qwen3-4b", "--profile", str(tmp_path / "machine.json"), "--format", "json"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["budget"]["pinned_bytes_per_node"] == 2**30
    assert any("where this machine refused more" in line for line in plan["assumptions"])


def test_a_config_of_a_model_that_takes_images_says_that_its_decoder_is_planned(
    tmp_path: Path, profile: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {
        "model_type": "some_vlm",
        "text_config": profile["config"],
        "vision_config": {"hidden_size": 1024},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    plan = planned(capsys, tmp_path / "config.json")
    assert plan["model"]["source"].endswith(
        "the shape of its text decoder; offload trace counts the whole model"
    )


AXOLOTL = """\
base_model: Qwen/Qwen3-4B
sequence_len: 8192
micro_batch_size: 4
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: true
gradient_checkpointing: true
"""
CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]"
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_glu_activation: true"


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_profile_leaves_a_framework_its_precision_and_its_loss(is_fused: bool, tmp_path: Path) -> None:
    """Trained in bf16 without masters, as this framework does; a fused loss never has all logits at once."""
    (tmp_path / "run.yaml").write_text(AXOLOTL + CUT * is_fused)
    shipped, given = (
        _lines(str(tmp_path / "run.yaml"), "--gpus", "1", *words) for words in ((), ("--trace", str(QWEN)))
    )
    assert shipped == given
    assert "master weights" not in given
    assert given["moments"] == pytest.approx(4 * 4_022_468_096, rel=1e-3)
    logits = 12 * 4 * 8192 * 151936
    assert (given["logits, loss and work"] > logits) == (not is_fused)


@pytest.mark.parametrize(
    ("more", "is_traced"),
    [
        ("", True),
        (CUT, True),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_glu_activation: true", False),
        ("adapter: lora\nlora_r: 16\nlora_target_linear: true", False),
        ("unfrozen_parameters: ['model.layers.3[0-5].mlp']", False),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}", False),
    ],
)
def test_a_framework_that_runs_the_traced_code_is_planned_by_what_ships(
    more: str, is_traced: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(AXOLOTL + more)
    main(["plan", str(tmp_path / "run.yaml"), "--gpu", "b200", "--gpus", "2", "--format", "json"])
    plan = json.loads(capsys.readouterr().out)
    assert any("Qwen3ForCausalLM traced" in line for line in plan["assumptions"]) == is_traced


def test_a_profile_of_plain_kernels_is_refused_where_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(AXOLOTL + LIGER)
    assert "fused kernels" in refusal(capsys, tmp_path / "run.yaml", "--gpus", "1", "--trace", QWEN)


def _lines(*words: str) -> dict[str, int]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main(["plan", *words, "--gpu", "h100", "--format", "json"])
    lines = json.loads(said.getvalue())["as_it_is"]["memory"]["gpu"]
    return {line["name"]: line["bytes"] for line in lines}
