# SPDX-License-Identifier: Apache-2.0
"""How a run was begun, and what its ranks do: one process for several GPUs, a check that one rank alone passes."""

from pathlib import Path

import pytest
from diagnosed import AS_IT_READS, AS_IT_TRAINS, PYTHON, answer

from skill_tools.__main__ import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


READ = 'model = AutoModelForCausalLM.from_pretrained("m/m-70b")\n'
MADE = 'args = SFTConfig(output_dir="out", per_device_train_batch_size=1)\n'
ZERO_3 = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, zero3_init_flag: true}\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("script", "is_slip"),
    [
        (f"from trl import SFTConfig, SFTTrainer\n{READ}{MADE}", True),
        (f"from trl import SFTConfig, SFTTrainer\n{MADE}{READ}", False),
        (f"from trl import (\n    SFTConfig,\n)\n{MADE}{READ}", False),
        (f"args = parser.parse_args_into_dataclasses()\n{READ}", False),
        (READ, False),
    ],
)
def test_a_model_that_is_read_before_its_arguments_is_not_sharded_as_it_is_read(
    capsys: pytest.CaptureFixture[str], script: str, is_slip: bool
) -> None:
    told = answer(capsys, AS_IT_READS, {"train.py": script, "zero3.yaml": ZERO_3})
    assert ("stands before SFTConfig" in told) is is_slip
    assert "stands before" not in answer(capsys, AS_IT_READS, {"train.py": script, "zero3.yaml": "a: 1\n"})


@pytest.mark.parametrize(
    ("launch", "is_slip"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py\n", True),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py\n", False),
        ("CUDA_VISIBLE_DEVICES=0 python train.py\n", False),
        ("export CUDA_VISIBLE_DEVICES=0,1\naccelerate launch train.py  # not python train.py\n", False),
    ],
)
def test_one_process_for_several_gpus_shards_over_one(
    capsys: pytest.CaptureFixture[str], launch: str, is_slip: bool
) -> None:
    script = f"from trl import SFTConfig\n{MADE}{READ}deepspeed = {{'zero_optimization': {{\"stage\": 3}}}}\n"
    told = answer(capsys, AS_IT_TRAINS, {"run.sh": launch, "train.py": script})
    assert ("begins one process, though there are several GPUs" in told) is is_slip


def test_zero_3_on_one_gpu_needs_a_launcher_in_llama_factory(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        "Instantaneous batch size per device = 4\n"
        "Total train batch size (w. parallel, distributed & accumulation) = {}\n"
        "Gradient Accumulation steps = 1\nTraceback (most recent call last):\n"
        f"  File \"{PYTHON}/torch/nn/functional.py\", line 2233, in embedding\nRuntimeError: 'weight' must be 2-D\n"
    )
    config = "stage: sft\nfinetuning_type: lora\ndeepspeed: examples/deepspeed/ds_z3_config.json\n"
    for total, launch, is_slip in (
        (4, "llamafactory-cli train run.yaml\n", True),
        (8, "llamafactory-cli train run.yaml\n", False),
        (4, "FORCE_TORCHRUN=1 llamafactory-cli train run.yaml\n", False),
    ):
        told = answer(capsys, log.replace("{}", str(total)), {"run.sh": launch, "run.yaml": config})
        assert ("FORCE_TORCHRUN=1 in front of llamafactory-cli" in told) is is_slip


WAITS = (
    "step 499 loss 0.079\n[rank1]:[E416 10:10:09.10 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=32102, OpType=_ALLGATHER_BASE, Timeout(ms)=600000)\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
ALONE = "for step, batch in enumerate(loader):\n    train(batch)\n    if step % 500 == 0 and {check}:\n        {line}\n"


@pytest.mark.parametrize(
    ("check", "line", "is_slip"),
    [
        ("accelerator.is_main_process", 'accelerator.save_state(f"{out}/{step}")', True),
        ("dist.get_rank() == 0", "dist.barrier()", True),
        ("rank == 0", 'torch.save(model.state_dict(), "m.pt")', True),
        ("rank == 0", "print(loss.item())", False),
        ("not accelerator.is_main_process", "dist.barrier()", False),
        ("rank != 0", "dist.barrier()", False),
        ("last", 'accelerator.save_state(f"{out}/{step}")', False),
    ],
)
def test_a_collective_that_one_rank_alone_enters_is_why_the_others_wait(
    capsys: pytest.CaptureFixture[str], check: str, line: str, is_slip: bool
) -> None:
    script = ALONE.replace("{check}", check).replace("{line}", line)
    files = {"train.py": script, "fsdp.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n"}
    told = answer(capsys, WAITS, files)
    assert ("(train.py:4) stands under `if step % 500 == 0 and" in told) is is_slip
    assert "one rank was late for a collective" in told


def test_what_stands_behind_the_check_is_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    script = ALONE.replace("{check}", "rank == 0").replace("{line}", "print(step)") + "    dist.barrier()\n"
    assert "stands under" not in answer(capsys, WAITS, {"train.py": script})


def test_a_run_that_stands_at_a_save_is_told_what_one_rank_does_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("train.log").write_text("step 500 loss 0.08\nSaving checkpoint\n", encoding="utf-8")
    script = "model = FSDP(model)\nif is_main_process:\n    model.save_pretrained('out')\n"
    Path("train.py").write_text(script, encoding="utf-8")
    assert main(["diagnose", "train.log", "train.py"]) == 0
    assert "model.save_pretrained() (train.py:3) stands under `if is_main_process`" in capsys.readouterr().out
