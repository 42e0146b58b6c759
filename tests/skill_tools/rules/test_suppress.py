# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.configs.config import Config
from skill_tools.rules import suppress
from skill_tools.rules.finding import LintResult
from skill_tools.rules.knowledge import Rule
from skill_tools.rules.lint import lint

BAD = ("suppression-without-reason", "suppression-unknown-rule", "suppression-unused")


@pytest.fixture
def ids(make_config: Callable[..., Config], make_rule: Callable[..., Rule]) -> Callable[[str], list[str]]:
    """The rules found in a text whose line 2 sets `a`, forbidden by rule xx-made."""
    rules = [make_rule("a"), *[make_rule("", id=name, check="input", severity="warning") for name in BAD]]

    def found(text: str) -> list[str]:
        config = make_config({"a": True}, sources={"run.yaml": text})
        return [
            finding.rule
            for finding in suppress.apply(lint(config, rules=rules), config, lambda: rules).findings
        ]

    return found


def test_on_the_line_and_on_the_line_above(ids: Callable[[str], list[str]]) -> None:
    assert ids("model:\n  a: true  # offload: ignore[xx-made] our fork can\n") == []
    assert ids("# offload: ignore[xx-made] our fork can\n  a: true\n") == []


def test_several_rules_in_one_comment(ids: Callable[[str], list[str]]) -> None:
    assert ids("model:\n  a: true  # offload: ignore[other-rule, xx-made] both known\n") == [
        "suppression-unknown-rule"
    ]


def test_another_line_is_not_covered(ids: Callable[[str], list[str]]) -> None:
    assert ids("model:\n  a: true\n# offload: ignore[xx-made] too late\n") == [
        "xx-made",
        "suppression-unused",
    ]
    assert ids("model: {} # offload: ignore[xx-made] beside something else\n  a: true\n") == [
        "xx-made",
        "suppression-unused",
    ]


@pytest.mark.parametrize(
    "comment", ["ignore[xx-made]", "ignore[xx-made]  ", "ignore[] why", "ignore why", "ignore"]
)
def test_without_rules_or_reason_nothing_is_suppressed(comment: str, ids: Callable[[str], list[str]]) -> None:
    assert ids(f"model:\n  a: true  # offload: {comment}\n") == ["xx-made", "suppression-without-reason"]


def test_an_unknown_rule_is_named(ids: Callable[[str], list[str]]) -> None:
    assert ids("# offload: ignore[xx-maid] our fork can\n  a: true\n") == [
        "xx-made",
        "suppression-unknown-rule",
    ]


def test_open_rules_stay_open(make_config: Callable[..., Config]) -> None:
    config = make_config({}, sources={"run.yaml": ""})
    assert suppress.apply(LintResult((), ()), config, list) == LintResult((), ())


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    for suppression in suppress.read("x", f"offload: {text}"):
        assert suppression.place.line >= 1
