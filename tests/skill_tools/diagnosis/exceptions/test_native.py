# SPDX-License-Identifier: Apache-2.0
"""An abort outside of Python has the reason that its process wrote before it, and its fault handler's stack."""

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.exceptions import native
from skill_tools.diagnosis.failures import Frame, failures
from skill_tools.diagnosis.log import Log

RESUMED = """\
(Engine pid=7) [saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue: the caller tries again)
(Engine pid=7) [torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=9
(Trainer pid=8) step 3 loss 1.2
(Engine pid=7) Fatal Python error: Aborted
(Engine pid=7)
(Engine pid=7) Thread 0x00007f0000000001 (most recent call first):
(Engine pid=7)   File "/usr/lib/python3.12/threading.py", line 359 in wait
(Engine pid=7)
(Engine pid=7) Current thread 0x00007f0000000002 (most recent call first):
(Engine pid=7)   File "/env/site-packages/torch_memory_saver/entrypoint.py", line 80 in resume
(Engine pid=7)   File "/env/site-packages/sglang/srt/managers/scheduler.py", line 12 in resume_memory_occupation
"""


def test_the_stack_is_the_failed_threads_outermost_first() -> None:
    (abort,) = native.completed(Log("log", RESUMED), failures(Log("log", RESUMED)))
    assert [frame.function for frame in abort.frames] == ["resume_memory_occupation", "resume"]
    assert abort.frames[-1] == Frame("/env/site-packages/torch_memory_saver/entrypoint.py", 80, "resume")


def test_the_reason_is_its_own_process_last_complaint() -> None:
    (abort,) = native.completed(Log("log", RESUMED), failures(Log("log", RESUMED)))
    assert "error: 2 (out of memory)" in abort.text
    assert "may not be an issue" not in abort.text


def test_another_rank_s_complaint_is_no_reason() -> None:
    text = RESUMED.replace("(Engine pid=7) [torch_memory_saver", "(Engine pid=9) [torch_memory_saver")
    (abort,) = native.completed(Log("log", text), failures(Log("log", text)))
    assert abort.text == "Fatal Python error: Aborted"


def test_a_resume_that_aborts_is_told_who_filled_the_gpu() -> None:
    conclusion = diagnose(Log("log", RESUMED)).conclusion
    assert conclusion is not None
    assert conclusion.is_known
    assert "a resume maps all that was paused again at once" in conclusion.cause
    assert "share of the GPU" in conclusion.change[0]


def test_a_log_that_ends_with_an_abort_and_says_nothing_else_has_no_reason() -> None:
    (abort,) = native.completed(
        Log("log", "Segmentation fault (core dumped)"),
        failures(Log("log", "Segmentation fault (core dumped)")),
    )
    assert abort.frames == ()
    assert abort.text.startswith("Segmentation fault")


def test_a_segfault_of_a_library_has_the_functions_behind_it_and_its_phase() -> None:
    text = """\
saving checkpoint at iteration 20 to /ckpt
!!!!!!! Segfault encountered !!!!!!!
  File "./signal/../sysdeps/unix/sysv/linux/x86_64/libc_sigaction.c", line 0, in 0x00007fed
  File "<unknown>", line 0, in crc32_16bytes(void const*, unsigned long, unsigned int)
  File "<unknown>", line 0, in caffe2::serialize::PyTorchStreamWriter::writeRecord(std::string const&, void const*)
"""
    (abort,) = native.completed(Log("log", text), failures(Log("log", text)))
    assert [frame.function for frame in abort.frames] == ["writeRecord", "crc32_16bytes"]
    conclusion = diagnose(Log("log", text), unread={"run.sh": "--optimizer-cpu-offload\n"}).conclusion
    assert conclusion is not None
    assert "forked" in conclusion.cause
    assert "spawned" in conclusion.change[0]


def test_a_stack_ends_where_no_further_line_of_its_process_can_be_its_own() -> None:
    """Each of a log's aborts would otherwise be followed through all that other ranks wrote after it."""
    others = "(Trainer pid=8) step 4 loss 1.1\n" * 10_000
    text = f'{RESUMED}{others}(Engine pid=7)   File "/env/late.py", line 1 in late\n'
    (abort,) = native.completed(Log("log", text), failures(Log("log", text)))
    assert [frame.function for frame in abort.frames] == ["resume_memory_occupation", "resume"]
