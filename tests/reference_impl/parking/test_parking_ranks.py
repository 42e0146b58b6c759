"""Several ranks park together, and none alone."""

from pathlib import Path

import parked_ranks
import pytest
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
