# SPDX-License-Identifier: Apache-2.0
"""One configuration of each dialect, from the file to the patch."""

import json
from pathlib import Path
from typing import Any

import pytest
from schemas import assert_follows

from skill_tools.__main__ import main

BRIDGE = """\
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  expert_model_parallel_size: 4
  expert_tensor_parallel_size: 1
  sequence_parallel: true
  seq_length: 4096
  cpu_offloading: true
  cpu_offloading_num_layers: 24
optimizer:
  optimizer_cpu_offload: true
  optimizer_offload_fraction: 0.5
  use_precision_aware_optimizer: false
train:
  global_batch_size: 64
  micro_batch_size: 1
"""
MEGATRON_LM = """\
NNODES=2
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear \\
  --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 \\
  --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 64 --bf16 \\
  --transformer-impl transformer_engine
"""
AXOLOTL = """\
base_model: Qwen/Qwen3-32B
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 1
optimizer: adamw_torch_fused
bf16: true
gradient_checkpointing: true
datasets: [{path: mhenrichsen/alpaca_2k_test, type: alpaca}]
"""


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(name: str, text: str, *arguments: str) -> dict[str, Any]:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        code = main(["plan", str(path), *arguments, "--format", "json"])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert_follows(document, "plan")
        return document | {"code": code}

    return run


def test_a_bridge_file_gets_dotted_overrides_and_the_rules_that_it_breaks(plan: Any) -> None:
    found = plan(
        "run.yaml",
        BRIDGE,
        "--model",
        "qwen3-30b-a3b",
        "--gpus",
        "16",
        "--gpu",
        "h100",
        "--gpu-memory",
        "48GiB",
    )
    patch = found["recommendation"]["patch"]
    assert "model.cpu_offloading=false" in patch["overrides"]
    assert {rule["rule"] for rule in found["as_it_is"]["breaks"]} >= {"la-pp"}
    assert any("only the two moments move" in line for line in found["assumptions"])
    ruled_out = {each["label"]: {rule["rule"] for rule in each["rules"]} for each in found["ruled_out"]}
    assert "la-pp" in ruled_out["layer-level activation offload"]


def test_a_launch_script_gets_flags(plan: Any) -> None:
    found = plan("run.sh", MEGATRON_LM, "--gpu-memory", "60GiB")
    assert found["layout"]["gpus"] == 16
    assert "--use-distributed-optimizer" in found["recommendation"]["patch"]["overrides"].split()
    assert found["model"]["parameters"] == 8030261248


def test_an_axolotl_file_gets_yaml(plan: Any) -> None:
    found = plan("qlora.yaml", AXOLOTL, "--gpu", "rtx4090", "--gpu-memory", "26GiB")
    assert found["recommendation"]["option"]["memory"]["device_bytes"] <= 26 * 2**30
    assert found["recommendation"]["patch"]["text"].startswith("activation_offloading: hidden_states")


def test_a_what_if_is_compared_with_the_plan_without_it(plan: Any) -> None:
    found = plan("run.sh", MEGATRON_LM, "--gpu-memory", "60GiB", "--what-if=--seq-length 4096")
    assert found["layout"]["seq_length"] == 4096
    assert found["sensitivity"][0]["change"] == "without the what-if"


def test_an_unknown_shape_is_answered_by_situation_and_ends_as_unusable(plan: Any) -> None:
    found = plan("run.yaml", "model: {pipeline_model_parallel_size: 2}\ntrain: {global_batch_size: 8}\n")
    assert (found["code"], found["kind"]) == (2, "by-situation")
    assert found["decisions"][0]["applies"]


def test_the_floor_and_what_lowers_it_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(MEGATRON_LM, encoding="utf-8")
    assert main(["plan", str(path), "--gpu-memory", "20GiB"]) == 2
    out, err = capsys.readouterr()
    assert "at least" in err
    assert "launch on 64 GPUs" in out


