# SPDX-License-Identifier: Apache-2.0
"""The examples run as their docstrings say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from skill_tools.__main__ import main

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def printed(
    name: str, arguments: list[str], capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> list[str]:
    patch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_the_loop_learns_the_same_with_and_without_offload(capsys, monkeypatch):
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    offloaded = printed("train_with_offload.py", [], capsys, monkeypatch)
    plain = printed("train_with_offload.py", ["--plain"], capsys, monkeypatch)
    losses = [line for line in plain if line.startswith("step")]
    assert len(losses) == 10
    assert [line for line in offloaded if line.startswith("step")] == losses
    assert offloaded[-1].endswith("MiB of activations left the device in each step")
    assert not offloaded[-1].startswith("0 ")


TRAINERS = {"trainer": "transformers.trainer", "trl": "trl", "peft": "peft", "accelerate": "accelerate.utils"}
TRAINERS |= {"lightning": "lightning", "fabric": "lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_offloads_by_one_line(name, capsys, monkeypatch, tmp_path):
    pytest.importorskip(
        TRAINERS[name], reason=f"needs {TRAINERS[name]}: pip install -c constraints.txt '.[trainers]'"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    report = printed(f"train_with_{name}.py", [], capsys, monkeypatch)[-1]
    # Examples with an optimizer made by the handle tell its place.
    if name in ("trainer", "trl", "lightning"):
        assert "optimizer: Split(resident=0.0, streamed=0.0, cpu=1.0)" in report
    offloaded = re.search(r"activation: ([\d.]+) MB|^(\d+) bytes of activations left", report)
    streamed = re.search(r"weights streamed: ([\d.]+) MB", report)
    assert float(next(filter(None, (streamed or offloaded).groups()))) > 0
    assert not list(tmp_path.iterdir())
    script = (EXAMPLES / f"train_with_{name}.py").read_text(encoding="utf-8").partition(" from None\n")[2]
    assert 0 < len([line for line in script.splitlines() if line]) < 18


@pytest.mark.parametrize("name", TRAINERS)
def test_without_its_trainer_an_example_says_what_to_install(name, monkeypatch):
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    for package in ("transformers", "datasets", "peft", "accelerate", "lightning"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=r"pip install -c constraints.txt '.\[reference,trainers\]'"):
        runpy.run_path(str(EXAMPLES / f"train_with_{name}.py"), run_name="__main__")


def test_the_demo_lints_plans_and_verifies(capsys, monkeypatch):
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    verified = []
    monkeypatch.setattr("skill_tools.commands.verify.run", lambda args: verified.append(args) or 0)
    assert demo["demo"]() == 0
    text = capsys.readouterr().out
    assert "la-pp" in text
    assert "fits with " in text
    assert len(verified) == 1


def test_the_demo_fails_when_a_step_does(monkeypatch):
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    monkeypatch.setattr("skill_tools.commands.verify.run", lambda args: 1)
    assert demo["demo"]() == 1


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("good_*")))
def test_a_good_example_has_no_finding(name):
    targets = ["--target", "megatron-core==0.19.0", "--target", "transformer-engine==2.12.0"]
    assert main(["lint", str(EXAMPLES / name), *targets]) == 0


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("broken_*")))
def test_a_broken_example_has_findings(name):
    assert main(["lint", str(EXAMPLES / name)]) == 1


def test_an_example_without_its_argument_says_how_it_is_called(capsys, monkeypatch):
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    with pytest.raises(SystemExit) as left:
        printed("train_with_plan.py", [], capsys, monkeypatch)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("usage: train_with_plan.py")


@pytest.mark.parametrize("name", ["train_with_plan.py", "train_sharded.py"])
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (None, "No such file"),
        ("{}", "the plan has no execute section"),
        ('{"errors": ["nothing fits"]}', "the plan has no execute section"),
    ],
    ids=["absent", "empty", "nothing fits"],
)
def test_an_example_refuses_a_plan_that_nobody_can_carry_out(name, plan, said, capsys, monkeypatch, tmp_path):
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    path = tmp_path / "plan.json"
    if plan is not None:
        path.write_text(plan)
    with pytest.raises(SystemExit) as ended:
        printed(name, [str(path)], capsys, monkeypatch)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_plan_for_several_gpus_is_another_example_s(capsys, monkeypatch, tmp_path):
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    path = tmp_path / "plan.json"
    words = ["plan", "--framework", "pytorch", "--model", "llama-3-8b", "--gpu", "h100", "--gpus", "4"]
    assert main([*words, "--overrides", "sharding=fsdp2", "--format", "json"]) == 0
    path.write_text(capsys.readouterr().out)
    with pytest.raises(SystemExit) as ended:
        printed("train_with_plan.py", [str(path)], capsys, monkeypatch)
    assert ended.value.code == 2
    assert "try train_sharded.py" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_larger_than_the_gpu_learns(capsys, monkeypatch):
    torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    dtype = torch.get_default_dtype()
    try:
        lines = printed("train_larger_than_gpu.py", ["--tiny"], capsys, monkeypatch)
    finally:
        torch.set_default_dtype(dtype)
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 5
    assert len((EXAMPLES / "train_larger_than_gpu.py").read_text().splitlines()) < 40


@pytest.mark.slow
def test_two_processes_train_by_a_plan_for_two_gpus(capsys, monkeypatch, tmp_path):
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    cut = ["--gpu-memory", "24GB", "--host-memory", "256GB", "--gpus", "2", "--overrides", "sharding=fsdp2"]
    words = ["plan", "--framework", "pytorch", "--model", "llama-3-8b", "--gpu", "a100-80gb", *cut]
    assert main([*words, "--format", "json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    script = [str(EXAMPLES / "train_sharded.py"), "plan.json"]
    done = {
        count: subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count, *script],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        for count in ("1", "2")
    }
    assert "the plan is for 2 processes; try torchrun --nproc-per-node 2" in done["1"].stderr
    losses = [float(line.split()[-1]) for line in done["2"].stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 10, done["2"].stderr
    assert losses[-1] < losses[0] - 1
