# SPDX-License-Identifier: Apache-2.0
"""The user's own comparison in a log: what is read as a run of the user's, and what it says about the cause."""

from pathlib import Path

import pytest
from for_each import for_each

from skill_tools.__main__ import main
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.series.own_runs import settings, trials

ZERO3 = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio_offload": 0.4}}}'


def told(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text(log, encoding="utf-8")
    Path("ds.json").write_text(ZERO3, encoding="utf-8")
    main(["diagnose", "train.log", "ds.json"])
    return capsys.readouterr().out


@for_each(
    (
        ("the same without blocks_to_swap", {"blocks_to_swap": "off"}),
        ("disabling CPU offload", {"CPU offload": "off"}),
        ("layer offloading is disabled", {"layer offloading": "off"}),
        ('"offload_optimizer" taken out of ds.json', {"offload_optimizer": "off"}),
        ("with --blocks_to_swap", {"--blocks_to_swap": "on"}),
        ("cpu_offload=True, micro_batch_size=32", {"cpu_offload": "on", "micro_batch_size": "32"}),
        ("the script with `pin_memory: false`", {"pin_memory": "off"}),
        ('"offload_optimizer": {"device": "none"}', {"offload_optimizer": "off"}),
        ("PyTorch 2.4.1", {"torch": "2.4.1"}),
        ("downgrading DeepSpeed to 0.15.3", {"deepspeed": "0.15.3"}),
        ("works with 4 GPUs", {"GPU": "4"}),
        ("api.py:882 and cumem_allocator.cpp:62", {}),
        ("iteration 12 of 200, loss 3.1", {}),
    ),
    lambda case: case[0],
)
def test_settings_of_a_run_are_read_from_its_words(case: tuple[str, dict[str, str]]) -> None:
    words, expected = case
    assert settings(words) == expected


@for_each(
    (
        "WARNING: please disable offload_param if it does not work",
        "You should set pin_memory=False, which works",
        "[INFO] offload_optimizer=cpu works with stage 3",
        "RuntimeError: offload_param with stage 2 fails",
        '  File "/app/train.py", line 3, in with_offload_works',
    ),
    lambda line: line[:20],
)
def test_advice_and_a_programs_own_lines_are_no_runs_of_the_user(line: str) -> None:
    assert all(
        run.is_good is None and not run.settings
        for run in trials(Log("train.log", f"{line}\nstep 1 loss 2.0\n"))
    )


def test_a_run_without_the_setting_names_it_and_the_norm_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "step 1 loss 2.51 grad_norm 0.41\n# the same without offload_optimizer\nstep 1 loss 2.51 grad_norm 3.28\n"
    said = told(log, tmp_path, monkeypatch, capsys)
    assert (
        "by your own runs offload_optimizer makes the difference: grad_norm 0.41 against 3.28 (line 2:"
        in said
    )
    assert "gradients are lost" in said
    assert "change:\n  without offload_optimizer, as in your own run" in said


def test_runs_that_agree_name_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "step 1 loss 2.51 grad_norm 3.27\n# the same without offload_optimizer\nstep 1 loss 2.51 grad_norm 3.28\n"
    assert "your own runs" not in told(log, tmp_path, monkeypatch, capsys)


def test_an_offload_that_frees_memory_is_no_fault_and_one_that_frees_none_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "# with offload_optimizer\npeak memory 23.1 GB\n# without offload_optimizer\npeak memory {} GB\n"
    assert "your own runs" not in told(log.format("39.0"), tmp_path, monkeypatch, capsys)
    said = told(log.format("23.0"), tmp_path, monkeypatch, capsys)
    assert "offload_optimizer frees nothing: peak memory 23.1 and 23.0" in said
    assert "without offload_optimizer, as in your own run" not in said


def test_of_two_values_the_one_in_the_files_is_complained_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "# offload_optimizer cpu\naccuracy 0.49\n# offload_optimizer nvme, else the same\naccuracy 0.72\n"
    assert "offload_optimizer nvme, as in your own run" in told(log, tmp_path, monkeypatch, capsys)


def test_an_offload_without_which_memory_runs_out_is_not_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "# without offload_param\ntorch.OutOfMemoryError: CUDA out of memory.\n# with offload_param\nloss 2.5\n"
    assert "offload_param on, as in your own run" in told(log, tmp_path, monkeypatch, capsys)
    works = "loss is nan\nWith offload_optimizer=true it works for 3 steps.\n"  # as ds.json has it
    assert "your own runs" not in told(works, tmp_path, monkeypatch, capsys)


def test_a_part_that_the_run_offloads_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told("loss is nan\n# ratio_offload 0.0: trains\n", tmp_path, monkeypatch, capsys)
    assert "without ratio_offload, as in your own run" in said


def test_a_setting_that_the_failed_run_has_too_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "# use_fp16=True, cpu_offload=False: works\n# use_fp16=True, cpu_offload=True: fails\nValueError: no grad\n"
    said = told(log, tmp_path, monkeypatch, capsys)
    assert "by your own runs cpu_offload makes the difference" in said
    assert "without cpu_offload, as in your own run" in said


def test_a_sentence_about_a_run_is_no_line_of_the_log_about_an_offload_that_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(
        "The loss is stuck.\nAfter I switched off CPU offload, all works.\n", tmp_path, monkeypatch, capsys
    )
    assert "by your own runs CPU offload makes the difference" in said
    assert "the log itself says" not in said
