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


def test_what_an_offload_of_states_leaves_is_named_where_a_step_found_no_room() -> None:
    frames = '  File "/e/site-packages/mine/model.py", line 9, in forward\n'
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    error += "GPU 0 has a total capacity of 23.64 GiB of which 1.00 GiB is free.\n"
    log = Log("train.log", f"Traceback (most recent call last):\n{frames}{error}")
    said = "frees weights or states alone: activations"
    config = {"ds.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'}
    offloaded = diagnose(log, unread=config).conclusion
    assert offloaded is not None
    assert said in offloaded.cause
    beside_an_engine = diagnose(log, unread={**config, "a.py": "enable_sleep_mode=True"}).conclusion
    assert beside_an_engine is not None
    assert said not in beside_an_engine.cause


def test_fragments_do_not_hide_the_tensor_there_was_no_room_for() -> None:
    frames = '  File "/e/transformers/models/x.py", line 9, in forward\n    logits = self.lm_head(hidden)\n'
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 2 has a total capacity of "
    error += (
        "79.15 GiB of which 3.00 GiB is free. Of the allocated memory 70.20 GiB is allocated by PyTorch, and "
    )
    error += "4.60 GiB is reserved by PyTorch but unallocated.\n"
    found = diagnose(Log("train.log", f"Traceback (most recent call last):\n{frames}{error}")).conclusion
    assert found is not None
    assert found.cause.startswith("fragmentation: 4.6 GiB")
    assert "memory ran out for the logits" in found.cause


def test_ranks_that_all_load_to_the_first_gpu_are_no_foreign_process() -> None:
    full = (
        "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total "
        "capacity of 79.11 GiB of which 28.12 MiB is free. Process 101 has 24.10 GiB memory in use. "
        "Process 102 has 24.00 GiB memory in use. Including non-PyTorch memory, this process has 22.90 GiB "
        "memory in use. Of the allocated memory 22.10 GiB is allocated by PyTorch.\n"
    )
    found = diagnose(Log("log", full)).conclusion
    assert found is not None
    assert "2 processes with as much as this rank" in found.cause
    assert len(found.change) == 1
    for other in (
        full.replace("rank5", "rank0"),
        full.replace("GPU 0", "GPU 5"),
        full.replace("24.00", "4.00"),
    ):
        conclusion = diagnose(Log("log", other)).conclusion
        assert conclusion is not None
        assert "as much as this rank" not in conclusion.cause
