# SPDX-License-Identifier: Apache-2.0
"""Output follows the environment's facts about the reader: colours, width, a page for people."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROKEN = ROOT / "examples" / "broken_bridge.yaml"
STATED = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS")


@cache
def printed(*words: str | Path, **environment: str) -> str:
    """Return the text that the command prints into a pipe."""
    bare = {name: value for name, value in os.environ.items() if name not in STATED}
    command = [sys.executable, ROOT / "skill_tools", *words]
    return subprocess.run(
        command, env={**bare, **environment}, capture_output=True, text=True, check=False
    ).stdout


def test_a_pipe_gets_neither_colours_nor_marks() -> None:
    assert "\x1b[" not in printed("lint", BROKEN)
    assert "^^^" not in printed("lint", BROKEN)


def test_colours_may_be_forced_and_forbidden_where_there_is_no_terminal() -> None:
    forced = printed("lint", BROKEN, FORCE_COLOR="1")
    assert "\x1b[1;31merror\x1b[0m" in forced
    assert "^^^" in forced
    assert "\x1b[" not in printed("lint", BROKEN, FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[1;31m" in printed("lint", BROKEN, FORCE_COLOR="1", TERM="dumb")


@pytest.mark.parametrize("words", [("lint", BROKEN), ("lint", "--help")], ids=["lint", "help"])
def test_a_stated_width_holds_in_a_pipe(words: tuple[str | Path, ...]) -> None:
    as_started = printed("lint", "--help").removeprefix("usage: ").partition(" lint")[0]
    text = printed(*words, COLUMNS="60").replace(str(BROKEN), "FILE").replace(as_started, "offload")
    wide = [
        line
        for line in text.splitlines()
        if len(line) > 60 and not line.startswith(("FILE:", "    ", "  offload lint"))
    ]
    assert not wide
    for nonsense in ("", "0", "-3", "wide"):
        assert printed(*words, COLUMNS=nonsense) == printed(*words)


def test_explain_lays_out_its_page_for_people_alone() -> None:
    """A pipe's reader, such as an agent, gets Markdown as it is."""
    pytest.importorskip("rich")
    assert printed("explain", "la-pp").startswith("# la-pp: ")
    page = printed("explain", "la-pp", FORCE_COLOR="1", COLUMNS="70")
    assert "\x1b[" in page
    assert "```" not in page
    assert "# la-pp" not in page
    assert "# la-pp" not in printed("explain", "la-pp", FORCE_COLOR="1", NO_COLOR="1")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
@pytest.mark.parametrize(
    "words", [("lint", BROKEN), ("explain", "la-pp"), ("lint", BROKEN, "--format", "json")]
)
def test_a_full_device_is_an_error_of_the_device(words: tuple[str | Path, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, ROOT / "skill_tools", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "offload: the answer could not be written: No space left on device; expected "
    )
    assert done.stderr.count("\n") == 1
