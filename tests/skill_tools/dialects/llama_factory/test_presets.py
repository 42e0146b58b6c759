# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's offloading presets for DeepSpeed: planned by their names, and offered if nothing fits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skill_tools.__main__ import main

YAML = """\
model_name_or_path: Qwen/Qwen2.5-3B
stage: sft
do_train: true
finetuning_type: full
dataset: a
template: qwen
cutoff_len: 4096
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
MACHINE = ("--gpu", "rtx4090", "--host-memory", "128GiB")


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    def plan(text: str, *words: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        monkeypatch.chdir(tmp_path)
        main(["plan", "run.yaml", *MACHINE, *words])
        return capsys.readouterr().out

    return plan


def test_a_preset_that_is_not_here_offloads_as_its_name_says(said: Callable[..., str]) -> None:
    out = said(YAML + "deepspeed: examples/deepspeed/ds_z2_offload_config.json\n", "--gpus", "1")
    assert "fits as it is" in out
    assert "host: 57.5 GiB" in out


def test_where_nothing_fits_one_gpu_the_preset_that_offloads_does(said: Callable[..., str]) -> None:
    first = said(YAML).partition("\n2. ")[0]
    assert "1. the optimizer on the CPU by ZeRO-2" in first
    assert "deepspeed: examples/deepspeed/ds_z2_offload_config.json" in first
    assert "a step of 32768 tokens" in first
    assert "ds-accumulation-drops-gradients" in first


def test_a_quantized_base_is_offered_none(said: Callable[..., str]) -> None:
    text = YAML.replace("full", "lora").replace("4096", "262144") + "quantization_bit: 4\n"
    assert "ZeRO-2" not in said(text)
