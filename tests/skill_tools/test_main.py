"""The door itself: what is said before any command is loaded."""

import sys

import pytest

from skill_tools.__main__ import main


def test_an_older_python_is_told_which_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    monkeypatch.setattr(sys, "version", "3.10.13 (main) [GCC]")
    assert main(["lint", "run.yaml"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "offload: needs Python 3.11 or later, this is 3.10.13\n")
