# SPDX-License-Identifier: Apache-2.0
"""The blocks of a terminal: their content, their width, and no raw text of an input."""

import os
import re
import sys

import pytest

from skill_tools.__main__ import main
from skill_tools.bundle import root
from skill_tools.configs.config import Place
from skill_tools.reports.blocks import Paper, as_blocks
from skill_tools.reports.findings import ReadAs, report
from skill_tools.rules.finding import Evidence, Finding, Fix, LintResult, Next, Severity

TEXT = "model:\n  num_layers: 4\n\tcpu_offloading: true  # here\x1b[31m\n" + "x" * 400 + " spot: 1\n"


def finding(line: int = 3, column: int = 2, **more: object) -> Finding:
    fields: dict[str, object] = {
        "title": "t",
        "message": "does not work: model.cpu_offloading=true (line 3), " + "word " * 40,
        "observed": {},
        "why": "Because.",
        "evidence": Evidence("msg", "a.py::f", "no"),
        "next": "Set it to 1.",
        "fix": Fix("safe", "d", (), "-a=1\n+a=2\n"),
        "docs": "d",
        "effect": "raises",
        "text": ("no support for …",),
        "after": (Next("xx-y", Severity.ERROR, "breaks next", "Mend it."),),
    }
    return Finding(
        rule="la-pp",
        severity=Severity.ERROR,
        place=Place("run.yaml", line, column),
        **(fields | more),  # type: ignore[arg-type]
    )


def shown(*findings: Finding, **options: bool) -> str:
    read = [ReadAs("run.yaml", "megatron-bridge", "Megatron Bridge", "model.cpu_offloading")]
    results = [("run.yaml", LintResult(findings, ()))]
    return as_blocks(report(results, [], read=read, texts={"run.yaml": TEXT}), **options)


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int, **environment: str) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((columns, 30)))


def test_a_block_says_where_what_happens_the_frameworks_text_and_the_change() -> None:
    lines = shown(finding()).split("\n")
    assert lines[0] == "run.yaml is read as Megatron Bridge (model.cpu_offloading)"
    assert lines[2] == "run.yaml:3:2 error la-pp: refused at startup"
    assert lines[3] == "  3 |     cpu_offloading: true  # here\\x1b[31m"
    assert lines[4].startswith("  does not work: model.cpu_offloading=true (line 3), word")
    text = "\n".join(lines)
    for part in (
        "\n  the framework says: no support for …\n",
        "\n  change: Set it to 1.\n    -a=1\n    +a=2\n",
        "\n  after this: error xx-y: breaks next → Mend it.\n",
    ):
        assert part in text
    assert "why:" not in text
    several = shown(finding()._replace(text=("no support for …", "not supported: …")))
    assert "\n  the framework says: no support for …\n  or: not supported: …\n" in several
    assert "\n  why: Because.\n  source: a.py::f\n" in shown(finding(), explain=True)
    assert lines[-1] == "1 error in 1 input"


def test_a_line_is_shown_once_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = (finding(), finding(message="another"), finding(line=2, column=3))
    piped = shown(*findings)
    assert piped.count("  3 | ") == 1
    assert piped.count("run.yaml:3:2 error") == 1, "its place too, in a pipe"
    assert piped.count("error la-pp: refused at startup") == 3
    assert "^" not in piped
    terminal(monkeypatch, 100, NO_COLOR="1")
    seen = shown(*findings)
    assert seen.count("run.yaml:3:2 error") == 2
    assert seen.count("  3 |     cpu_offloading: true  # here\\x1b[31m\n    |     ^^^^^^^^^^^^^^\n") == 1
    assert seen.count("  2 |   num_layers: 4\n    |   ^^^^^^^^^^\n") == 1


def test_what_the_line_shows_is_not_said_again() -> None:
    said = finding(message="does not work: cpu_offloading=true (line 3), pp=2", beside="does not work: pp=2")
    assert "\n  does not work: pp=2\n" in shown(said)
    assert "cpu_offloading=true (line 3)" in shown(said._replace(place=Place("run.yaml", 99, 2)))


def test_a_file_with_nineteen_faults_is_one_call_of_two_thousand_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokenizers took 1,973 and 1,990 tokens of 7,070 characters, when there was one finding more."""
    monkeypatch.chdir(root() / "evals" / "files")
    assert main(["lint", "launch_70b.sh"]) == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"\n12 errors, 4 warnings, 2 info in 1 input; \d+ rules asked, known up to mega", printed
    )
    assert len(printed) < 7100


@pytest.mark.parametrize("columns", [50, 72, 120])
def test_the_width_of_the_terminal_is_kept(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch, columns, NO_COLOR="1")
    text = shown(finding(), finding(line=4, column=402))
    assert max(map(len, text.split("\n"))) <= columns
    assert "spot" in text


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in shown(finding())
    terminal(monkeypatch, 100)
    coloured = shown(finding())
    assert "\x1b[1;31merror\x1b[0m" in coloured
    assert "\x1b[31m" not in coloured, "the input's own"
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        terminal(monkeypatch, 100, **plain)
        assert "\x1b" not in shown(finding())


def test_a_place_beyond_the_text_has_no_source_line() -> None:
    assert " | " not in shown(finding(line=99))
    assert Paper(10, colours=False).width == 50
