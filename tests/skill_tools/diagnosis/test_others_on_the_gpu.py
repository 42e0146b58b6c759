# SPDX-License-Identifier: Apache-2.0
"""Other processes on a full GPU, by the names in the log."""

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.memory import out_of_memory

FULL = """\
(Rollout pid=801) generated 128 samples
(Trainer pid=702) Traceback (most recent call last):
(Trainer pid=702)   File "/w/actor.py", line 4, in train
(Trainer pid=702) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity \
of 79.11 GiB of which 512.00 MiB is free. Process 801 has 47.60 GiB memory in use. Process 702 has 30.90 GiB memory \
in use. Of the allocated memory 28.11 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.
"""


def test_the_other_process_is_called_by_the_name_of_its_lines() -> None:
    found = out_of_memory(Log("log", FULL))
    assert found is not None
    assert found.other == "Rollout (pid 801)"
    conclusion = diagnose(Log("log", FULL)).conclusion
    assert conclusion is not None
    assert "Rollout (pid 801) holds" in conclusion.cause


def test_a_process_that_writes_no_line_has_no_name() -> None:
    found = out_of_memory(Log("log", FULL.replace("(Rollout pid=801) generated 128 samples\n", "")))
    assert found is not None
    assert found.other == ""
    assert found.others_bytes > 0
