# SPDX-License-Identifier: Apache-2.0
"""A plan for a script has the form of that script: options for a command, keywords for Python."""

import ast
import json
from pathlib import Path

import pytest

from skill_tools.__main__ import main

MACHINE = (
    "--model",
    "llama-3-8b",
    "--gpus",
    "8",
    "--gpu",
    "rtx4090",
    "--gpu-memory",
    "28GiB",
    "--host-memory",
    "400GB",
)
TRAINER = (
    "torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-3.1-8B --output_dir out "
    "--dataset_name imdb --learning_rate 1e-5 --per_device_train_batch_size 4 --bf16 true {}\n"
)
COMMANDS = {
    "fsdp": (
        TRAINER.format('--fsdp "full_shard" {}'),
        "--fsdp_config '{\"activation_checkpointing\": true}'",
    ),
    "accelerate": (
        "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 --mixed_precision bf16 {} train.py "
        "--model_name_or_path meta-llama/Llama-3.1-8B\n",
        "--fsdp_activation_checkpointing true",
    ),
    "torchtune": (
        "tune run --nproc_per_node 8 full_finetune_distributed --config llama3_1/8B_full "
        "batch_size=4 enable_activation_checkpointing=false {}\n",
        "enable_activation_checkpointing=true enable_activation_offloading=true",
    ),
}
PYTHON = {
    "trainer": (
        "from transformers import Trainer, TrainingArguments\n\n"
        'args = TrainingArguments("out", per_device_train_batch_size=4, bf16=True, fsdp="full_shard", '
        'fsdp_config={"fsdp_version": 2})\n',
        "fsdp_config={'fsdp_version': 2, 'activation_checkpointing': True}, fsdp='full_shard offload'",
    ),
    "accelerate": (
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n\n"
        "plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)\n"
        'accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")\n',
        "FullyShardedDataParallelPlugin(activation_checkpointing=True, cpu_offload=False)",
    ),
}


def answer(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    path.write_text(text, encoding="utf-8")
    assert main(["plan", str(path), *MACHINE]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_options_make_the_command_fit(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, options = COMMANDS[name]
    written = answer(tmp_path / "run.sh", command.format(""), capsys)[3].strip()
    assert written.startswith(options)
    again = answer(tmp_path / "run.sh", command.format(written), capsys)
    assert again[1] == "fits as it is: nothing to change"


@pytest.mark.parametrize("name", PYTHON)
def test_keywords_are_python(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, keywords = PYTHON[name]
    written = answer(tmp_path / "train.py", script, capsys)[3].strip()
    assert written == keywords
    ast.parse(f"make({written})")


def test_deepspeed_s_share_of_the_optimizer_is_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smaller one that fits is no plan: no printed line would make it smaller."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    script = tmp_path / "run.sh"
    script.write_text(TRAINER.format(f"--gradient_checkpointing true --deepspeed {tmp_path / 'ds.json'}"))
    main(["plan", str(script), *MACHINE[:-1], "60GB", "--gpu-memory", "80GiB"])
    out = capsys.readouterr().out
    assert "does not fit as it is" in out
    assert "nothing to change" not in out
    assert "optimizer offload" not in out


MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --ffn-hidden-size 14336 --swiglu --vocab-size 128256 "
    "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --max-position-embeddings 8192 "
    "--tensor-model-parallel-size {} --pipeline-model-parallel-size {} --micro-batch-size {} --seq-length {}"
)
A100 = ("--gpu", "a100", "--gpus", "8")


def first_lines(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    script = tmp_path / "run.sh"
    script.write_text(f"{text}\n")
    main(["plan", str(script), *A100, *more])
    return capsys.readouterr().out.splitlines()[:2]


def test_the_default_of_an_argument_of_the_script_is_its_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = first_lines(MEGATRON.format(4, 2, 2, 8192), tmp_path, capsys)
    by_default = MEGATRON.format("${1:-4}", "$PP", "${3-2}", "${10:-8192}")
    assert first_lines(f"PP=${{2:-2}}\n{by_default}", tmp_path, capsys) == written


@pytest.mark.parametrize(
    ("text", "model", "said"),
    [
        (
            MEGATRON.format("$1", 2, "${10}", "$SEQ"),
            [],
            "--micro-batch-size, --seq-length and --tensor-model-parallel-size have values that only the start of the "
            'run knows, so defaults count; --overrides="--micro-batch-size N --seq-length N '
            '--tensor-model-parallel-size N"',
        ),
        (
            f"{MEGATRON.format(4, 2, 1, 8192)} --optimizer-cpu-offload --optimizer-offload-fraction $1",
            [],
            "--optimizer-offload-fraction has a value that only the start of the run knows, so its default counts; "
            '--overrides="--optimizer-offload-fraction N"',
        ),
        (
            "python scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config "
            "model.tensor_model_parallel_size=$1 train.micro_batch_size=1",
            ["--model", "llama-3-8b"],
            "model.tensor_model_parallel_size has a value that only the start of the run knows, so its default "
            "counts; --overrides model.tensor_model_parallel_size=N",
        ),
        (
            "llamafactory-cli train --model_name_or_path meta-llama/Llama-3.1-8B --stage sft --finetuning_type lora "
            "--per_device_train_batch_size $1 --cutoff_len 2048",
            [],
            "per_device_train_batch_size has a value that only the start of the run knows, so its default counts; "
            "--overrides per_device_train_batch_size=N",
        ),
    ],
)
def test_what_only_the_start_of_the_run_knows_is_told_before_the_verdict(
    text: str, model: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_lines(text, tmp_path, capsys, *model)[1] == said
    if 'size N"' in said:  # as it is told
        given = said.partition('--overrides="')[2].rstrip('"').replace(" N", " 2")
        assert not first_lines(text, tmp_path, capsys, "--overrides", given)[1].startswith("--")


def test_an_impossible_size_names_the_values_that_are_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(MEGATRON.format("$1", 1, 1, 8192) + " --global-batch-size 4\n")
    assert main(["plan", str(script), *A100]) == 2
    assert "where --tensor-model-parallel-size has a value that only the start" in capsys.readouterr().err
