# SPDX-License-Identifier: Apache-2.0
"""Settings of a project, options and baselines: their effects, their precedence, and the error of a damaged one."""

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from for_each import for_each

from skill_tools.__main__ import main

BAD = "model:\n  cpu_offloading: true\n  cpu_offloading_num_layers: 40\n  num_layers: 4\n  fp8: x\n"
RULE = "la-num-layers-range"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.yaml").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    """Return the exit code of a lint, and the rules that it found."""
    code = main(["lint", "configs/run.yaml", "--framework", "megatron-bridge", "--format", "json", *options])
    return code, [each["rule"] for each in json.loads(capsys.readouterr().out).get("findings", [])]


def test_a_setting_leaves_rules_out(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rules = found(capsys)
    assert (code, RULE in rules) == (1, True)
    (project / "offload.toml").write_text(f'ignore = ["{RULE}"]\n')
    assert RULE not in found(capsys)[1]
    (project / "offload.toml").write_text('select = ["la"]\n')
    assert set(found(capsys)[1]) == {RULE}
    (project / "offload.toml").write_text('[per-file-ignores]\n"configs/*" = ["la"]\n')
    assert RULE not in found(capsys)[1]


def test_the_nearest_file_counts_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "offload.toml").write_text('ignore = ["la"]\n')
    (project / "configs" / "pyproject.toml").write_text('[tool.other]\nx = "offload"\n')
    assert RULE not in found(capsys)[1], "a pyproject.toml without the table says nothing"
    (project / "configs" / "pyproject.toml").write_text('[tool.offload]\nfail-on = "info"\n')
    assert RULE in found(capsys)[1]
    (project / "configs" / "offload.toml").write_text('ignore = ["la"]\n')
    assert RULE not in found(capsys)[1], "offload.toml comes before pyproject.toml"


def test_options_win_over_the_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "offload.toml").write_text(
        'ignore = ["la"]\nfail-on = "error"\ntarget = ["megatron-core==0.12.0"]\n'
    )
    assert RULE in found(capsys, "--select", "la")[1]
    assert found(capsys, "--select", RULE, "--fail-on", "error")[0] == 1
    assert main(["lint", "configs/run.yaml", "--ignore", "la,unknown-ruel"]) == 2
    assert "--ignore: there is no rule 'unknown-ruel'" in capsys.readouterr().err
    main(["lint", "configs/run.yaml", "--framework", "megatron-bridge", "--format", "json"])
    (read,) = json.loads(capsys.readouterr().out)["read"]
    assert read["releases"]["megatron-core"] == {"version": "0.12.0", "where": "offload.toml"}
    main([
        "lint", "configs/run.yaml", "--framework", "megatron-bridge", "--format", "json",
        "--target", "megatron-core==0.16.1",
    ])  # fmt: skip
    (read,) = json.loads(capsys.readouterr().out)["read"]
    assert read["releases"]["megatron-core"]["version"] == "0.16.1"


def test_what_fails_is_set(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "configs" / "run.yaml").write_text("model:\n  cpu_offloading_num_layers: 2\n  num_layers: 4\n")
    assert found(capsys)[0] == 1
    (project / "offload.toml").write_text('fail-on = "error"\n')
    assert found(capsys)[0] == 0
    assert found(capsys, "--fail-on", "warning")[0] == 1


def test_the_framework_is_set(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "offload.toml").write_text('framework = "megatron-bridge"\n')
    assert main(["lint", "configs/run.yaml", "-q"]) == 1
    assert RULE in capsys.readouterr().out


# Unusable settings, and their one line.
DAMAGED = [
    ("select = [", "is not TOML"),
    ('selct = ["la"]', "try select"),
    ('select = "la"', "select has the wrong type"),
    ("ignore = [1]", "ignore has the wrong type"),
    ('ignore = ["la-ppp"]', "try la-pp"),
    ('"per-file-ignores" = ["la"]', "per-file-ignores has the wrong type"),
    ('[per-file-ignores]\n"*" = ["lx"]', "there is no rule 'lx'"),
    ('[per-file-ignores]\n"*" = "la"', "wrong type"),
    ('target = ["megatron-core"]', "is not a release"),
    ('target = ["megatron-cor==1.0"]', "no rule knows this distribution"),
    ('framework = "axolotle"', "try axolotl"),
    ("framework = 3", "framework is 3"),
    ('fail-on = "never"', "fail-on is 'never'"),
    ("\0", "NUL"),
]


@pytest.mark.parametrize("name", ["offload.toml", "pyproject.toml"])
def test_a_damaged_file_is_an_error_by_its_name(
    name: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "" if name == "offload.toml" else "[tool.offload]\n"

    @for_each(DAMAGED, lambda case: case[0])
    def each(case: tuple[str, str]) -> None:
        text, said = case
        inside = text.replace("[per-file-ignores]", "[tool.offload.per-file-ignores]") if head else text
        (project / name).write_text(head + inside)
        assert main(["lint", "configs/run.yaml"]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert name in error
        assert said in error

    each()


def test_a_baseline_leaves_what_is_new(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys)[0] == 1
    main(["lint", "configs/run.yaml", "--framework", "megatron-bridge", "--write-baseline", "base.json"])
    assert "accepted in base.json" in capsys.readouterr().err
    assert found(capsys, "--baseline", "base.json") == (0, [])
    (project / "configs" / "run.yaml").write_text("# a line more\n" + BAD)
    assert found(capsys, "--baseline", "base.json") == (0, []), "a line is no part of a finding"
    (project / "configs" / "run.yaml").write_text(BAD.replace("40", "41"))
    assert found(capsys, "--baseline", "base.json") == (1, [RULE])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no file names that are no UTF-8")
def test_a_baseline_takes_files_of_any_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = os.fsdecode(b"\xff \xc3\xa4.yaml")
    (project / odd).write_text(BAD)
    call = ["lint", "--framework", "megatron-bridge", odd]
    assert main([*call, "--write-baseline", "base.json"]) == 0
    assert main([*call, "--baseline", "base.json"]) == 0
    assert "more in the baseline" in capsys.readouterr().out


def test_a_baseline_holds_from_another_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["lint", "--framework", "megatron-bridge", "configs/run.yaml", "--write-baseline", "base.json"]
    assert main(call) == 0
    monkeypatch.chdir(project / "configs")
    assert main(["lint", "--framework", "megatron-bridge", "run.yaml", "--baseline", "../base.json"]) == 0
    assert "more in the baseline" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 2, "findings": []}', '{"version": 1, "findings": [{}]}', "\xff", "null",
             '{"version": 1, "findings": [{"fingerprint": 1, "count": 1}]}', "[" * 10**5]
)  # fmt: skip
def test_a_damaged_baseline_is_an_error_by_its_name(
    text: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "base.json").write_text(text, encoding="latin-1")
    assert main(["lint", "configs/run.yaml", "--baseline", "base.json"]) == 2
    error = capsys.readouterr().err
    assert "base.json" in error
    assert len(error.splitlines()) == 1
    assert main(["lint", "configs/run.yaml", "--baseline", "nowhere.json"]) == 2


def test_quiet_prints_findings_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["lint", "configs/run.yaml", "--framework", "megatron-bridge", "--select", RULE, "--quiet"]
    assert main([*base, "--format", "concise"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert RULE in line
    assert main(base) == 1
    assert "is read as" not in capsys.readouterr().out
    assert main([*base, "--ignore", RULE]) == 0
    assert capsys.readouterr().out == ""


def test_statistics_count_rules(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "configs" / "second.yaml").write_text(BAD)
    assert main(["lint", "configs", "--framework", "megatron-bridge", "--select", "la", "--statistics"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["2", "error", RULE]


def test_the_report_goes_into_a_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["lint", "configs/run.yaml", "--framework", "megatron-bridge", "--format", "junit"]
    assert main([*base, "--output-file", "out.xml"]) == 1
    assert capsys.readouterr().out == ""
    suites = ElementTree.parse(project / "out.xml").getroot()
    assert RULE in [case.get("name") for case in suites.iter("testcase")]
    assert main([*base, "--output-file", "nowhere/out.xml"]) == 2
    assert "nowhere/out.xml" in capsys.readouterr().err
