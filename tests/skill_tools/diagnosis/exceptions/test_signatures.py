# SPDX-License-Identifier: Apache-2.0
"""A call whose arguments or results do not fit is told with its caller, callee and the release it was written for."""

import pytest

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.exceptions.signatures import home
from skill_tools.diagnosis.failures import Frame
from skill_tools.diagnosis.log import Log


def concluded(path: str, source: str, error: str) -> Conclusion:
    log = f'Traceback (most recent call last):\n  File "{path}", line 7, in build\n    {source}\n{error}\n'
    found = diagnose(Log("train.log", log)).conclusion
    assert found is not None
    return found


def test_a_library_that_leaves_an_argument_out_was_written_for_another_release() -> None:
    error = "TypeError: offload_context() missing 1 required positional argument: 'model_layers'"
    found = concluded("/e/site-packages/mine/block.py", "offload_context(", error)
    assert "build (block.py:7) of mine calls offload_context without 'model_layers'" in found.cause
    assert found.cause.startswith("releases that do not fit")
    assert "or a newer mine" in found.change[0]


def test_a_script_that_calls_so_is_told_to_look_at_the_function() -> None:
    error = "TypeError: park() takes 2 positional arguments but 3 were given"
    found = concluded("/home/me/train.py", "park(a, b, c)", error)
    assert (
        found.cause == "build (train.py:7) calls park with 3 arguments where it takes 2 positional arguments"
    )
    assert found.change[0] == "the arguments that the installed park takes: help(park)"


def test_an_argument_that_is_given_twice_is_named() -> None:
    error = "TypeError: Hook.__init__() got multiple values for argument 'device'"
    found = concluded("/e/site-packages/mine/block.py", "Hook(x, device=d)", error)
    assert "with 'device' twice" in found.cause


def test_another_number_of_results_names_the_function_whose_results_they_are() -> None:
    error = "ValueError: not enough values to unpack (expected 2, got 1)"
    found = concluded("/e/site-packages/mine/block.py", "context, sync = get_context(enabled)", error)
    assert "takes 2 results of get_context, which returns another number of them" in found.cause
    assert not concluded("/e/site-packages/mine/block.py", "a, b = line.split()[0]", error).cause.startswith(
        "rel"
    )
    assert not concluded("/home/me/train.py", "context, sync = get_context(enabled)", error).is_known


def test_a_private_name_that_is_gone_names_both_libraries() -> None:
    error = "AttributeError: 'DeepSpeedEngine' object has no attribute '_hooks'"
    found = concluded("/e/site-packages/trl/utils.py", "engine._hooks(engine.module)", error)
    assert "of trl was written for another release of deepspeed" in found.cause
    assert found.change[0].startswith("an older deepspeed")
    assert not concluded("/home/me/train.py", "engine._hooks(engine.module)", error).is_known


@pytest.mark.parametrize(
    ("path", "of"),
    [
        ("/e/lib/python3.11/site-packages/unsloth_zoo/a.py", "unsloth-zoo"),
        ("./Pai-Megatron-Patch/megatron_patch/model/block.py", "Pai-Megatron-Patch"),
        ("/root/slime/slime/backends/actor.py", "slime"),
        ("/home/me/run/train.py", ""),
        ("C:\\work\\musubi-tuner\\musubi\\swap.py", "musubi-tuner"),
    ],
)
def test_a_file_is_of_its_distribution_or_checkout(path: str, of: str) -> None:
    assert home(Frame(path, 1, "f")) == of


def test_a_checkout_with_the_name_of_a_known_distribution_is_that_one_and_a_script_in_it_is_the_user_s() -> (
    None
):
    assert home(Frame("/root/SimpleTuner/helpers/training/schedule.py", 540, "get")) == "simpletuner"
    assert home(Frame("/home/me/verl/train.py", 7, "main")) == ""
