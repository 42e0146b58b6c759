# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes quantizes linear layers: experts in transformers 4, in 5 only where a framework packs them itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main

AXOLOTL = """\
base_model: Qwen/Qwen3-30B-A3B
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
sequence_len: 2048
micro_batch_size: 1
gradient_checkpointing: true
bf16: true
"""
TRAINER = """\
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model

model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-30B-A3B", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
)
model = get_peft_model(model, LoraConfig(r=16))
args = TrainingArguments(output_dir="o", per_device_train_batch_size=1, gradient_checkpointing=True, bf16=True)
Trainer(model=model, args=args).train()
"""
UNSLOTH = """\
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained("Qwen/Qwen3-30B-A3B", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
SFTTrainer(model=model, args=SFTConfig(output_dir="o", per_device_train_batch_size=1, bf16=True)).train()
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-30B-A3B
stage: sft
do_train: true
finetuning_type: lora
quantization_bit: 4
cutoff_len: 2048
template: qwen3
output_dir: o
per_device_train_batch_size: 1
bf16: true
"""
EXPERTS = 48 * 128 * 3 * 2048 * 768  # layers, experts, matrices of each
OTHERS = 30_532_122_624 - EXPERTS
PACKED = 0.53
WIDE = "stay in 16 bits"


Planned = Callable[..., dict[str, Any]]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    """Return the plan for a file of this name and text, on a GPU that all of the model fits."""

    def plan(name: str, text: str, *options: str) -> dict[str, Any]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        main(["plan", str(tmp_path / name), "--gpu", "h200", "--format", "json", *options])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return plan


def base_bytes(plan: dict[str, Any]) -> int:
    lines = plan["as_it_is"]["memory"]["gpu"]
    return sum(line["bytes"] for line in lines if line["name"] == "base weights")


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("run.yaml", AXOLOTL, ["--target", "axolotl==0.20.0"]),
        ("run.yaml", AXOLOTL, []),
        ("train.py", TRAINER, ["--target", "transformers==5.10.4"]),
        ("run.yaml", LLAMA_FACTORY, ["--target", "transformers==5.5.0"]),
    ],
)
def test_fused_experts_stay_wide_and_the_plan_says_so(
    name: str, text: str, options: list[str], planned: Planned
) -> None:
    plan = planned(name, text, *options)
    assert 2 * EXPERTS < base_bytes(plan) < 2 * (EXPERTS + OTHERS)
    assert any(WIDE in each for each in plan["assumptions"])


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("run.yaml", AXOLOTL, ["--target", "axolotl==0.13.2"]),
        ("run.yaml", AXOLOTL + "quantize_moe_experts: true\n", ["--target", "axolotl==0.20.0"]),
        ("train.py", TRAINER, ["--target", "transformers==4.57.3"]),
        ("train.py", UNSLOTH, ["--target", "transformers==5.10.4"]),
        ("run.yaml", LLAMA_FACTORY, ["--target", "llamafactory==0.9.4"]),
    ],
)
def test_quantized_experts_are_counted_in_four_bits(
    name: str, text: str, options: list[str], planned: Planned
) -> None:
    plan = planned(name, text, *options)
    assert base_bytes(plan) < PACKED * EXPERTS + 2 * OTHERS
    assert not any(WIDE in each for each in plan["assumptions"])


def test_a_model_whose_experts_were_fused_before_has_no_older_release_as_its_remedy(planned: Planned) -> None:
    text = TRAINER.replace("Qwen3-30B", "Qwen3-VL-30B")
    plan = planned("train.py", text, "--target", "transformers==4.57.3")
    assert base_bytes(plan) > 2 * EXPERTS
    (said,) = (each for each in plan["assumptions"] if WIDE in each)
    assert "transformers==4" not in said


@pytest.mark.parametrize("targets", ["lora_target_modules: [q_proj]", "lora_target_linear: true"])
def test_the_way_to_fit_quantizes_experts_without_adapters_on_all_linears(
    targets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = AXOLOTL.replace("lora_target_modules: [q_proj, k_proj, v_proj, o_proj]", targets)
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    main(["plan", str(tmp_path / "run.yaml"), "--gpu", "rtx4090"])
    said = capsys.readouterr().out
    assert "  quantize_moe_experts: true\n" in said
    assert ("  lora_target_linear: false\n" in said) is ("linear" in targets)


def test_a_model_with_a_quantization_of_its_own_is_not_advised_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Axolotl 0.12 to 0.21 refuses both (examples/gpt-oss)."""
    own = "model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs:\n  dequantize: true\n"
    text = AXOLOTL.replace("Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b").replace("qlora", "lora")
    (tmp_path / "run.yaml").write_text(text.replace("load_in_4bit: true\n", own), encoding="utf-8")
    main(["plan", str(tmp_path / "run.yaml"), "--gpu", "rtx4090"])
    said = capsys.readouterr().out
    assert "nothing fits" in said
    assert "load_in_4bit" not in said


def test_a_base_that_a_script_packs_is_offered_neither_bits_nor_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FSDP flattens no integers, and bitsandbytes stores 4 bits as such unless it is told otherwise."""
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    main(["plan", str(tmp_path / "train.py"), "--gpu", "rtx4090", "--target", "transformers==5.10.4"])
    said = capsys.readouterr().out
    assert "nothing fits" in said
    assert "full_shard" not in said
    assert "load_in_4bit" not in said
