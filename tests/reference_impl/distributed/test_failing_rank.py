# SPDX-License-Identifier: Apache-2.0
"""A failing rank ends the others at once, and its error is the reported one: over gloo, and on two GPUs over NCCL."""

import os
import subprocess
import sys

import failing_rank
import poor_rank
import pytest
import torch
from rank_processes import run_as_torchrun, run_ranks

from skill_tools.bundle import root

BROKEN = "the memory of this rank is broken"
WORK_LOST = f"WorkLostError: a thread of the optimizer's has ended, of OSError('{BROKEN}')"
CASES = [
    ("fsdp2", "update", WORK_LOST),
    ("fsdp2", "wait", f"OSError: {BROKEN}"),
    ("fsdp2", "interrupt", "KeyboardInterrupt"),
    ("ddp", "update", WORK_LOST),
    ("ddp", "send", f"OSError: {BROKEN}"),
]
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def needs_a_device_each(place):
    if place == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.mark.slow
@PLACES
@pytest.mark.parametrize(("engine", "how", "said"), CASES)
def test_a_rank_that_fails_ends_with_its_error(place, engine, how, said):
    """Which ends the run, though the other waits for it; the collectives' own limit is ten minutes."""
    needs_a_device_each(place)
    with pytest.raises(AssertionError, match="exit code 1:") as caught:
        run_as_torchrun(failing_rank.__file__, 2, place, engine, how, timeout_s=120)
    assert said in str(caught.value), caught.value
    assert "nobody has failed" not in str(caught.value)


@pytest.mark.slow
@PLACES
def test_torchrun_ends_the_ranks_that_wait_for_one_that_is_gone(place):
    needs_a_device_each(place)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(root()), str(root() / "tests" / "support")])
    done = subprocess.run(
        [*launch, failing_rank.__file__, place, "fsdp2", "kill"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        timeout=120,
    )
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL) received" in done.stderr, done.stderr[-3000:]
    assert "nobody has failed" not in done.stderr


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_one_rank_cannot_is_refused_on_every_rank(tmp_path, ranks):
    """The error names the rank and its missing memory, and model and host are as before."""
    run_ranks(poor_rank.__file__, ranks, str(tmp_path / "store"))
