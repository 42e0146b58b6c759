# SPDX-License-Identifier: Apache-2.0
"""A plan reads Accelerate's file as it reads Axolotl's: the same run has the same memory, in the file's own keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main

FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_offload_params: {offload}
  fsdp_activation_checkpointing: true
num_machines: 1
num_processes: 8
"""
AXOLOTL = """\
base_model: Qwen/Qwen3-8B
sequence_len: 4096
micro_batch_size: 1
bf16: true
gradient_checkpointing: true
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
  offload_params: {offload}
"""
DEEPSPEED = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
num_processes: 4
"""


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(text: str, *arguments: str) -> dict[str, Any]:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        assert main(["plan", str(path), *arguments, "--format", "json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return run


@pytest.mark.parametrize("offload", ["false", "true"])
def test_an_fsdp2_run_is_the_same_in_either_file(plan: Any, offload: str) -> None:
    machine = ["--gpu", "h100", "--gpu-memory", "24GiB", "--host-memory", "900GiB"]
    script = ["--model", "qwen3-8b", "--overrides", "seq_length=4096"]
    ours = plan(FSDP2.format(offload=offload), *script, *machine)
    theirs = plan(AXOLOTL.format(offload=offload), "--gpus", "8", *machine)
    assert ours["as_it_is"]["memory"] == theirs["as_it_is"]["memory"]


def test_what_it_proposes_is_in_the_files_own_keys(plan: Any) -> None:
    found = plan(
        FSDP2.format(offload="false"),
        *("--model", "qwen3-8b", "--overrides", "seq_length=4096"),
        *("--gpu", "h100", "--gpu-memory", "20GiB", "--host-memory", "900GiB"),
    )
    settings = found["recommendation"]["patch"]["settings"]
    assert settings == {"accelerate.fsdp_config.fsdp_offload_params": True}
    assert found["recommendation"]["patch"]["text"] == "fsdp_config:\n  fsdp_offload_params: true\n"


def test_deepspeeds_devices_are_chosen_in_the_file(plan: Any) -> None:
    found = plan(
        DEEPSPEED,
        *("--model", "qwen3-8b", "--overrides", "seq_length=2048", "recompute_granularity=full"),
        *("--gpu", "h100", "--gpu-memory", "24GiB", "--host-memory", "900GiB"),
    )
    text = found["recommendation"]["patch"]["text"]
    assert text.startswith("deepspeed_config:\n")
    assert "offload_optimizer_device: cpu" in text


def test_megatron_under_accelerate_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MEGATRON_LM\n")
    assert main(["plan", str(path), "--model", "qwen3-8b", "--gpu", "h100"]) == 2
    assert "megatron-lm" in capsys.readouterr().err


ZERO2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config: {zero_stage: 2, offload_param_device: cpu}
num_processes: 4
"""
DPO = """\
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer
args = DPOConfig(output_dir="out", per_device_train_batch_size=1, gradient_checkpointing=True)
trainer = DPOTrainer("mistralai/Mixtral-8x7B-v0.1", args=args, peft_config=LoraConfig(r=16))
"""
OUT = (
    'Traceback (most recent call last):\n  File "/e/deepspeed/runtime/engine.py", line 1110, in _configure_model\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 2 has a total capacity of 79.15 "
    "GiB of which 65.38 MiB is free. Of the allocated memory 78.40 GiB is allocated by PyTorch.\n"
)


def test_a_stage_that_keeps_all_weights_is_raised_where_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "accel.yaml").write_text(ZERO2, encoding="utf-8")
    main(["plan", str(tmp_path / "accel.yaml"), "--model", "mixtral-8x7b", "--gpu", "h100"])
    assert "1. ZeRO stage 3" in (out := capsys.readouterr().out)
    assert "zero_stage: 3" in out


def test_the_launchers_file_beside_a_trainers_script_says_how_it_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"accel.yaml": ZERO2, "dpo.py": DPO, "out.log": OUT}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [str(tmp_path / name) for name in ("out.log", "accel.yaml", "dpo.py")]
    assert main(["diagnose", *files, "--model", "mixtral-8x7b"]) == 1
    out = capsys.readouterr().out
    assert "Parameter offload needs ZeRO-3" in out
    assert "frees weights or states alone" not in out  # it frees nothing at this stage
    assert "on 4 GPUs" in out
    assert f"# in {tmp_path / 'accel.yaml'}:\n  deepspeed_config:\n    zero_stage: 3" in out


def test_a_trainers_command_is_the_configuration_beside_its_launchers_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "accelerate launch --config_file accel.yaml src/train.py --stage sft --finetuning_type lora --do_train"
    for name, text in {"accel.yaml": ZERO2, "run.sh": command, "out.log": OUT}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [str(tmp_path / name) for name in ("out.log", "accel.yaml", "run.sh")]
    assert main(["diagnose", *files]) == 1
    shown = capsys.readouterr()
    assert "run.sh is read as the configuration" in shown.err
    assert "Parameter offload needs ZeRO-3" in shown.out
