"""The blocks of a terminal: what they show, how wide they are, and that nothing of an input reaches it raw."""

import os
import sys

import pytest

from skill_tools.configs.config import Place
from skill_tools.reports import blocks
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
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    monkeypatch.setattr(blocks.os, "get_terminal_size", lambda _: os.terminal_size((columns, 30)))


def test_a_block_says_where_what_happens_the_frameworks_text_and_the_change() -> None:
    lines = shown(finding()).split("\n")
    assert lines[0] == "run.yaml is read as Megatron Bridge (model.cpu_offloading)"
    assert lines[2] == "run.yaml:3:2 error la-pp: refused at startup"
    assert lines[3] == "  3 |     cpu_offloading: true  # here\\x1b[31m"
    assert lines[4] == "    |     ^^^^^^^^^^^^^^"
    text = "\n".join(lines)
    for part in (
        "\n  the framework says: no support for …\n",
        "\n  change: Set it to 1.\n    -a=1\n    +a=2\n",
        "\n  after this: error xx-y: breaks next → Mend it.\n",
    ):
        assert part in text
    assert "why:" not in text
    assert "\n  why: Because.\n  source: a.py::f\n" in shown(finding(), explain=True)
    assert lines[-1] == "1 error in 1 input"


def test_a_line_is_shown_once_in_a_row() -> None:
    text = shown(finding(), finding(message="another"), finding(line=2, column=3))
    assert text.count("  3 | ") == 1
    assert text.count("  2 |   num_layers: 4\n    |   ^^^^^^^^^^\n") == 1


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
