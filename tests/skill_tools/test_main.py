# SPDX-License-Identifier: Apache-2.0
"""The door itself: its words before any command is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skill_tools import bundle
from skill_tools.__main__ import main
from skill_tools.bundle import root


def test_an_older_python_is_told_which_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    monkeypatch.setattr(sys, "version", "3.10.13 (main) [GCC]")
    assert main(["lint", "run.yaml"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "offload: needs Python 3.11 or later, this is 3.10.13\n")


@pytest.mark.parametrize("words", [["explain", "--\x1b]0;x\a"], ["plan", "--gpus", "\x9b31m"], ["\u202e"]])
def test_a_complaint_about_options_shows_what_a_terminal_would_obey(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.replace("\n", "").isprintable()


def test_help_keeps_to_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((72, 30)))
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    with pytest.raises(SystemExit):
        main(["lint", "--help"])
    printed = capsys.readouterr().out
    wide = [line for line in printed.splitlines() if len(line) > 72]
    assert all(line.startswith("  offload lint ") for line in wide), "an example is one line"
    description = printed.partition("Find settings")[2].partition("\noptions:")[0]
    assert max(len(line) for line in description.splitlines() if line[:1].strip()) <= 72
    assert "  offload lint run.yaml other.yaml configs/\n" in description


def test_a_python_without_the_two_packages_is_told_of_both_at_once(tmp_path: Path) -> None:
    """By the Python that ran, seldom the one started by `python3`."""
    (tmp_path / "run.yaml").touch()
    absent = "import sys; sys.modules.update(yaml=None, packaging=None)"
    start = f"{absent}; from skill_tools.__main__ import main; sys.exit(main(['lint', 'run.yaml']))"
    done = subprocess.run(
        [sys.executable, "-c", start],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root())}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.endswith(f"; try {sys.executable} -m pip install pyyaml packaging\n")


def test_an_extra_is_installed_where_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_PACKAGE", tmp_path / "skill_tools")
    assert bundle.to_install("reference").endswith(" -c constraints.txt in the skill's folder")
    (tmp_path / ".git").mkdir()
    assert bundle.to_install("reference").endswith(" -c constraints.txt in the clone")
