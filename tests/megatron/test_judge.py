# SPDX-License-Identifier: Apache-2.0
"""A short sitting of the judge for each unpacked release; `make test-megatron` holds the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TREES = sorted(path.parent for path in (HERE.parents[1] / ".megatron-core").glob("*/megatron"))


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.skipif(not TREES, reason="no megatron-core release is unpacked; make test-megatron fetches some")
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_rules_and_release_agree(tree: Path) -> None:
    command = [sys.executable, str(HERE / "judge.py"), "--configurations", "40", str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
