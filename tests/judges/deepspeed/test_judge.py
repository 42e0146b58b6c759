# SPDX-License-Identifier: Apache-2.0
"""A short sitting of the judge with the newest unpacked release; `make test-deepspeed` holds the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
RELEASES = sorted(path.parent.name for path in (HERE.parents[2] / ".deepspeed").glob("*/deepspeed"))


@pytest.mark.deepspeed
@pytest.mark.skipif(not RELEASES, reason="no DeepSpeed release is unpacked; make test-deepspeed fetches some")
def test_rules_and_release_agree() -> None:
    newest = max(RELEASES, key=lambda version: tuple(map(int, version.split("."))))
    command = [sys.executable, str(HERE / "judge.py"), "--configurations", "100", newest]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
