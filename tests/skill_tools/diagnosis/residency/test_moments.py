# SPDX-License-Identifier: Apache-2.0
"""A rule about clipping is no answer where the run failed elsewhere with the same words."""

import pytest

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log

FAILED = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/{file}.py", line 12, in {function}
RuntimeError: No backend type associated with device type cpu
"""


@pytest.mark.parametrize(
    ("file", "function", "told"),
    [
        ("nn/utils/clip_grad", "clip_grad_norm_", True),
        ("distributed/checkpoint/state_dict", "set_optimizer_state_dict", False),
    ],
)
def test_the_rule_about_clipping_is_told_of_clipping(file: str, function: str, *, told: bool) -> None:
    found = diagnose(Log("log", FAILED.format(file=file, function=function)), framework="fsdp2")
    assert any(rule.id == "fs2-offload-clip" for error in found.errors for rule in error.rules) is told
