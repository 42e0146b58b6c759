# SPDX-License-Identifier: Apache-2.0
"""Rendered blocks: only the text between the markers changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skill_tools.card.blocks import fill, has_blocks

PAGE = "# Title\n\n<!-- card:decisions -->\nold\n<!-- /card -->\n\nby hand\n"


def nothing(words: object) -> str:
    raise AssertionError(f"nothing may run, asked for {words}")


def test_a_card_block_gets_its_table_and_the_rest_stays() -> None:
    assert fill(PAGE, {"decisions": "new\n"}, nothing) == PAGE.replace("old", "new")


def test_a_run_block_shows_the_command_and_its_output() -> None:
    page = "<!-- run: lint 'a b.yaml' -->\n<!-- /run -->\n"
    seen: list[list[str]] = []

    def execute(words: object) -> str:
        seen.append(list(words))  # type: ignore[call-overload]
        return "a.yaml:1:1 error\n"

    filled = fill(page, {}, execute)
    assert seen == [["lint", "a b.yaml"]]
    assert "```console\n$ python3 skill_tools lint 'a b.yaml'\na.yaml:1:1 error\n```\n" in filled


def test_a_run_block_may_show_the_first_lines_only() -> None:
    page = "<!-- run: plan run.yaml | head -n 2 -->\n<!-- /run -->\n"
    filled = fill(page, {}, lambda words: "\n".join([*words, "third"]))
    assert "$ python3 skill_tools plan run.yaml | head -n 2\nplan\nrun.yaml\n```" in filled


def test_two_run_blocks_are_two() -> None:
    page = "<!-- run: lint -->\n<!-- /run -->\n\n<!-- run: plan -->\n<!-- /run -->\n"
    filled = fill(page, {}, lambda words: f"did {' '.join(words)}")
    assert filled.count("```console\n$ python3 skill_tools") == 2
    assert "did lint\n" in filled
    assert "did plan\n" in filled


def test_a_block_that_no_table_fills_is_an_error() -> None:
    with pytest.raises(KeyError, match="decisions"):
        fill(PAGE, {}, nothing)


@given(st.text(alphabet="ab |\n\\1$", max_size=40))
def test_filling_twice_changes_nothing(body: str) -> None:
    once = fill(PAGE, {"decisions": body}, nothing)
    assert fill(once, {"decisions": body}, nothing) == once


@settings(max_examples=30)
@given(st.text(max_size=60))
def test_text_without_markers_is_left_alone(text: str) -> None:
    if not has_blocks(text):
        assert fill(text, {}, nothing) == text
