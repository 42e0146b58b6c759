# SPDX-License-Identifier: Apache-2.0
"""The evals: enough of them, each gradable, each solvable with the tools and the facts of this repository."""

import contextlib
import io
import json
from typing import Any

import pytest
from for_each import for_each

from skill_tools.__main__ import main
from skill_tools.bundle import root
from skill_tools.rules.knowledge import read_rule_files

EVALS = root() / "evals"
TASKS: list[dict[str, Any]] = json.loads((EVALS / "evals.json").read_text(encoding="utf-8"))["evals"]
CHECKS: dict[str, list[dict[str, Any]]] = json.loads((EVALS / "checks.json").read_text(encoding="utf-8"))
TRIGGERS: list[dict[str, Any]] = json.loads((EVALS / "triggers.json").read_text(encoding="utf-8"))


def test_there_are_enough_tasks_and_queries() -> None:
    assert len(TASKS) >= 40
    assert len([task for task in TASKS if task["id"].startswith(("neg-", "sound-"))]) >= 14
    assert len(TRIGGERS) >= 40
    negative = [one for one in TRIGGERS if not one["should_trigger"]]
    assert len(negative) >= 0.4 * len(TRIGGERS)
    assert len({one["query"] for one in TRIGGERS}) == len(TRIGGERS)


def test_no_prompt_and_no_query_names_the_skill() -> None:
    for text in [*(task["prompt"] for task in TASKS), *(one["query"] for one in TRIGGERS)]:
        assert "cpu-offloading skill" not in text
        assert "skill_tools" not in text


def test_every_task_is_graded() -> None:
    assert sorted(CHECKS) == sorted(task["id"] for task in TASKS)


@for_each(TASKS, lambda task: task["id"])
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


def full_answer(checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Every expected fact, written down as an agent would."""
    planted = [fault for check in checks for fault in check.get("planted", [])]
    facts = {kind: [check for check in checks if check["kind"] == kind] for kind in ("number", "choice")}
    return {
        "faults": [{"keys": fault["keys"], "reason": "as planted"} for fault in planted],
        "numbers": {check["name"]: check["value"] for check in facts["number"]},
        "choices": {check["name"]: check["any_of"][-1].upper() for check in facts["choice"]},
    }


@pytest.mark.parametrize("task", sorted(CHECKS))
def test_a_full_answer_is_graded_in_full_and_an_empty_one_not_at_all(task: str, grader: Any) -> None:
    """Patches are solved by `test_solutions.py`."""
    if all(check["kind"] != "patch" for check in CHECKS[task]):
        assert grader.grade(task, full_answer(CHECKS[task]))["passed"]
    for empty in ({}, {"faults": {}, "numbers": [], "choices": None, "files": "none"}):
        assert grader.grade(task, empty)["score"] == 0


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
    """The linter's reports at warning or above, written down as an answer, are graded in full."""
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


@pytest.mark.parametrize("task", [one["id"] for one, _ in FAULT_TASKS if one["id"].startswith("sound-")])
def test_a_sound_file_lints_clean(task: str) -> None:
    (files,) = (one["files"] for one in TASKS if one["id"] == task)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["lint", *(str(EVALS / name) for name in files)]) == 0


@for_each(TASKS, lambda task: task["id"])
def test_a_task_names_the_script_that_solves_it_or_none(task: dict[str, Any]) -> None:
    script = task["expected_script"]
    assert script is None or (root() / script).is_file()
    assert task["expected_skill"] is not None or script is None
