# SPDX-License-Identifier: Apache-2.0
"""A diagnosis's next step, beside a plan and without one."""

import json

import pytest

from skill_tools.diagnosis.diagnosis import Diagnosis, diagnose
from skill_tools.diagnosis.log import Log
from skill_tools.reports import diagnoses

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.70 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved "
    "by PyTorch but unallocated."
)


@pytest.fixture
def found() -> Diagnosis:
    return diagnose(Log("train.log", OUT_OF_MEMORY))


def test_the_commands_to_plan_with_are_whole(found: Diagnosis) -> None:
    text = diagnoses.concise(found)
    assert "offload plan FILE --gpu-memory 23.7GiB" in text
    assert "offload plan --framework pytorch --model NAME --gpu-memory 23.7GiB" in text


def test_beside_a_plan_no_command_asks_for_one(found: Diagnosis) -> None:
    for text in (
        diagnoses.concise(found, planned=True),
        diagnoses.markdown(found, planned=True),
        "\n".join(json.loads(diagnoses.as_json(found, {}))["next"]),
    ):
        assert "offload plan" not in text
        assert "next:" not in text
