# SPDX-License-Identifier: Apache-2.0
"""A log of any size and form is read in bounded memory, with the lines of the file."""

import io
from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.diagnosis.log import read_log

MIB = 1 << 20
LINE = "[rank0]: nothing to see on this line of a long log\n"
FAILED = 'Traceback (most recent call last):\n  File "/a/b.py", line 1, in f\nKeyError: in the middle\n'


def test_colours_and_bars_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(
        b"\x1b[1;31mRuntimeError: red\x1b[0m\n 1%|#  | 1/9\r 2%|#  | 2/9\rValueError: behind a bar\n"
    )
    log = read_log(str(path))
    assert log.text.startswith("RuntimeError: red\n")
    assert log.context(log.text.index("ValueError")) == "ValueError: behind a bar"


def test_a_log_of_windows_has_the_same_lines(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_bytes(b"> train.py --offload\r\nValueError: x\r\n")
    assert read_log(str(tmp_path / "train.log")).text == "> train.py --offload\nValueError: x\n"


def test_the_first_failure_in_the_middle_of_a_long_log_is_kept_with_its_line(tmp_path: Path) -> None:
    before, after = 5 * MIB // len(LINE), 9 * MIB // len(LINE)
    path = tmp_path / "train.log"
    path.write_text(LINE * before + FAILED + LINE * after + "the end\n", encoding="utf-8")
    log = read_log(str(path))
    assert len(log.text) < 6 * MIB
    assert log.line_at(log.text.index("KeyError")) == before + 3
    assert log.line_at(log.text.index("the end")) == before + 3 + after + 1


def test_a_pipe_is_read_as_a_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Piped:
        buffer = io.BytesIO(b"ValueError: piped\n")

    monkeypatch.setattr("sys.stdin", Piped)
    assert read_log("-").text == "ValueError: piped\n"


def test_a_log_that_windows_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes("ValueError: of PowerShell\r\n".encode("utf-16"))
    assert "ValueError: of PowerShell" in read_log(str(path)).text


def test_of_two_runs_in_one_file_the_last_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    step = "iteration 7/ 100 | elapsed time per iteration (ms): 500.0 | lm loss: 2.0E+00 |\n"
    second = FAILED.replace("in the middle", "of the second run")
    path.write_text(FAILED + step + second, encoding="utf-8")
    assert main(["diagnose", str(path)]) == 1
    out = capsys.readouterr().out
    assert "of the second run" in out
    assert "in the middle" not in out
