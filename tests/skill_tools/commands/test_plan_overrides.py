# SPDX-License-Identifier: Apache-2.0
"""An override changes the plan that advises it, or is refused by name: no plan leaves one out without a word."""

import re
from pathlib import Path

import pytest

from skill_tools.__main__ import main

ARGUMENTS = "output_dir='o', learning_rate=1e-5, max_steps=10"
TRAINER = f"""\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
import sys
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")
bs = int(sys.argv[1])
args = TrainingArguments({ARGUMENTS}, per_device_train_batch_size=bs, gradient_checkpointing=True)
Trainer(model=model, args=args).train()
"""
TRL = f"""\
from trl import {{0}}Config, {{0}}Trainer
cfg = {{0}}Config({ARGUMENTS}, per_device_train_batch_size=2)
{{0}}Trainer(model="Qwen/Qwen2.5-7B", args=cfg).train()
"""
INPUTS = {
    "trainer": ("train.py", TRAINER),
    "dpo": ("train.py", TRL.format("DPO")),
    "grpo": ("train.py", TRL.format("GRPO")),
    "axolotl": (
        "run.yaml",
        "base_model: meta-llama/Llama-3.1-8B\nadapter: lora\ndatasets: [{path: x, type: alpaca}]\n",
    ),
    "llama-factory": (
        "run.yaml",
        "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: full\ndataset: x\ndo_train: true\n",
    ),
    "torchtune": (
        "run.sh",
        "tune run full_finetune_single_device --config llama3_1/8B_full_single_device batch_size=1\n",
    ),
    "accelerate": (
        "run.sh",
        "accelerate launch --use_fsdp --num_processes 8 --mixed_precision bf16 mine.py --model meta-llama/Llama-3.1-8B",
    ),
    "megatron-bridge": (
        "run.yaml",
        "model:\n  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 1\ntrain: {}\n",
    ),
}


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], dialect: str, *words: str) -> tuple[str, str]:
    name, text = INPUTS[dialect]
    (tmp_path / name).write_text(text)
    models = ["--model", "llama-3-8b"] if dialect in ("megatron-bridge", "torchtune") else []
    main(["plan", str(tmp_path / name), "--gpus", "8", "--gpu", "h100", "--details", *models, *words])
    return capsys.readouterr()


@pytest.mark.parametrize("dialect", INPUTS)
def test_the_override_that_a_plan_advises_changes_it(
    dialect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = planned(tmp_path, capsys, dialect)
    advised = re.search(r'sequence length \d+.*--overrides(?: |=")([^"]*?)N\b', out)
    assert advised, out
    out, err = planned(tmp_path, capsys, dialect, f"--overrides={advised[1]}512")
    assert " 512 tokens x " in out.splitlines()[0], err


@pytest.mark.parametrize(
    ("dialect", "override", "meant"),
    [
        ("trainer", "max_length=512", "try seq_length"),
        ("trainer", "per_device_batch=2", " or per_device_train_batch_size"),
        ("grpo", "max_length=512", "try seq_length"),
        ("axolotl", "sequence_length=512", "try sequence_len"),
        ("llama-factory", "cutof_len=512", "try cutoff_len"),
        ("megatron-bridge", "model.seq_len=512", "try model.seq_length"),
        ("accelerate", "sequence=512", "--overrides sequence=512"),
    ],
)
def test_an_override_that_nothing_reads_is_refused_by_name(
    dialect: str, override: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = planned(tmp_path, capsys, dialect, "--overrides", override)
    assert not out
    assert meant in err
    assert override.partition("=")[0] in err
    assert (out, err) == planned(tmp_path, capsys, dialect, "--what-if", override)


def test_the_batch_and_the_recomputation_in_a_launch_are_the_scripts_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "accelerate launch --num_processes 4 --use_fsdp --mixed_precision bf16 clm_no_trainer.py "
        "--per_device_train_batch_size=3 --gradient_checkpointing\n"
    )
    main(["plan", str(path), "--model", "llama-3-8b", "--gpu", "h100", "--details"])
    out = capsys.readouterr().out
    assert "x micro-batch 3" in out.splitlines()[0]
    assert "no gradient checkpointing in the script" not in out


def test_an_unread_value_is_given_by_the_frameworks_own_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node $GPUS --colocate --rollout-batch-size 8 "
        "--tensor-model-parallel-size 2 --seq-length 4096 --micro-batch-size 1\n"
    )
    words = ["plan", str(path), "--model", "qwen3-4b", "--gpu", "h100"]
    main(words)
    assert '--overrides="--actor-num-gpus-per-node N"' in capsys.readouterr().out.splitlines()[1]
    main([*words, "--overrides=--actor-num-gpus-per-node 4"])
    assert " on 4 x h100 " in capsys.readouterr().out.splitlines()[0]


def test_a_word_of_our_own_is_no_override(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text("tune run $RECIPE --config llama3_1/8B_full batch_size=1 tokenizer.max_seq_len=512\n")
    main(["plan", str(path), "--model", "llama-3-8b", "--gpu", "h100", "--details"])
    out = capsys.readouterr().out
    assert " 512 tokens x micro-batch 1" in out
    assert "torchtune.recipe" not in out


@pytest.mark.parametrize(
    "words", [("seq_length=256", "seq_length=512"), ("seq_length=512", "seq_length=512", "")]
)
def test_the_last_of_two_overrides_counts(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--gpus", "8", "--gpu", "h100", "--overrides", *words]) == 0
    assert " 512 tokens x " in capsys.readouterr().out.splitlines()[0]


def test_a_part_of_a_configuration_says_at_once_how_it_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    assert main(["plan", str(path), "--gpus", "8", "--gpu", "h100"]) == 2
    out, error = capsys.readouterr()
    assert not out
    words = error.partition(" plan ")[2].partition(", as a Trainer")[0]
    words = words.replace("NAME", "qwen3-8b").replace("max_length=N", "max_length=512").replace("=N", "=3")
    assert main(["plan", "--gpus", "8", "--gpu", "h100", *words.split()]) == 0
    assert " 512 tokens x micro-batch 3" in capsys.readouterr().out.splitlines()[0]


def test_a_section_that_takes_any_name_says_that_one_counts_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = planned(tmp_path, capsys, "torchtune", "--overrides", "tokenizer.max_seq_length=512")
    assert "rests most on: --overrides tokenizer.max_seq_length: counted for nothing" in out
    assert "tokenizer.max_seq_len is" in out


def test_a_value_that_cannot_be_read_is_no_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = planned(tmp_path, capsys, "trainer")
    assert (
        "per_device_train_batch_size has a value that only the start of the run knows" in out.splitlines()[1]
    )
    assert "the default" not in out


def test_a_length_that_no_argument_says_is_cut_in_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = planned(
        tmp_path, capsys, "trainer", "--overrides", "seq_length=262144", "per_device_train_batch_size=1"
    )
    assert "in the script: samples of" in out
    assert "max_length" not in out


@pytest.mark.parametrize("first", [256, 512])
def test_the_last_override_of_a_name_counts(
    first: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = planned(tmp_path, capsys, "trainer", "--overrides", f"seq_length={first}", "seq_length=512")
    assert " 512 tokens x " in out.splitlines()[0], err
    main(
        [
            "plan",
            "--model",
            "llama-3-8b",
            "--gpu",
            "h100",
            "--overrides",
            f"seq_length={first}",
            "seq_length=512",
        ]
    )
    assert " 512 tokens x " in capsys.readouterr().out
