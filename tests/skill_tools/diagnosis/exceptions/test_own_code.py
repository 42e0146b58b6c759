# SPDX-License-Identifier: Apache-2.0
"""A Python error in a library's own code: the object that it met, its library, and the offload's neighbour."""

from collections.abc import Mapping

from for_each import for_each
from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.exceptions.own_code import load_neighbours, neighbour
from skill_tools.diagnosis.failures import Failure, ended_by, failures
from skill_tools.diagnosis.log import Log

OFFLOAD = {"run.sh": "python train.py --deepspeed ds.json --gradient_checkpointing\n# zero3\n"}
RECOMPUTES = """Traceback (most recent call last):
  File "/e/site-packages/torch/utils/checkpoint.py", line 271, in backward
    outputs = ctx.run_function(*detached_inputs)
  File "/e/site-packages/deepspeed/runtime/zero/stage3.py", line 1270, in reduce_grads
    self.count(current)
  File "/e/site-packages/deepspeed/runtime/counters.py", line 12, in count_used
    node = t.view_as(t).grad_fn.next_functions[0][0]
AttributeError: 'NoneType' object has no attribute 'next_functions'
"""
INNERMOST = "    node = t.view_as(t).grad_fn.next_functions[0][0]\n"
NONE = "AttributeError: 'NoneType' object has no attribute 'next_functions'\n"


def concluded(log: str, files: Mapping[str, str] = OFFLOAD) -> Conclusion:
    found = diagnose(Log("train.log", log), unread=files).conclusion
    assert found is not None
    return found


def failed(log: str) -> Failure:
    read = Log("train.log", log)
    found = ended_by(read, failures(read))
    assert found is not None
    return found


def test_a_none_in_a_library_s_record_names_the_library_the_expression_and_each_way_around() -> None:
    found = concluded(RECOMPUTES)
    assert found.is_known
    assert "a fault of deepspeed" in found.cause
    assert "finds None in t.view_as(t).grad_fn" in found.cause
    assert "where it meets gradient checkpointing" in found.cause
    newer, other_form, off = found.change
    assert newer.startswith("a newer deepspeed")
    assert other_form.endswith("gradient_checkpointing (run.sh:1)")
    assert "ZeRO stage 2" in off


@for_each(
    [
        (
            "    cache.zero_()\n",
            "AttributeError: 'list' object has no attribute 'zero_'\n",
            "has a list in cache",
        ),
        ("    full = state[name]\n", "KeyError: 'lm_head.weight'\n", "looks 'lm_head.weight' up in state"),
        ("    assert ready.all()\n", "AssertionError\n", "asserts ready.all()"),
        ("    assert ok, text\n", "AssertionError: swapped out already\n", "says swapped out already"),
    ]
)
def test_each_kind_of_error_says_what_the_code_met(case: tuple[str, str, str]) -> None:
    line, error, expected = case
    assert expected in concluded(RECOMPUTES.replace(INNERMOST, line).replace(NONE, error)).cause


def test_the_user_s_own_script_the_data_and_a_run_without_an_offload_are_no_library_s_fault() -> None:
    script = RECOMPUTES.replace("/e/site-packages/deepspeed/runtime/counters.py", "/home/u/train.py").replace(
        "/e/site-packages/deepspeed/runtime/zero/stage3.py", "/home/u/loop.py"
    )
    assert not concluded(script).is_known
    data = RECOMPUTES.replace("deepspeed/runtime/counters.py", "trl/dataset_formatting.py")
    assert not concluded(data).is_known
    elsewhere = RECOMPUTES.replace("deepspeed/runtime/zero/stage3.py", "mine/stage.py").replace(
        "deepspeed", "mine"
    )
    assert not concluded(elsewhere, {"run.sh": "python train.py\n"}).is_known


def test_a_neighbour_whose_code_runs_without_it_too_needs_its_option() -> None:
    log = RECOMPUTES.replace("torch/utils/checkpoint.py", "transformers/umt5/model.py")
    named = neighbour(failed(log), [("wan.yaml", "model:\n  quantize_te: true\n")])
    assert named is not None
    assert named.told.endswith("quantize_te (wan.yaml:2)")
    assert neighbour(failed(log), [("wan.yaml", "model:\n  quantize_te: false\n")]) is None


def test_the_neighbours_are_as_their_schema_says() -> None:
    entries = knowledge.load_yaml("neighbours.yaml")
    assert_follows(entries, "neighbours")
    assert len({each.name for each in load_neighbours()}) == len(entries)


@for_each(
    [
        (
            "transformers/models/qwen2/modeling_qwen2.py",
            "n = pixels.shape[0]",
            "'NoneType' object has no attribute 'shape'",
        ),
        (
            "transformers/trainer.py",
            "k in rows.column_names",
            "'list' object has no attribute 'column_names'",
        ),
        ("megatron/training/arguments.py", "x = args.y", "'Namespace' object has no attribute 'y'"),
    ]
)
def test_an_error_by_the_run_s_data_or_arguments_is_no_offload_s(case: tuple[str, str, str]) -> None:
    path, line, words = case
    log = f'Traceback (most recent call last):\n  File "/e/site-packages/{path}", line 5, in f\n    {line}\n'
    assert not concluded(f"{log}AttributeError: {words}\n").is_known
