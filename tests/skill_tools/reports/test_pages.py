from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from skill_tools.bundle import root
from skill_tools.reports.pages import index_page, page, rendered_pages
from skill_tools.rules.index import is_stale
from skill_tools.rules.knowledge import Rule, load_rules

RULES = load_rules()


def test_the_index_is_not_stale() -> None:
    assert not is_stale(), "run: offload card render"


def test_every_page_is_in_the_folder_and_not_stale() -> None:
    folder = root() / "docs" / "rules"
    pages = rendered_pages(folder)
    stale = [
        path.name for path, text in pages.items() if not path.is_file() or path.read_text("utf-8") != text
    ]
    assert not stale, "run: offload card render"
    kept_by_hand = {"coverage.md"}
    assert {path.name for path in folder.glob("*.md")} - kept_by_hand == {path.name for path in pages}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
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


def test_pages_lie_in_the_folder_they_are_rendered_for() -> None:
    assert all(path.parent == Path("x") for path in rendered_pages(Path("x")))
