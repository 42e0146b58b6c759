# SPDX-License-Identifier: Apache-2.0
"""A plan is written as lint's fixes are, with comments kept, and says which releases it would fail with."""

import json
from pathlib import Path

import pytest

from skill_tools.__main__ import main

RUN = """\
# my run
model_name_or_path: Qwen/Qwen3-8B  # the base
stage: sft
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
deepspeed: ds.json
"""
SECTION = (
    '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},\n'
    ' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}\n'
)
MACHINE = ("--gpu", "rtx5090", "--gpus", "8", "--host-memory", "512GiB")


def written(folder: Path, section: str = SECTION) -> str:
    (folder / "run.yaml").write_text(RUN, encoding="utf-8")
    (folder / "ds.json").write_text(section, encoding="utf-8")
    return str(folder / "run.yaml")


def test_a_plan_names_the_releases_in_which_it_loses_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", written(tmp_path), *MACHINE]) == 0
    watched = [line for line in capsys.readouterr().out.splitlines() if line.startswith("watch: ")]
    assert any("ds-accumulation-drops-gradients" in line and "0.15.2" in line for line in watched)


def test_stated_releases_rule_it_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", written(tmp_path), *MACHINE, "--target", "deepspeed==0.17.5"])
    assert "+ optimizer offload" not in capsys.readouterr().out
    main(["plan", written(tmp_path), *MACHINE, "--target", "deepspeed==0.19.5"])
    out = capsys.readouterr().out
    assert "fits with gradient checkpointing + optimizer offload" in out
    assert "ds-accumulation-drops-gradients" not in out


def test_a_diff_writes_nothing_and_write_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path)
    assert main(["plan", run, *MACHINE, "--diff"]) == 0
    diff = capsys.readouterr().out
    assert (
        '-  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}'.replace("  ", " ", 1)
        in diff
    )
    assert (tmp_path / "ds.json").read_text(encoding="utf-8") == SECTION
    assert main(["plan", run, *MACHINE, "--write"]) == 0
    assert (tmp_path / "ds.json").read_text(encoding="utf-8") == SECTION.replace('"none"', '"cpu"')
    assert (tmp_path / "run.yaml").read_text(encoding="utf-8") == RUN
    capsys.readouterr()
    assert main(["plan", run, *MACHINE, "--write"]) == 0
    assert "nothing to write" in capsys.readouterr().err
    assert main(["plan", run, *MACHINE, "--diff"]) == 0
    assert "nothing to write" in capsys.readouterr().err


def test_a_section_that_the_json_lacks_is_added_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not to the file that names the JSON."""
    section = '{\n  "bf16": {"enabled": true},\n  "zero_optimization": {"stage": 2}\n}\n'
    run = written(tmp_path, section)
    assert main(["plan", run, *MACHINE, "--target", "deepspeed==0.19.5", "--write"]) == 0
    text = (tmp_path / "ds.json").read_text(encoding="utf-8")
    assert text == section.replace('"stage": 2', '"stage": 2, "offload_optimizer": {"device": "cpu"}')
    assert "offload" not in (tmp_path / "run.yaml").read_text(encoding="utf-8")


def test_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = RUN.replace("full", "lora").replace(
        "deepspeed: ds.json\n", "disable_gradient_checkpointing: true  # why\n"
    )
    path.write_text(text, encoding="utf-8")
    assert main(["plan", str(path), "--gpu", "rtx3090", "--write"]) == 0
    assert path.read_text(encoding="utf-8") == text.replace(": true  # why", ": false  # why")


LAUNCH = """\
#!/bin/bash
#SBATCH --gpus 8

torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 \\
  --num-attention-heads 32 --vocab-size 151936 --seq-length 4096 --max-position-embeddings 4096 \\
  --micro-batch-size 1 --global-batch-size 8 --swiglu --bf16 --use-distributed-optimizer \\
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""


