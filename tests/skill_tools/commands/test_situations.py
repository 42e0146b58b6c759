# SPDX-License-Identifier: Apache-2.0
"""A run that does not fit or died: its log or configuration, one command, and the lines that mend it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main

AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3.1-8B
adapter: lora
lora_r: 32
lora_target_linear: true
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
learning_rate: 0.0002
bf16: true
gradient_checkpointing: true
activation_offloading: true
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
"""
OUT_OF_MEMORY = (
    "NVIDIA GeForce RTX 4090\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total "
    "capacity of 23.52 GiB of which 1.21 GiB is free. Process 4121 has 22.30 GiB in use. Of the allocated memory "
    "21.34 GiB is allocated by PyTorch, and 512.44 MiB is reserved by PyTorch but unallocated.\n"
)
DEEPSPEED = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
LAUNCH = """\
deepspeed --num_gpus 4 train.py --model_name_or_path meta-llama/Llama-3.1-8B --output_dir out --deepspeed ds.json \\
  --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --learning_rate 1e-5 \\
  --dataset_name tatsu-lab/alpaca --max_length 4096 --gradient_checkpointing true --bf16 true
"""
KILLED = """\
[utils.py:789:see_memory_usage] CPU Virtual Memory:  used = 187.4 GB, percent = 74.6%
[launch.py:319:sigkill_handler] Killing subprocess 4121
[launch.py:325:sigkill_handler] ['python3', '-u', 'train.py', '--local_rank=3'] exits with return code = -9
"""


def test_a_lora_run_s_log_ends_in_its_rule_and_what_fits_the_gpu_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(AXOLOTL, encoding="utf-8")
    (tmp_path / "train.log").write_text(OUT_OF_MEMORY, encoding="utf-8")
    assert main(["diagnose", str(tmp_path / "train.log"), str(tmp_path / "run.yaml")]) == 1
    out = capsys.readouterr().out
    assert "rule: ax-ao-turns-gc-off " in out
    assert "change:" not in out, "the plan's lines alone: the rule's own would not be enough"
    assert "GPU rtx4090" in out
    assert "liger_fused_linear_cross_entropy: true" in out


def test_a_run_that_the_host_killed_is_planned_with_less_host_memory_and_its_lines_mend_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(DEEPSPEED, indent=1), encoding="utf-8")
    Path("run.sh").write_text(LAUNCH, encoding="utf-8")
    Path("train.log").write_text(KILLED, encoding="utf-8")
    assert main(["diagnose", "train.log", "run.sh", "--gpu", "a100"]) == 1
    out = capsys.readouterr().out
    assert "cause: DeepSpeed's launcher saw a rank killed with SIGKILL" in out
    assert "host memory 251.2 GiB" in out
    assert "on 4 x a100" in out
    assert "--gradient_checkpointing false\n" in out
    assert "change:" not in out
    changed = next(line for line in out.splitlines() if line.startswith('  "zero_optimization"'))
    mended: dict[str, Any] = copy.deepcopy(DEEPSPEED)
    for part, change in json.loads(f"{{{changed}}}")["zero_optimization"].items():
        mended["zero_optimization"][part] |= change
    Path("ds.json").write_text(json.dumps(mended, indent=1), encoding="utf-8")
    Path("run.sh").write_text(LAUNCH.replace("checkpointing true", "checkpointing false"), encoding="utf-8")
    assert main(["plan", "run.sh", "--gpu", "a100", "--host-memory", "108GiB"]) == 0
    assert "fits as it is: nothing to change" in capsys.readouterr().out
    assert main(["lint", "run.sh"]) == 0


BRIDGE = """\
# megatron-core==0.18.2, transformer-engine==2.12.0
torchrun --nnodes 2 --nproc-per-node 8 scripts/training/run_recipe.py --recipe qwen3_30b_a3b_pretrain_config \\
  model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=2 model.expert_model_parallel_size=4 \\
  model.seq_length=4096 train.micro_batch_size=1 train.global_batch_size=256 \\
  model.cpu_offloading=true model.cpu_offloading_num_layers=16 CHANGE
"""
MEGATRON_LM = """\
# megatron-core==0.18.2, transformer-engine==2.11.0
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --use-mcore-models --num-layers 80 --hidden-size 8192 \\
  --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192 \\
  --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm --swiglu \\
  --disable-bias-linear --untie-embeddings-and-output-weights --transformer-impl transformer_engine \\
  --vocab-size 128256 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel \\
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 512 --bf16 CHANGE
"""


@pytest.mark.parametrize(
    ("script", "budget"), [(BRIDGE, "40GB"), (MEGATRON_LM, "80GB")], ids=["megatron-bridge", "megatron-lm"]
)
def test_a_launch_script_with_the_plan_s_lines_lints_clean_and_has_nothing_left_to_change(
    script: str, budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, machine = tmp_path / "run.sh", ["--gpu", "h100", "--gpu-memory", budget]
    path.write_text(script.replace(" CHANGE", ""), encoding="utf-8")
    assert main(["plan", str(path), *machine]) == 0
    answer = capsys.readouterr().out
    assert len(answer.splitlines()) <= 10
    *exported, change = (line.strip() for line in answer.splitlines() if line.startswith("  "))
    path.write_text("\n".join([*exported, script.replace("CHANGE", change)]), encoding="utf-8")
    assert main(["lint", str(path)]) == 0
    assert main(["plan", str(path), *machine]) == 0
    assert "fits as it is: nothing to change" in capsys.readouterr().out


def test_a_larger_host_keeps_what_the_killed_run_held_beside_its_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(DEEPSPEED, indent=1), encoding="utf-8")
    Path("run.sh").write_text(LAUNCH.replace("meta-llama/Llama-3.1-8B", "./mine"), encoding="utf-8")
    Path("train.log").write_text(f"{KILLED}finished: 8,030,261,248 parameters\n", encoding="utf-8")
    larger = ["--gpu", "a100", "--host-memory", "400GiB", "--format", "json"]
    assert main(["diagnose", "train.log", "run.sh", *larger]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["model"] == "llama-3-8b", "the file names none that is known"
    asked = found["plan"]["budget"]["host_bytes_per_node"] / 2**30
    # Of 8.03e9 parameters 20 bytes each, and the loss of four ranks to blocks of 4 GiB: two of 2 B and two of 4 B.
    assert asked == pytest.approx(149.6 + 4.3 + 400 - 251.2, abs=0.2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu-memory", "9" * 5000],
        ["--step-time", "1e308"],
        ["--gpus", "9" * 5000],
        ["--overrides", "num_layers=1e9"],
        ["--overrides", "num_layers=1e308"],
    ],
)
def test_absurd_numbers_are_one_short_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-8b", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert len(err) < 600
