"""The evals: enough of them, each gradable, each solvable with the tools and the facts of this repository."""

import contextlib
import io
import json
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.bundle import root
from skill_tools.rules.knowledge import read_rule_files

EVALS = root() / "evals"
TASKS: list[dict[str, Any]] = json.loads((EVALS / "evals.json").read_text(encoding="utf-8"))["evals"]
CHECKS: dict[str, list[dict[str, Any]]] = json.loads((EVALS / "checks.json").read_text(encoding="utf-8"))
TRIGGERS: list[dict[str, Any]] = json.loads((EVALS / "triggers.json").read_text(encoding="utf-8"))


def test_there_are_enough_tasks_and_queries() -> None:
    assert len([task for task in TASKS if task["expected_skill"]]) >= 12
    assert len(TRIGGERS) >= 24
    negative = [one for one in TRIGGERS if not one["should_trigger"]]
    assert len(negative) >= 0.4 * len(TRIGGERS)
    assert len({one["query"] for one in TRIGGERS}) == len(TRIGGERS)


def test_no_prompt_and_no_query_names_the_skill() -> None:
    for text in [*(task["prompt"] for task in TASKS), *(one["query"] for one in TRIGGERS)]:
        assert "cpu-offloading skill" not in text
        assert "skill_tools" not in text


def test_every_task_is_graded() -> None:
    assert sorted(CHECKS) == sorted(task["id"] for task in TASKS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["id"])
def test_a_task_has_its_files_and_says_what_to_write(task: dict[str, Any]) -> None:
    for name in task["files"]:
        assert (EVALS / name).is_file()
        assert name in task["prompt"]
    assert "answer.json" in task["prompt"]
    assert task["assertions"]


def test_every_file_belongs_to_a_task() -> None:
    used = {name for task in TASKS for name in task["files"]}
    assert {f"files/{path.name}" for path in (EVALS / "files").iterdir()} == used


def test_every_planted_fault_is_a_rule() -> None:
    known = {entry["id"] for entry in read_rule_files()}
    planted = {
        fault["rule"] for checks in CHECKS.values() for check in checks for fault in check.get("planted", [])
    }
    assert planted - known == set()


FAULT_TASKS = [
    (task, check)
    for task in TASKS
    for check in CHECKS[task["id"]]
    if check["kind"] == "faults" and task["expected_skill"]
]
RELEASES = {"launch-script-faults": ("megatron-core==0.18.2", "transformer-engine==2.11.0", "torch==2.10.0")}


@pytest.mark.parametrize(("task", "check"), FAULT_TASKS, ids=lambda one: one.get("id", ""))
def test_lint_finds_every_planted_fault_and_invents_none(
    task: dict[str, Any], check: dict[str, Any], grader: Any
) -> None:
    """What the linter reports at warning or above, written down as an answer, is graded in full."""
    targets = [word for release in RELEASES.get(task["id"], ()) for word in ("--target", release)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["lint", "--format", "json", *targets, *(str(EVALS / name) for name in task["files"])])
    findings = json.loads(printed.getvalue())["findings"]
    faults = [
        {"keys": list(finding["observed"]), "reason": finding["message"]}
        for finding in findings
        if finding["severity"] != "info"
    ]
    result = grader.grade_faults(check, {"faults": faults})
    assert (result["missed"], result["invented"]) == ([], [])
    assert {fault["rule"] for fault in check["planted"]} <= {finding["rule"] for finding in findings}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["id"])
def test_a_task_names_the_script_that_solves_it_or_none(task: dict[str, Any]) -> None:
    script = task["expected_script"]
    assert script is None or (root() / script).is_file()
    assert task["expected_skill"] is not None or script is None
