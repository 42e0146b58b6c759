# SPDX-License-Identifier: Apache-2.0
"""An offload without effect is seen by its own line, or by unchanged figures."""

from collections.abc import Mapping

import pytest

from skill_tools.diagnosis.diagnosis import Diagnosis, diagnose
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.quiet import Complaint
from skill_tools.diagnosis.series import around, inert

SAVER = {"loop.py": "from torch_memory_saver import torch_memory_saver\n"}
SWAP = {"run.toml": "blocks_to_swap = 18\n"}


def answer(log: str, files: Mapping[str, str]) -> Diagnosis:
    return diagnose(Log("train.log", log), unread=files)


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        ("WARNING:saver:TorchMemorySaver is disabled for this process because it has no LD_PRELOAD", True),
        ("UserWarning: Offloading weights is deprecated and does not have any effect", False),
        ("UserWarning: offload_weights does not have any effect", True),
        ("Gradient buffers will not be offloaded when graphs are captured", True),
        ("zero_config ... offload_param=None, offload: disabled", False),
        ("the gate is disabled", False),
    ],
)
def test_a_line_says_that_an_offload_does_nothing(line: str, holds: bool) -> None:
    found = inert.find(Log("train.log", f"step 1 loss 2.0\n{line}\n"))
    assert (found is not None and found.line == 2) is (holds or "Offloading" in line)


def test_such_a_line_is_the_cause_where_the_run_asks_for_the_offload_and_nothing_failed() -> None:
    log = "TorchMemorySaver is disabled for the current process because LD_PRELOAD is empty\n"
    found = answer(log, SAVER).conclusion
    assert found is not None
    assert "does nothing (line 1): TorchMemorySaver is disabled" in found.cause
    assert found.change[0] == "its condition: LD_PRELOAD is empty"
    assert answer(log, {"loop.py": "x = 1\n"}).conclusion is None


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("before sleep: 40.1 GB\nafter sleep: 39.9 GB\n", "unmoved"),
        ("before sleep: 40.1 GB\nafter sleep: 12.0 GB\n", "rest"),
        ("before sleep: 40.1 GB\nafter sleep: 4.0 GB\n", ""),
        ("before offload 512 MB\nafter offload 512 MB\n", ""),
        ("before offload: host memory 40 GB\nafter offload: host memory 40 GB\n", ""),
        ("Before training: 40.1 GB\nAfter training: 40.1 GB\n", ""),
        ("after offload: 9.8 GB\nstep 1\nafter offload: 11 GB\nstep 2\nafter offload: 14 GB\n", "growth"),
        ("after offload: 9.8 GB\nstep 1\nafter offload: 9.9 GB\nstep 2\nafter offload: 9.7 GB\n", ""),
    ],
)
def test_figures_around_an_offload_are_compared(log: str, kind: str) -> None:
    found = around.find(Log("train.log", log))
    assert (found.kind if found else "") == kind


def test_figures_that_stay_are_a_cause_under_an_offload_and_a_part_is_a_suspect() -> None:
    log = "before pause: 18.6 GiB\nafter pause: 18.6 GiB\n"
    found = answer(log, SAVER)
    assert found.conclusion is not None
    assert found.conclusion.cause.startswith(
        "18.6 GiB of GPU memory before the offload and 18.6 GiB after it (line 2)"
    )
    assert answer(log, {}).conclusion is None
    part = answer("before offload: 41 GiB\nafter offload: 9.4 GiB\n", {"run.yaml": "cpu_offload: true\n"})
    assert part.conclusion is None
    assert part.suspects[Complaint.RESULTS][0].cause.startswith("9.4 GiB of 41.0 GiB stay on the GPU")


def test_what_grows_from_cycle_to_cycle_is_told_with_a_full_gpu() -> None:
    cycles = "".join(f"after offload: {left} GB\nstep {left}\n" for left in (10, 12, 15))
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    found = answer(
        f"{cycles}Traceback (most recent call last):\n{error}", {"a.sh": "--offload-train\n"}
    ).conclusion
    assert found is not None
    assert "at last 14.0 GiB are left on the GPU" in found.cause or "at last 15.0 GiB" in found.cause


def test_a_run_that_shows_nothing_wrong_has_suspects_and_no_cause() -> None:
    found = answer("step 1 loss 2.0\nstep 2 loss 1.9\n", SWAP)
    assert found.conclusion is None
    assert not found.has_problem
    assert found.suspects[Complaint.RESULTS][0].cause.startswith("the swap gives a block's buffer")
    assert answer("step 1 loss 2.0\nstep 2 loss 1.9\n", {"run.toml": "blocks_to_swap = 0\n"}).suspects == {}
