"""Every document that is rendered from data, with the text it must have.

`offload card render` writes them, `offload card check` compares them. The list stands here once, so that
neither can forget a page.
"""

from collections.abc import Container
from pathlib import Path

from skill_tools.card.blocks import Execute, fill, has_blocks
from skill_tools.card.configuration import configuration_page
from skill_tools.card.load import Card
from skill_tools.card.tables import bodies
from skill_tools.knowledge import load_yaml
from skill_tools.reports import coverage
from skill_tools.reports.pages import rendered_pages
from skill_tools.rules.knowledge import load_rules_yaml


def pages_with_blocks(root: Path) -> list[Path]:
    """Return the hand-written pages: those beside SKILL.md and those in docs/, without the rendered ones."""
    rendered = {root / "docs" / "configuration.md"}
    return [page for page in sorted([*root.glob("*.md"), *root.glob("docs/*.md")]) if page not in rendered]


def rendered_files(root: Path, card: Card, execute: Execute) -> dict[Path, str]:
    """Return each rendered file's path and text; raises `KeyError` naming a block that no table has.

    `execute` runs one command of the tool and returns its output, for the blocks that show one.
    """
    keys = load_yaml("keys.yaml")
    files = {
        root / "docs" / "configuration.md": configuration_page(keys),
        root / "docs" / "rules" / "coverage.md": coverage.render(load_rules_yaml(), coverage.load_coverage()),
        **rendered_pages(root / "docs" / "rules"),
    }
    tables = bodies(card)
    for page in pages_with_blocks(root):
        text = page.read_text(encoding="utf-8")
        if has_blocks(text):
            files[page] = fill(text, tables, execute)
    return files


def orphans(root: Path, files: Container[Path]) -> list[Path]:
    """Return the pages of docs/rules that no rule renders any more."""
    return [page for page in sorted((root / "docs" / "rules").glob("*.md")) if page not in files]
