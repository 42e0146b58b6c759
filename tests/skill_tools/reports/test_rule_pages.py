# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from for_each import for_each
from markdown_it import MarkdownIt

from skill_tools.__main__ import main
from skill_tools.card.documents import page_problems
from skill_tools.reports.rule_folder import index_page, rule_pages, write_rule_pages
from skill_tools.reports.rule_pages import page
from skill_tools.rules.index import is_stale
from skill_tools.rules.knowledge import Rule, load_rules

RULES = load_rules()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Every page: a second of work."""
    return rule_pages()


def test_the_index_is_not_stale() -> None:
    assert not is_stale(), "run: offload card render"


def test_the_pages_are_one_a_rule_an_index_and_the_coverage(pages: dict[str, str]) -> None:
    assert set(pages) == {f"{rule.id}.md" for rule in RULES} | {"README.md", "coverage.md"}


def test_links_between_the_pages_resolve(pages: dict[str, str], tmp_path: Path) -> None:
    assert write_rule_pages(tmp_path) == len(pages)
    problems = [problem for path in tmp_path.iterdir() for problem in page_problems(path, tmp_path, {})]
    assert not [problem for problem in problems if "link to" in problem]


def test_explain_prints_the_same_page(pages: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "la-pp"]) == 0
    assert capsys.readouterr().out == pages["la-pp.md"]


@for_each(RULES, lambda rule: rule.id)
def test_a_page_has_every_part(rule: Rule) -> None:
    text = page(rule)
    headings = [
        token.content for token in MarkdownIt().parse(text) if token.type == "inline" and token.level == 1
    ]
    for heading in ("What", "Why", "Versions", "Fix", "Evidence"):
        assert heading in headings
    assert all(quote.strip() in text for quote in rule.raises)
    assert rule.evidence.quote.strip("\n") in text
    if rule.examples:
        assert any(heading.startswith("Wrong") for heading in headings)
        assert any(heading.startswith("Right") for heading in headings)


def test_the_index_page_links_every_rule() -> None:
    text = index_page(RULES)
    assert all(f"({rule.id}.md)" in text for rule in RULES)
