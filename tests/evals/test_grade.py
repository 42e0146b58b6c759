# SPDX-License-Identifier: Apache-2.0
"""The grader: deterministic, fair to wording, strict to facts."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.bundle import root

EVALS = root() / "evals"


CHECK = {
    "planted": [
        {"rule": "la-pp", "keys": ["cpu_offloading", "pipeline_model_parallel_size"]},
        {"rule": "la-recompute", "keys": ["cpu_offloading", "recompute_granularity"]},
        {"rule": "la-weights-noop", "keys": ["cpu_offloading_weights"]},
    ],
    "also_true": [["NVTE_CPU_OFFLOAD_V1"]],
}
RIGHT = [
    {"keys": ["model.cpu_offloading"], "reason": "rejected with model.pipeline_model_parallel_size=2"},
    {"keys": ["--cpu-offloading", "--recompute-granularity"], "reason": "exclude each other"},
    {"keys": ["cpu_offloading_weights"], "reason": "does nothing"},
]


@given(faults=st.permutations(RIGHT))
def test_all_faults_in_any_order_and_spelling(faults: list[dict[str, Any]], grader: Any) -> None:
    result = grader.grade_faults(CHECK, {"faults": faults})
    assert (result["score"], result["missed"], result["invented"]) == (1.0, [], [])


@given(kept=st.sets(st.integers(0, 2)), invented=st.integers(0, 4))
def test_recall_counts_the_missed_and_precision_the_invented(
    kept: set[int], invented: int, grader: Any
) -> None:
    faults = [RIGHT[index] for index in kept]
    faults += [{"keys": [f"lr_{number}"], "reason": "too high"} for number in range(invented)]
    result = grader.grade_faults(CHECK, {"faults": faults})
    assert result["recall"] == len(kept) / 3
    assert result["precision"] == (len(kept) / len(faults) if faults else 1.0)


def test_one_report_is_one_fault(grader: Any) -> None:
    everything = {
        "keys": sorted({key for fault in CHECK["planted"] for key in fault["keys"]}),
        "reason": "bad",
    }  # type: ignore[index]
    assert grader.grade_faults(CHECK, {"faults": [everything]})["recall"] == pytest.approx(1 / 3)


def test_a_vague_report_leaves_its_fault_to_the_exact_one(grader: Any) -> None:
    both = {
        "keys": ["cpu_offloading", "pipeline_model_parallel_size", "recompute_granularity"],
        "reason": "x",
    }
    result = grader.grade_faults(CHECK, {"faults": [both, RIGHT[0], RIGHT[2]]})
    assert result["recall"] == 1.0


def test_a_true_fact_that_was_not_planted_counts_neither_way(grader: Any) -> None:
    faults = [*RIGHT, {"keys": ["NVTE_CPU_OFFLOAD_V1"], "reason": "unset"}]
    assert grader.grade_faults(CHECK, {"faults": faults})["score"] == 1.0


def test_a_sound_file_wants_an_empty_list(grader: Any) -> None:
    assert grader.grade_faults({"planted": []}, {"faults": []})["score"] == 1.0
    assert grader.grade_faults({"planted": []}, {"faults": RIGHT[:1]})["score"] == 0.0


@pytest.mark.parametrize(
    ("value", "score"), [(100, 1), (102.9, 1), (97.1, 1), (103.5, 0), ("100", 0), (None, 0), (True, 0)]
)
def test_a_number_within_its_tolerance(value: object, score: int, grader: Any) -> None:
    check = {"name": "n", "value": 100, "tolerance": 0.03}
    assert grader.grade_number(check, {"numbers": {"n": value}})["score"] == score


@pytest.mark.parametrize(("value", "score"), [("Yes", 1), ("no", 0), (None, 0)])
def test_a_choice_whatever_its_case(value: object, score: int, grader: Any) -> None:
    assert grader.grade_choice({"name": "c", "any_of": ["yes"]}, {"choices": {"c": value}})["score"] == score


def test_a_patch_must_hold_what_it_must_keep(grader: Any) -> None:
    check = {"file": "a.py", "holds": [r"import x\b"], "lints": False}
    assert grader.grade_patch(check, {"files": {"a.py": "import x\n"}})["score"] == 1.0
    assert grader.grade_patch(check, {"files": {"a.py": "import xx\n"}})["score"] == 0.0
    assert grader.grade_patch(check, {})["score"] == 0.0


def test_a_transcript_s_last_json_block_is_the_answer(tmp_path: Path, grader: Any) -> None:
    path = tmp_path / "transcript.md"
    path.write_text('```json\n{"faults": 1}\n```\nBetter:\n```json\n{"faults": []}\n```\n', encoding="utf-8")
    assert grader.load_answer(path) == {"faults": []}


@pytest.mark.parametrize("text", ["no json here", "[1, 2]", "```json\n{\n```"])
def test_an_answer_that_cannot_be_read_is_unusable(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], grader: Any
) -> None:
    path = tmp_path / "answer.json"
    path.write_text(text, encoding="utf-8")
    assert grader.main(["sound-overrides", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_an_unknown_task_is_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str], grader: Any) -> None:
    path = tmp_path / "answer.json"
    path.write_text("{}", encoding="utf-8")
    assert grader.main(["gone", str(path)]) == 2
    assert "no task gone" in capsys.readouterr().err


def test_the_command_says_pass_or_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], grader: Any
) -> None:
    path = tmp_path / "answer.json"
    for text, code in (('{"faults": []}', 0), ('{"faults": [{"keys": ["lr"]}]}', 1)):
        path.write_text(text, encoding="utf-8")
        assert grader.main(["sound-overrides", str(path)]) == code
        assert json.loads(capsys.readouterr().out)["passed"] is (code == 0)


def test_triggers_are_graded_by_recall_and_specificity(tmp_path: Path, grader: Any) -> None:
    queries = json.loads((EVALS / "triggers.json").read_text(encoding="utf-8"))
    right = [{"query": one["query"], "triggered": one["should_trigger"]} for one in queries]
    assert grader.grade_triggers(right)["passed"] is True
    always = grader.grade_triggers([{**one, "triggered": True} for one in right])
    assert (always["recall"], always["specificity"]) == (1.0, 0.0)
    with pytest.raises(grader.UnusableError, match="no observation"):
        grader.grade_triggers(right[1:])
