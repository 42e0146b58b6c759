# SPDX-License-Identifier: Apache-2.0
"""A shell completes commands, options, choices and the names of rules, models and GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CALL = "from skill_tools.__main__ import process; process()"


def completed(line: str, folder: Path, shell: str = "bash") -> list[str]:
    """argcomplete's answer to the shell for `line`, with the cursor at its end."""
    answer = folder / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "PYTHONPATH": str(ROOT)}
    asked["_ARGCOMPLETE_SHELL"] = shell
    subprocess.run([sys.executable, "-c", CALL], env={**os.environ, **asked}, cwd=folder, check=True)
    return [word.strip() for word in answer.read_text().split("\n")]


def test_words_are_completed(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete", reason="the extra `completion` is not installed")
    (tmp_path / "broken.yaml").touch()
    for line, word in (
        ("offload expl", "explain"),
        ("offload explain la-p", "la-pp"),
        ("offload plan --model qwen3-30", "qwen3-30b-a3b"),
        ("offload plan --gpu h1", "h100"),
        ("offload lint --format sa", "sarif"),
        ("offload lint brok", "broken.yaml"),
    ):
        assert word in completed(line, tmp_path), line
    described = completed("offload plan --gpu h1", tmp_path, "zsh")
    assert "h100" in [word.partition(":")[0] for word in described]
    assert "{" not in "".join(described), "zsh shows the record of each GPU behind its name"
