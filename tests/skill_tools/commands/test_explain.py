# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from skill_tools.__main__ import COMMANDS, main
from skill_tools.rules.knowledge import load_rules


def test_a_rule_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "la-pp"]) == 0
    out = capsys.readouterr().out
    for part in (
        "## What",
        "## Why",
        "## Wrong (megatron-bridge)",
        "## Right (megatron-lm)",
        "## Versions",
        "## Fix",
    ):
        assert part in out
    assert "Currently there is no support for Pipeline parallelism with CPU offloading" in out


def test_every_rule_can_be_explained_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--list", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [rule["id"] for rule in listed] == [rule.id for rule in load_rules()]
    assert main(["explain", "la-pp", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) in listed


def test_several_rules_are_explained_in_a_few_lines_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "la-pp", "oc-lora", "la-pp", "--brief"]) == 0
    out = capsys.readouterr().out
    assert [line.partition(":")[0] for line in out.splitlines() if line[:1].strip()] == ["la-pp", "oc-lora"]
    assert "the framework says: Currently there is no support for Pipeline parallelism" in out
    assert out.count("  change: ") == 2
    assert len(out.splitlines()) <= 12
    assert main(["explain", "la-pp", "oc-lora", "--format", "json"]) == 0
    assert [rule["id"] for rule in json.loads(capsys.readouterr().out)] == ["la-pp", "oc-lora"]
    assert main(["explain", "la-pp", "la-ppp"]) == 2


def test_the_list_is_one_line_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(load_rules())
    assert any(line.startswith("la-pp ") and "error" in line for line in lines)


def test_an_unknown_rule_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "la-ppp"]) == 2
    err = capsys.readouterr().err
    assert "la-ppp" in err
    assert "try la-pp" in err


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("optimizer_offload_fraction", 1),
        ("optimizer-offload-fraction", 1),
        ("zero_optimization.offload_optimizer.device", 1),
        ("offload_optimizer.device", 2),
        ("pin_memory", 6),
    ],
)
def test_a_key_is_explained_in_a_few_lines(name: str, keys: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    out = capsys.readouterr().out
    assert len(out.split("\n\n")) == keys
    assert len(out.splitlines()) <= 12 * keys
    assert "default" in out
    assert "rules: " in out
    assert main(["explain", name, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    first = data if keys == 1 else data[0]
    assert first["spelling"]
    assert first["rules"]


def test_a_key_says_when_its_default_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "offload_optimizer.pin_memory"]) == 0
    assert "default false (deepspeed <0.19.5), true (deepspeed >=0.19.5)" in capsys.readouterr().out


def test_a_misspelt_command_key_or_rule_is_answered_with_the_likeliest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for call, meant in (
        (["lnt"], "did you mean lint"),
        (["explain", "optimizer_offload_fracton"], "try optimizer_offload_fraction"),
        (["explain", "oc-lorra"], "try oc-lora"),
    ):
        assert main(call) == 2
        assert meant in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nope"], ["explain"], ["explain", "la-pp", "--list"]])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_help_is_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(arguments)
    assert exit_code.value.code == 0
    assert capsys.readouterr().out.startswith("usage: offload")
