# SPDX-License-Identifier: Apache-2.0
"""The operand on the CPU is read from the exception, and is the answer if nothing offloads."""

import pytest

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.exceptions import operands
from skill_tools.diagnosis.log import Log

OLD = "Expected all tensors to be on the same device, but found at least two devices, {} and {}! "
OLD += "(when checking argument for argument {} in method wrapper_CUDA_{})"
NEW = (
    "Expected all tensors to be on the same device, but got {} is on {}, different from other tensors on {} "
)
NEW += "(when checking argument in method wrapper_CUDA_{})"


@pytest.mark.parametrize(
    ("said", "on_the_cpu"),
    [
        (OLD.format("cuda:0", "cpu", "mat2", "mm"), "the weight"),
        (OLD.format("cpu", "cuda:0", "mat2", "mm"), "the input"),
        (OLD.format("cpu", "cuda:0", "mat1", "addmm"), "the weight"),
        (
            NEW.format("index", "cuda:0", "cpu", "_index_select"),
            "the table looked up, such as an embedding's weight",
        ),
        (NEW.format("index", "cpu", "cuda:0", "_index_select"), "the indices"),
        (NEW.format("tensors", "cpu", "cuda:0", "cat"), ""),
    ],
)
def test_the_operand_on_the_cpu_is_named(said: str, on_the_cpu: str) -> None:
    operand = operands.of(f"RuntimeError: {said}")
    assert operand is not None
    assert operand.on_the_cpu == on_the_cpu
    assert "on the CPU" in operands.told(said)


def test_two_gpus_and_other_words_are_no_matter_of_the_cpu() -> None:
    assert operands.told(OLD.format("cuda:0", "cuda:1", "mat2", "mm")) == ""
    assert operands.of("RuntimeError: Expected all tensors to be on the same device") is None


def test_without_any_offload_it_is_the_answer_and_with_one_an_addition() -> None:
    frames = '  File "/e/site-packages/torch/nn/functional.py", line 2551, in embedding\n'
    error = f"RuntimeError: {NEW.format('index', 'cuda:0', 'cpu', '_index_select')}\n"
    log = Log("train.log", f"Traceback (most recent call last):\n{frames}{error}")
    alone = diagnose(log).conclusion
    assert alone is not None
    assert alone.is_known
    assert alone.cause.startswith("of index_select, the argument index, the indices, is on the GPU")
    beside = diagnose(log, unread={"train.py": 'model = load(device_map="auto")\n'}).conclusion
    assert beside is not None
    assert beside.cause.startswith("most likely device_map")
    assert "an embedding's weight) on the CPU" in beside.cause
