# SPDX-License-Identifier: Apache-2.0
"""A refusal of a framework's own checks is reported, on its line and with a fix that is clean."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from for_each import for_each

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import Reading, readings
from skill_tools.rules.finding import Finding, LintResult, Severity
from skill_tools.rules.lint import lint
from skill_tools.rules.repair import repair

LEAST_OF_A_HUNDRED = 95
DATA = knowledge.load_yaml_file(Path(__file__).with_name("faults.yaml"))
FAULTS: list[dict[str, Any]] = DATA["faults"]


def named(fault: dict[str, Any]) -> str:
    changed = fault["swap"][1] if "swap" in fault else fault["add"]
    return f"{fault['base']}: {changed}"


def read(text: str, base: str) -> Reading:
    (found,) = readings([Source(DATA["bases"][base]["file"], text)])
    return found


def linted(reading: Reading) -> list[Finding]:
    return [finding for finding in lint(reading.compose()).findings if finding.severity is not Severity.INFO]


def injected(fault: dict[str, Any]) -> str:
    text: str = DATA["bases"][fault["base"]]["text"]
    for old, new in [fault[name] for name in ("swap", "also") if name in fault]:
        assert old in text
        text = text.replace(old, new, 1)
    return f"{text}{fault['add']}\n" if "add" in fault else text


def test_nearly_every_fault_is_reported() -> None:
    reported = sum("missed" not in fault for fault in FAULTS)
    assert len(FAULTS) >= 60
    assert 100 * reported >= LEAST_OF_A_HUNDRED * len(FAULTS)


@for_each(DATA["bases"])
def test_without_the_fault_nothing_is_said(base: str) -> None:
    reading = read(DATA["bases"][base]["text"], base)
    assert reading.dialect.name == base or base.startswith(f"{reading.dialect.name}-") or "megatron" in base
    assert [finding.message for finding in linted(reading)] == []


@for_each(FAULTS, named)
def test_a_fault_is_reported_on_its_line(fault: dict[str, Any]) -> None:
    text = injected(fault)
    reading = read(text, fault["base"])
    found = linted(reading)
    lines = text.splitlines()
    told = [finding for finding in found if re.search(str(fault["at"]), lines[finding.place.line - 1])]
    assert bool(told) is ("missed" not in fault), [(finding.rule, finding.place.line) for finding in found]
    assert all(finding.next for finding in told)


@for_each(FAULTS, named)
def test_the_way_out_of_a_fault_is_clean(fault: dict[str, Any]) -> None:
    reading = read(injected(fault), fault["base"])

    def again(sources: Sequence[Source]) -> tuple[Config, LintResult]:
        config = reading.compose(tuple(sources))
        return config, lint(config)

    before = {finding.rule for finding in linted(reading)}
    after = repair(reading.sources, again, unsafe=True).result.findings
    assert {finding.rule for finding in after if finding.severity is not Severity.INFO} <= before
