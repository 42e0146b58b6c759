# SPDX-License-Identifier: Apache-2.0
"""The card's tables: valid Markdown, every fact in its cell, settings in the framework's own spelling."""

from typing import Any

import pytest
from markdown_it import MarkdownIt

from skill_tools.bundle import root
from skill_tools.card.blocks import as_text, bodies, table
from skill_tools.card.load import load_card

CARD = load_card(root() / "card.yaml")


def cells(markdown: str) -> list[list[str]]:
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows:
            rows[-1].append(token.content)
    return rows


def test_a_table_survives_pipes_and_line_breaks() -> None:
    assert cells(table(("a", "b"), [("x | y", "one\ntwo")])) == [["a", "b"], ["x | y", "one two"]]


@pytest.mark.parametrize(
    ("block", "rows"),
    [
        ("decisions", len(CARD["decisions"])),
        ("keys", len(CARD["mechanisms"])),
        ("mechanisms", len(CARD["mechanisms"])),
        ("failures", len(CARD["failure_modes"])),
        ("interactions", len(CARD["interactions"])),
        ("corrections", len(CARD["seed_corrections"])),
    ],
)
def test_a_table_has_a_row_a_fact(block: str, rows: int) -> None:
    found = cells(bodies(CARD)[block])
    assert len(found) == rows + 1
    assert len({len(row) for row in found}) == 1


def test_measured_tables_name_machine_and_source_above_every_number() -> None:
    text = bodies(CARD)["measured"] + bodies(CARD)["verified-plans"]
    for setting in CARD["measured_settings"].values():
        assert setting["hardware"] in text
        assert setting["source"] in text
    assert "| optimizer offload 100 % | 4189 | 4.21 | 32 | 15.2 |" in text


def test_the_comparison_shows_the_chosen_rows_with_their_settings() -> None:
    text = bodies(CARD)["comparison"]
    rows = cells(text)[1:]
    assert len(rows) == len(CARD["comparison"]["rows"])
    assert [row[0] for row in rows if row[2:] == ["3.89", "16.4"]] == [
        "Megatron-Core HybridDeviceOptimizer 100 %, overlap"
    ]
    assert rows[0][1] == "A"
    for letter in {row[1] for row in rows}:
        assert f"- **{letter}** " in text


def test_a_peer_has_one_line_beside_ours() -> None:
    rows = cells(bodies(CARD)["peers"])[1:]
    assert len(rows) == len(CARD["comparison"]["peers"])
    assert ["torch save_on_cpu, pinned", "2.89", "47.8"] in [row[:3] for row in rows]
    assert all(float(row[1]) > 1 and float(row[4]) > 0 for row in rows)


def test_a_mechanism_without_rows_says_so() -> None:
    assert bodies(CARD)["measured-disk-offload"] == "Not measured yet."


@pytest.mark.parametrize(
    ("framework", "settings", "text"),
    [
        ("megatron-bridge", {"a.b": True, "a.c": None, "a.d": ["x", "y"]}, "a.b=true\na.c=null\na.d=[x,y]"),
        ("megatron-lm", {"--x": True, "--n": 3, "--m": ["a", "b"]}, "--x\n--n 3\n--m a b"),
        ("axolotl", {"env.A": "1", "x": "y", "z": True}, "export A=1\nx: y\nz: true"),
    ],
)
def test_settings_as_the_user_writes_them(framework: str, settings: dict[str, Any], text: str) -> None:
    assert as_text(framework, settings) == text
