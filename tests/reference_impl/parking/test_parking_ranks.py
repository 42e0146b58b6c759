# SPDX-License-Identifier: Apache-2.0
"""Several ranks park together, and none alone."""

from pathlib import Path

import parked_ranks
import pytest
import torch
from rank_processes import run_ranks


@pytest.mark.parametrize(
    "case",
    [
        "fsdp",
        "fails",
        *(pytest.param(each, marks=pytest.mark.slow) for each in parked_ranks.CASES if each != "fsdp"),
    ],
)
def test_two_ranks_train_as_if_they_had_never_parked(tmp_path, case):
    run_ranks(Path(parked_ranks.__file__), 2, str(tmp_path / "store"), "cpu", case)


@pytest.mark.cuda
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
def test_two_gpus_train_as_if_they_had_never_parked(tmp_path):
    cases = (*parked_ranks.CASES, "fails")
    run_ranks(Path(parked_ranks.__file__), 2, str(tmp_path / "store"), "cuda", *cases, timeout_s=280)