def test_a_variable_is_exported_below_the_head_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(LAUNCH, encoding="utf-8")
    machine = ("--gpu", "a100", "--gpu-memory", "56GiB", "--host-memory", "1TB")
    assert main(["plan", str(path), *machine, "--write"]) == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[1] == "#SBATCH --gpus 8"
    assert lines[3].startswith("export OMP_NUM_THREADS=")
    assert "--optimizer-cpu-offload" in path.read_text(encoding="utf-8")
    path.write_text(LAUNCH.replace("torchrun", "OMP_NUM_THREADS=1 torchrun"), encoding="utf-8")
    assert main(["plan", str(path), *machine, "--write"]) == 2
    assert "where no line sets what is exported: export OMP_NUM_THREADS" in capsys.readouterr().err


def test_what_a_mechanism_brings_along_is_watched_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The offload of parameters brings the optimizer's, and the faults of that one."""
    run = written(tmp_path, SECTION.replace('"stage": 2', '"stage": 3'))
    assert main(["plan", run, "--gpu", "rtx4090", "--gpus", "8", "--host-memory", "512GiB"]) == 0
    out = capsys.readouterr().out
    assert "parameters and optimizer on the CPU" in out
    assert "[ds-z3-stream-race]" in out


SCRIPT = """\
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = get_peft_model(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B"), LoraConfig(r=16))
arguments = TrainingArguments(output_dir="out", bf16=True, per_device_train_batch_size=1, gradient_checkpointing=False)
Trainer(model, arguments).train()
"""


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("train.py", ("--gpu", "rtx3090"), "no place that can be edited"),
        ("run.yaml", (*MACHINE, "--what-if", "cutoff_len=1024"), "--what-if"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, arguments: tuple[str, ...], said: str
) -> None:
    written(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    before = (tmp_path / name).read_text(encoding="utf-8")
    assert main(["plan", str(tmp_path / name), *arguments, "--write"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert (tmp_path / name).read_text(encoding="utf-8") == before
    assert (tmp_path / "ds.json").read_text(encoding="utf-8") == SECTION


@pytest.mark.parametrize(("order", "column"), [("gpu", -4), ("time", None)])
def test_all_plans_are_a_table_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str, column: int | None
) -> None:
    assert main(["plan", written(tmp_path), *MACHINE, "--all", order]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) > 4
    if column is not None:
        sizes = [float(row[row.index("    ") :].split()[0]) for row in rows if "    " in row.strip()]
        assert sizes == sorted(sizes)


def test_a_written_plan_mends_the_ratio_that_only_stage_3_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path, SECTION.replace('"none"', '"nvme", "nvme_path": "/nvme", "ratio": 0.3'))
    assert main(["lint", run]) == 1
    assert main(["plan", run, *MACHINE, "--target", "deepspeed==0.19.5", "--write"]) == 0
    assert '{"device": "cpu", "nvme_path": "/nvme", "ratio": 1.0}' in (tmp_path / "ds.json").read_text()
    assert main(["lint", run]) == 0
    assert "as it is, it breaks ds-ratio" in capsys.readouterr().out


OUTSIDE = SECTION.replace('"none"', '"none", "ratio": 2').replace('"stage": 2', '"stage": 3')


@pytest.mark.parametrize(("gpu", "verdict"), [("b200", "fits as it is"), ("rtx3090", "fits with")])
def test_an_error_that_no_change_mends_is_told_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, verdict: str
) -> None:
    run = written(tmp_path, OUTSIDE)
    (tmp_path / "run.yaml").write_text(f"{RUN}disable_gradient_checkpointing: true\n", encoding="utf-8")
    machine = ("--gpu", gpu, "--gpus", "8", "--host-memory", "512GiB")
    main(["plan", run, *machine])
    said = capsys.readouterr().out
    assert verdict in said
    assert "nothing to change" not in said
    remedy = "The share of optimizer offload lies between 0 and 1. Write a number from 0 to 1."
    assert f"to mend by hand: {remedy} [ds-ratio-range]" in said
    main(["plan", run, *machine, "--format", "json"])
    plan = json.loads(capsys.readouterr().out)
    assert [each["rule"] for each in plan["recommendation"]["left"]] == ["ds-ratio-range"]