WHOLE_FRACTION = BRIDGE.replace("fraction: 0.5", "fraction: 1.0").replace(
    "cpu_offloading: true", "bf16: true"
)
RESUMED = WHOLE_FRACTION + (
    "checkpoint: {load: /run/1, save: /run/1, ckpt_format: torch_dist, load_optim: true, finetune: false}\n"
)
BUDGET = ("--model", "qwen3-30b-a3b", "--gpus", "16", "--gpu", "h100", "--gpu-memory", "46GiB")
RELEASE = ("--target", "megatron-core==0.18.2")


def lint_code(text: str, name: str, tmp_path: Path, *arguments: str) -> int:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return main(["lint", str(path), *arguments])


def test_the_patch_states_the_fraction_where_the_file_offloads_more(plan: Any) -> None:
    found = plan("run.yaml", WHOLE_FRACTION, *BUDGET)["recommendation"]
    fraction = found["option"]["settings"]["optimizer_offload_fraction"]
    assert 0 < fraction < 1
    assert f"optimizer.optimizer_offload_fraction={fraction}" in found["patch"]["overrides"]


def test_a_resumed_run_gets_the_whole_optimizer_in_a_layout_that_resumes(plan: Any, tmp_path: Path) -> None:
    """A partial offload restarts Adam's step on a resume, which is an error; the plan may not propose it."""
    found = plan("run.yaml", RESUMED, *BUDGET, *RELEASE)
    patch = found["recommendation"]["patch"]
    assert patch["settings"].get("optimizer_offload_fraction", 1.0) == 1.0
    assert patch["settings"]["dist_ckpt_optim_fully_reshardable"] is True
    assert any("saved before this change" in line for line in found["assumptions"])
    assert lint_code(RESUMED, "again.yaml", tmp_path, *RELEASE, "--overrides", patch["overrides"]) == 0


def test_modules_of_a_switch_that_goes_off_are_removed(plan: Any) -> None:
    script = MEGATRON_LM.replace(
        "--bf16", "--bf16 --fine-grained-activation-offloading --offload-modules core_attn"
    )
    patch = plan("run.sh", script, "--gpu", "h100", "--gpu-memory", "140GiB")["recommendation"]["patch"]
    assert "--fine-grained-activation-offloading" in patch["text"]
    assert "--offload-modules" in patch["text"]


FINE_GRAINED = BRIDGE.replace(
    "\noptimizer:", "\n  fine_grained_activation_offloading: true\n  offload_modules: [moe_act]\noptimizer:"
)


def test_a_key_that_the_release_lacks_is_removed_and_not_switched_off(
    plan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (*BUDGET, "--target", "megatron-core==0.15.3")
    patch = plan("run.yaml", FINE_GRAINED, *asked)["recommendation"]["patch"]
    removal = "remove model.fine_grained_activation_offloading model.offload_modules"
    assert patch["removal"] == removal
    assert "fine_grained" not in patch["overrides"] + patch["text"]
    main(["plan", str(tmp_path / "run.yaml"), *asked])
    assert f"\n  {removal}\n" in capsys.readouterr().out


def test_a_key_that_the_release_has_is_switched_off(plan: Any) -> None:
    patch = plan("run.yaml", FINE_GRAINED, *BUDGET, *RELEASE)["recommendation"]["patch"]
    assert "model.fine_grained_activation_offloading=false" in patch["overrides"]
    assert not patch["removal"]


def test_an_optimizer_that_comes_back_leaves_no_fraction_behind(plan: Any, tmp_path: Path) -> None:
    found = plan("run.yaml", WHOLE_FRACTION, *BUDGET[:-1], "140GiB", *RELEASE)
    overrides = found["recommendation"]["patch"]["overrides"]
    assert "optimizer.optimizer_cpu_offload=false" in overrides
    assert lint_code(WHOLE_FRACTION, "again.yaml", tmp_path, *RELEASE, "--overrides", overrides) == 0
