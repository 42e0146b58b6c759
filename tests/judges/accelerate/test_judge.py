# SPDX-License-Identifier: Apache-2.0
"""A short sitting of the judge for the newest unpacked release; `make test-accelerate` holds the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TREES = sorted(path.parent for path in (HERE.parents[2] / "build" / "accelerate").glob("*/accelerate"))


@pytest.mark.skipif(
    not TREES, reason="no release of accelerate is unpacked; make test-accelerate fetches some"
)
@pytest.mark.parametrize(
    "words", [("judge.py", "--configurations", "60"), ("plugins.py", "--plugins", "200")]
)
def test_rules_and_release_agree(words: tuple[str, ...]) -> None:
    command = [sys.executable, str(HERE / words[0]), *words[1:], str(TREES[-1])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
