# SPDX-License-Identifier: Apache-2.0
"""A command advised by the tool begins as the one that advises it."""

import subprocess
import sys
from pathlib import Path

import pytest

from skill_tools import started
from skill_tools.__main__ import COMMANDS, main
from skill_tools.bundle import root
from skill_tools.errors import UnusableInput
from skill_tools.started import as_started, started_as

CLONE = root()


@pytest.mark.parametrize(
    ("program", "typed", "said"),
    [
        ("/usr/local/bin/offload", ["/usr/bin/python3", "/usr/local/bin/offload", "lint"], "offload"),
        ("C:/Scripts/offload.exe", ["python.exe"], "offload"),
        ("/usr/bin/pytest", ["python3"], "offload"),
        ("", [], "offload"),
        ("skill_tools", ["python3", "skill_tools", "lint"], "skill_tools"),
        ("skill_tools/", ["python3", "skill_tools/", "lint"], "skill_tools/"),
        ("/a b/skill_tools", ["python3", "/a b/skill_tools", "lint"], "'/a b/skill_tools'"),
        ("/x/skill_tools/__main__.py", ["python3", "-m", "skill_tools"], "-m skill_tools"),
        ("/x/cpu_offloading/__main__.py", ["python3", "-m", "cpu_offloading"], "-m cpu_offloading"),
        ("skill_tools", ["python3", "skill_tools", "card", "render"], "offload"),
    ],
)
def test_it_is_what_was_typed(program: str, typed: list[str], said: str) -> None:
    told = started_as(program, typed)
    assert told == said or told.partition(" ")[2] == said


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_messages_call_it_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each place where a command may stand; a word of prose and a name of the user's stay."""
    monkeypatch.setattr(started, "COMMAND", r"python3 C:\skill_tools")
    said = as_started(f"offload {name}\n  offload {name} x; `offload {name}`, or offload {name}")
    assert said.count(rf"python3 C:\skill_tools {name}") == 4
    assert "offload" not in said
    for text in (f"offload {name}s", f"to offload {name}", "try offload of states", f"cpu-offload {name}"):
        assert as_started(text) == text
    with pytest.raises(SystemExit):
        main([name, "--help"])
    told = capsys.readouterr().out
    assert f"offload {name} " not in told.partition("\n\n")[2]


def test_a_message_of_the_library_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "COMMAND", "python3 skill_tools")
    error = UnusableInput("no plan", expected="one of `offload plan`", attempt="offload plan --format json")
    assert str(error) == (
        "no plan; expected one of `python3 skill_tools plan`; try python3 skill_tools plan --format json"
    )
    assert error.attempt == "python3 skill_tools plan --format json"


@pytest.mark.parametrize("start", [[str(CLONE / "skill_tools")], ["-m", "skill_tools"]])
def test_a_clone_tells_what_runs_in_it(start: list[str], tmp_path: Path) -> None:
    """The hint of a refusal, run as it stands from the user's folder, answers."""
    words = [sys.executable, *start]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(CLONE)}

    def ran(command: list[str] | str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, shell=isinstance(command, str), cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    refused = ran([*words, "plan", "--model", "nope", "--gpu", "h100"])
    hint = refused.stderr.split("`")[1]
    assert hint.endswith(" plan --list-models")
    assert "llama-3-8b" in ran(hint).stdout, hint
