# SPDX-License-Identifier: Apache-2.0
"""The releases stated on a command line, the same for every command with them."""

import re
from pathlib import Path

import pytest

from skill_tools import knowledge
from skill_tools.__main__ import main

RUN = "model:\n  cpu_offloading: true\n  cpu_offloading_num_layers: 8\n"


@pytest.fixture
def command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    (tmp_path / "train.log").write_text("all is well\n", encoding="utf-8")
    return {
        "lint": ["lint", "run.yaml"],
        "plan": ["plan", "run.yaml", "--model", "llama-3-8b"],
        "diagnose": ["diagnose", "train.log"],
    }[request.param]


every_command = pytest.mark.parametrize("command", ["lint", "plan", "diagnose"], indirect=True)


@every_command
@pytest.mark.parametrize("target", ["nosuch==1.0", "megatron-lm==0.16.1", "transformers-engine==2.12"])
def test_a_distribution_that_no_rule_knows_is_refused(
    command: list[str], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--target", target]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"offload: --target {target.partition('==')[0]}: ")
    assert "megatron-core, megatron-bridge, transformer-engine" in err
    assert err.count("\n") == 1


@every_command
def test_a_release_beyond_the_known_ones_is_used_with_one_warning(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(command)
    capsys.readouterr()
    assert main([*command, "--target", "megatron-core==99"]) == code
    err = capsys.readouterr().err
    assert "megatron-core==99 is later than " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["lint"], indirect=True)
@pytest.mark.parametrize(
    "target",
    ["megatron_core==0.16.1", "megatron-core==main", "megatron-core-dev==2026.8.18", "torch==2.8.0+cu128",
     "transformer-engine-cu12==2.12"],
)  # fmt: skip
def test_known_releases_and_other_spellings_pass_in_silence(
    command: list[str], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--target", target]) != 2
    assert capsys.readouterr().err == ""


def test_a_plan_is_of_the_releases_that_lint_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offloading of layer inputs came to Axolotl later: a plan beside an older pin leaves it out, and says why."""
    file = tmp_path / "lora.yaml"
    file.write_text(
        "base_model: meta-llama/Llama-3.1-8B\nadapter: lora\nlora_r: 16\nlora_target_linear: true\n"
        "sequence_len: 8192\nmicro_batch_size: 2\ngradient_checkpointing: true\nbf16: true\n"
    )
    asked = ["plan", str(file), "--gpu", "h100", "--gpu-memory", "40GiB", "--details"]
    main(asked)
    assert "activation_offloading: hidden_states" in capsys.readouterr().out
    (tmp_path / "requirements.txt").write_text("axolotl==0.13.0\n")
    main(asked)
    out = capsys.readouterr().out
    assert "activation_offloading: hidden_states" not in out
    assert "release: axolotl 0.13.0 (requirements.txt line 1)" in out


def test_a_plan_beside_an_older_megatron_offloads_without_the_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --seq-length 8192 --micro-batch-size 1 "
        "--global-batch-size 64 --bf16 --transformer-impl transformer_engine\n"
    )
    asked = [
        "plan",
        str(script),
        "--model",
        "llama-3-8b",
        "--gpu",
        "h100",
        "--gpu-memory",
        "60GiB",
        "--details",
    ]
    main(asked)
    assert "--overlap-cpu-optimizer-d2h-h2d" in capsys.readouterr().out
    (tmp_path / "requirements.txt").write_text("megatron-core==0.15.3\n")
    main(asked)
    out = capsys.readouterr().out
    assert "--optimizer-cpu-offload" in out
    assert "--overlap-cpu-optimizer-d2h-h2d" not in out
    assert "oc-overlap-race-old" not in out


def test_lint_says_which_releases_it_knows_and_since_when(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lint", "--version"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert re.search(r"compared on \d{4}-\d\d-\d\d: ", said)
    assert all(
        f"{name} {known[-1]}" in said for name, known in knowledge.index()["releases"]["known"].items()
    )
