# SPDX-License-Identifier: Apache-2.0
"""An exception that names the refused value, or the release without a name, needs no fact to be told."""

import pytest

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.log import Log

RUN = {"run.yaml": "cpu_offload: true\ntorch_compile: true\n"}


def concluded(error: str, package: str = "mytrainer/config.py") -> Conclusion:
    log = f'Traceback (most recent call last):\n  File "/e/site-packages/{package}", line 9, in check\n{error}\n'
    found = diagnose(Log("train.log", log), unread=RUN).conclusion
    assert found is not None
    return found


def test_a_refusal_is_told_in_its_own_words_with_what_the_run_has() -> None:
    found = concluded(
        "ValueError: `cpu_offload` cannot be used with `torch_compile`. Please set torch_compile to False."
    )
    assert found.is_known
    assert "site-packages/mytrainer/config.py:9" in found.cause
    assert "cpu_offload (run.yaml:1), torch_compile (run.yaml:2)" in found.cause
    assert found.change == (
        "as it says: Please set torch_compile to False",
        "or without cpu_offload (run.yaml:1)",
    )


def test_each_way_out_that_a_refusal_offers_is_told() -> None:
    found = concluded(
        "ZeRORuntimeException: cpu_offload is slow with it. Please either use DeepSpeedCPUAdam or set another. "
        'You can also set "force_cpu_optimizer": false in your file.'
    )
    assert found.change[:2] == (
        "as it says: Please either use DeepSpeedCPUAdam or set another",
        'as it says: You can also set "force_cpu_optimizer": false in your file',
    )


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (
            "Exception: DeepSpeed and FSDP do not support `clip_grad_value_`. Use `clip_grad_norm_` instead.",
            "as it says: Use `clip_grad_norm_` instead",
        ),
        (
            "ValueError: Found `scheduler` in the DeepSpeed config, but no `optimizer`. Please configure both.",
            "as it says: Please configure both",
        ),
        (
            "ValueError: Cannot use multiple adapters in DeepSpeed ZeRO-3.",
            "one without the other: no multiple adapters, or no DeepSpeed ZeRO-3",
        ),
        (
            "ValueError: Offloading is on, and you move the model. This is not compatible with offloading.",
            "one of the two without the other",
        ),
    ],
)
def test_what_shards_is_refused_as_what_offloads(error: str, change: str) -> None:
    assert concluded(error).change[0] == change


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: batch_size must be a multiple of 8",  # no offload
        "ValueError: offload folder /tmp/x holds 3 files",  # refuses nothing
        "KeyError: 'cpu_offload is not supported'",  # a name that was looked up
        "RuntimeError: deepspeed ended. Please file an issue",  # no way out
    ],
)
def test_other_words_refuse_no_offload(error: str) -> None:
    assert not concluded(error).is_known


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            "ImportError: cannot import name 'gone' from 'transformers.fsdp' (/e/f.py)",
            "transformers.fsdp has no gone",
        ),
        ("AttributeError: module 'vllm.core' has no attribute 'Pool'", "vllm.core has no Pool"),
        ("TypeError: Accelerator.__init__() got an unexpected keyword argument 'x'", "has no argument x"),
    ],
)
def test_a_name_that_the_other_library_lacks_is_told(error: str, told: str) -> None:
    found = concluded(error, "mylib/trainer.py")
    assert found.is_known
    assert "mylib was written for another release" in found.cause
    assert told in found.cause


def test_a_library_that_lacks_its_own_name_is_none() -> None:
    assert not concluded(
        "ImportError: cannot import name 'gone' from 'mylib.models' (/e/f.py)", "mylib/trainer.py"
    ).is_known


@pytest.mark.parametrize(
    ("said", "change"),
    [
        (
            "DeepSpeed ZeRO-3 or FSDP is incompatible with PTQ-quantized models.",
            "no DeepSpeed ZeRO-3 or FSDP, or no PTQ-quantized models",
        ),
        (
            "You cannot use activation offloading with FSDP CPU offload.",
            "no activation offloading, or no FSDP CPU offload",
        ),
        ("Unsloth does not support DeepSpeed ZeRO-3 yet.", "no Unsloth, or no DeepSpeed ZeRO-3"),
    ],
)
def test_the_two_that_a_refusal_holds_apart_are_the_change(said: str, change: str) -> None:
    assert concluded(f"ValueError: {said}").change[0] == f"one without the other: {change}"
