# SPDX-License-Identifier: Apache-2.0
"""Fixes are written whole or not at all; a path that is no file, or beyond all bounds, is refused in one line and at
once."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs import files
from skill_tools.configs.files import replace_text
from skill_tools.errors import UnusableInput, printable

FIXABLE = "optimizer:\n  optimizer_cpu_offload: true\n  use_torch_optimizer_for_cpu_offload: true\n"


@pytest.fixture
def fixable(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_bytes(FIXABLE.replace("\n", "\r\n").encode())
    return path


def test_a_fix_keeps_mode_link_and_line_ends(fixable: Path, tmp_path: Path) -> None:
    fixable.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(fixable)
    main(["lint", "--fix", "--unsafe-fixes", str(link)])
    data = fixable.read_bytes()
    assert data != FIXABLE.replace("\n", "\r\n").encode()
    assert data.count(b"\r\n") == data.count(b"\n")
    assert stat.S_IMODE(fixable.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "run.yaml"]


def test_a_file_with_two_names_keeps_both(fixable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = fixable.with_name("other.yaml")
    os.link(fixable, other)
    assert main(["lint", "--fix", "--unsafe-fixes", str(fixable)]) == 2
    assert "hard link" in capsys.readouterr().err
    assert fixable.read_bytes() == other.read_bytes() == FIXABLE.replace("\n", "\r\n").encode()


def test_a_disk_that_is_full_leaves_the_file_as_it_was(
    fixable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    before = fixable.read_bytes()
    assert main(["lint", "--fix", "--unsafe-fixes", str(fixable)]) == 2
    assert fixable.read_bytes() == before
    assert [path.name for path in fixable.parent.iterdir()] == ["run.yaml"]
    err = capsys.readouterr().err
    assert "cannot write" in err
    assert "no space left on device" in err


@pytest.mark.parametrize("option", ["--output-file", "--write-baseline"])
def test_a_device_or_a_pipe_is_not_taken_away(
    fixable: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If root may do it, a file would take the place of /dev/null for every program."""
    pipe = fixable.with_name("pipe")
    os.mkfifo(pipe)
    assert main(["lint", str(fixable), option, str(pipe)]) == 2
    assert pipe.is_fifo()
    assert "(it is not a regular file)" in capsys.readouterr().err
    assert {path.name for path in fixable.parent.iterdir()} == {"run.yaml", "pipe"}


def test_a_file_that_may_not_be_written_is_unusable(fixable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # as it is to everybody but root
    assert main(["lint", "--fix", "--unsafe-fixes", str(fixable)]) == 2
    with pytest.raises(UnusableInput, match="cannot write"):
        replace_text(fixable.parent / "gone" / "x.yaml", "x")


@pytest.mark.parametrize(
    "arguments",
    [
        ["lint", "PIPE"],
        ["lint", "/dev/zero"],
        ["lint", "--versions", "PIPE", "run.yaml"],
        ["diagnose", "PIPE"],
        ["diagnose", "/dev/zero"],
        ["plan", "--model", "llama-3-8b", "--profile", "PIPE"],
        ["plan", "--model", "llama-3-8b", "--profile", "/dev/zero"],
        ["plan", "--model", "llama-3-8b", "--profile", "NESTED"],
        ["plan", "--model", "llama-3-8b", "--overrides", "seq_length=1e308"],
        ["plan", "--model", "llama-3-8b", "--overrides", f"seq_length={'9' * 5000}"],
        ["plan", "--model", "llama-3-8b", "--gpus", "9" * 20],
        [
            "plan", "--framework", "pytorch", "--overrides",
            "num_layers=100000 hidden_size=64 ffn_hidden_size=64 num_attention_heads=2 vocab_size=9",
        ],
        ["plan", "--overrides=--"],
        ["lint", "--overrides=--"],
    ],
)  # fmt: skip
def test_what_has_no_end_or_no_measure_is_refused_at_once(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nested.json").write_text('{"a":' * 50_000, encoding="utf-8")
    paths = {"PIPE": str(tmp_path / "pipe"), "NESTED": str(tmp_path / "nested.json")}
    start = time.process_time()
    assert main([paths.get(word, word) for word in arguments]) == 2
    assert time.process_time() - start < 2
    err = capsys.readouterr().err
    assert err.startswith("offload: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "value", ["1:" * 100_000 + "1", "9" * 5000, "0x" + "f" * 9000, "1e308", "1" * 200_000]
)
def test_a_number_without_measure_is_read_at_once(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"base_model: a/b\nadapter: lora\nsequence_len: {value}\nlearning_rate: {value}\n", encoding="utf-8"
    )
    start = time.process_time()
    assert main(["lint", str(path)]) in (0, 1)
    assert time.process_time() - start < 2


def test_what_a_terminal_would_obey_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text(
        'base_model: a/b\nadapter: x\n"\\e]0;title\\a\\u202ekey": 1\n', encoding="utf-8"
    )
    for form in ("blocks", "concise"):
        main(["lint", str(tmp_path / "x.yaml"), "--format", form])
    main(["lint", "\x1b[31mno.yaml"])
    out, err = capsys.readouterr()
    assert "\\x1b]0;title\\x07\\u202ekey" in out
    assert printable(out.replace("\n", "")) == out.replace("\n", "")
    assert "\x1b" not in err


@pytest.mark.parametrize("form", ["json", "github", "sarif"])
def test_what_programs_read_is_printable_too(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(
        'base_model: a/b\nadapter: x\n"\\x9b31m\\u202ekey": 1\n', encoding="utf-8"
    )
    main(["lint", str(tmp_path / "x.yaml"), "--format", form])
    out = capsys.readouterr().out
    assert "\\u202ekey" in out
    assert out.replace("\n", "").isprintable()
    if form == "json":
        assert any("\x9b31m\u202ekey" in each["message"] for each in json.loads(out)["findings"])
