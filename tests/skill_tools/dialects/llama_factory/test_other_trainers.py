# SPDX-License-Identifier: Apache-2.0
"""Runs of LLaMA-Factory's v1 and of Megatron's trainers are named, and not planned as the Trainer's."""

import shlex
from pathlib import Path

import pytest

from skill_tools.__main__ import main

V1 = """\
model: Qwen/Qwen3-0.6B
dist_config: {name: fsdp2}
train_dataset: mine.yaml
micro_batch_size: 2
cutoff_len: 1024
"""
MEGATRON = """\
model_name_or_path: Qwen/Qwen3-30B-A3B
stage: sft
finetuning_type: full
dataset: mine
cutoff_len: 4096
per_device_train_batch_size: 1
tensor_model_parallel_size: 1
pipeline_model_parallel_size: 4
expert_model_parallel_size: 2
use_distributed_optimizer: true
recompute_granularity: full
"""
TRAINER = "stage: sft\nfinetuning_type: full\nmodel_name_or_path: Qwen/Qwen3-0.6B\n"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "--gpu", "h100", "--gpus", "8", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    return str(err)


@pytest.mark.parametrize(
    ("text", "named", "run"),
    [
        (
            V1,
            "its v1 by dist_config",
            "(sharded by FSDP2) of 79.2 GiB (85.0 GB), 1024 tokens x micro-batch 2",
        ),
        (
            MEGATRON,
            "its Megatron trainer by tensor_model_parallel_size",
            "(PP 4, EP 2) of 79.2 GiB (85.0 GB), 4096 tokens x micro-batch 1",
        ),
    ],
)
def test_another_trainer_is_named_and_its_run_is_planned_where_it_is_counted(
    text: str, named: str, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    main(["lint", str(path)])
    assert named in capsys.readouterr().out.splitlines()[0]
    error = refused(capsys, str(path))
    command = error.partition("; try ")[2].partition(", for the training alone")[0]
    words = shlex.split(command.partition(" plan ")[2].replace("--gpus N", "--gpus 8 --gpu h100"))
    assert main(["plan", *words]) == 0
    assert run in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(("variable", "trainer"), [("USE_V1", "v1"), ("USE_MCA", "Megatron trainer")])
def test_the_variable_of_a_command_chooses_it(
    variable: str, trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(TRAINER)
    script = tmp_path / "run.sh"
    script.write_text(f"{variable}=1 llamafactory-cli train run.yaml\n")
    assert f"a run of LLaMA-Factory's {trainer}" in refused(capsys, str(script))


def test_an_unknown_model_does_not_hide_whose_run_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(V1.replace("Qwen/Qwen3-0.6B", "nobody/knows-it"))
    assert "a run of LLaMA-Factory's v1" in refused(capsys, str(path))


def test_a_diagnosis_names_it_in_place_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, log = tmp_path / "run.yaml", tmp_path / "run.log"
    path.write_text(V1)
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    main(["diagnose", str(log), str(path), "--gpu", "h100"])
    assert "no plan: this is a run of LLaMA-Factory's v1" in capsys.readouterr().err
