# SPDX-License-Identifier: Apache-2.0
"""Laying a task out and writing the page: the files that an agent sees, and means that follow from made-up runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from skill_tools.bundle import root

PP = {"choices": {"release": "0.16", "key_to_turn_off": "cpu_offloading", "works_with_pipeline": "yes"}}
INVENTED = {"faults": [{"keys": ["lr"], "reason": "too high"}]}


def run(task: str, arm: str, answer: Any, number: int = 1, **effort: float) -> dict[str, Any]:
    cost = {"tool_calls": 4, "tokens": 1000, "minutes": 1.0, **effort}
    who = {"model": "made-up", "date": "2026-01-02"}
    return {"task": task, "arm": arm, "run": number, "answer": answer, **cost, **who}


def written(module: Any, folder: Path, runs: list[dict[str, Any]]) -> tuple[int, str]:
    results, page = folder / "results.jsonl", folder / "page.md"
    results.write_text("\n".join(json.dumps(one) for one in runs), encoding="utf-8")
    code = module.main([str(results), "--output", str(page)])
    return code, page.read_text(encoding="utf-8") if page.exists() else ""


def test_the_page_has_means_uplift_effort_and_what_was_not_run(tmp_path: Path, benchmark_script: Any) -> None:
    runs = [
        run("log-pipeline", "with", PP),
        run("log-pipeline", "with", {}, 2),
        run("log-pipeline", "without", {}, tokens=4000, tool_calls=8),
        run("sound-overrides", "with", {"faults": []}),
        run("sound-overrides", "without", INVENTED, tokens=4000, tool_calls=8),
        run("log-fp8", "without", {}, tokens=900000),
    ]
    code, page = written(benchmark_script, tmp_path, runs)
    assert code == 0
    assert "Uplift: +75.0 points over the 2 tasks" in page
    assert "tool calls 0.50, tokens 0.25, minutes 1.00" in page
    assert "| `log-pipeline` | with | 2 | 50.0 | 0.0 | 4.0 | 1000 | 1.0 |" in page
    assert "| `sound-overrides` | without | 1 | 0.0 | 1.0 | 8.0 | 4000 | 1.0 |" in page
    assert "| without | 0.0 | 0.5 | 8.0 | 4000 | 1.0 |" in page
    not_run = next(line for line in page.splitlines() if line.startswith("Not run: "))
    assert "`log-fp8` with" in not_run
    assert "`log-fp8` without" not in not_run
    assert "by made-up" in page


@pytest.mark.slow
def test_the_page_is_that_of_the_results_that_are_kept(tmp_path: Path, benchmark_script: Any) -> None:
    page = tmp_path / "page.md"
    assert benchmark_script.main([str(root() / "evals" / "results.jsonl"), "--output", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == (root() / "BENCHMARK.md").read_text(encoding="utf-8")


def test_an_answer_may_stand_in_a_file_beside_the_results(tmp_path: Path, benchmark_script: Any) -> None:
    one = run("log-pipeline", "with", None)
    del one["answer"]
    (tmp_path / "answer.json").write_text(json.dumps(PP), encoding="utf-8")
    code, page = written(benchmark_script, tmp_path, [{**one, "answer_path": "answer.json"}])
    assert code == 0
    assert "| `log-pipeline` | with | 1 | 100.0 |" in page
    assert "No task was run both" in page


@pytest.mark.parametrize(
    "bad",
    [
        [run("gone", "with", {})],
        [run("log-pipeline", "beside", {})],
        [run("log-pipeline", "with", {}), run("log-pipeline", "with", {})],
        [{"task": "log-pipeline"}],
        [],
    ],
    ids=["unknown task", "unknown arm", "twice", "fields missing", "no run"],
)
def test_a_line_that_cannot_be_used_writes_nothing(
    bad: list[dict[str, Any]], tmp_path: Path, benchmark_script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(benchmark_script, tmp_path, bad) == (2, "")
    assert "results.jsonl" in capsys.readouterr().err


def test_a_task_is_laid_out_with_its_files_alone(
    tmp_path: Path, lay_out_script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert lay_out_script.main(["sound-fsdp2", str(folder)]) == 0
    assert "CPUOffloadPolicy" in capsys.readouterr().out
    laid = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert laid == {"files/fsdp2_train.py", "files/fsdp2_train.log"}
    original = root() / "evals" / "files" / "fsdp2_train.py"
    assert (folder / "files" / "fsdp2_train.py").read_bytes() == original.read_bytes()


@pytest.mark.parametrize("task", ["gone", "sound-fsdp2"])
def test_an_unknown_task_or_a_used_folder_is_refused(
    task: str, tmp_path: Path, lay_out_script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answer.json").write_text("{}", encoding="utf-8")
    assert lay_out_script.main([task, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("lay_out: ")
    assert [path.name for path in tmp_path.iterdir()] == ["answer.json"]
