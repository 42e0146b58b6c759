"""The documentation as a site: it holds every page, and no link in it is broken."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skill_tools.bundle import root
from skill_tools.reports.rule_pages import write_rule_pages

ROOT = root()
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def named(entries: list[object]) -> list[str]:
    """The pages that a part of the navigation names, in order."""
    found = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += named(value) if isinstance(value, list) else [str(value)]
    return found


def test_every_page_is_in_the_navigation() -> None:
    pages = named(SITE["nav"])
    assert len(pages) == len(set(pages))
    assert set(pages) == {path.name for path in ROOT.glob("docs/*.md")} | {
        "rules/README.md",
        "rules/coverage.md",
    }


@pytest.mark.slow
def test_it_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed: make docs")
    write_rule_pages(ROOT / "docs" / "rules")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "rules" / "la-pp" / "index.html").is_file()
