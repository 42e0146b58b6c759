# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: it holds every page, and no link in it is broken."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skill_tools.bundle import root

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
    made = {
        "index.md",
        "overview.md",
        "models.md",
        "planner.md",
        "api.md",
        "changelog.md",
        "rules/README.md",
        "rules/coverage.md",
    }
    assert set(pages) == {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"} | made


def test_styles_that_no_page_can_show_are_taken_out(tmp_path: Path) -> None:
    """Of a theme that styles more than these pages have; names that a script may add stay."""
    css = (
        '@charset "utf-8";:root{--read:1px;--never:url("data:image/svg+xml;utf8,<svg>{}</svg>")}'
        ".used,.unused{width:var(--read)}.unused{color:red}.used:not(.unused)>p{color:blue}.added{top:0}"
        "table.used{left:0}.p--never:not(.unused){top:3px}[dir=rtl] .used{float:right}[dir=ltr] .used{float:left}"
        "@media print{.unused{top:0}}@media print{p{top:1px}}@keyframes turn{0%{top:0}}"
    )
    sheet, script = tmp_path / "assets" / "stylesheets" / "theme.css", tmp_path / "assets" / "one.js"
    sheet.parent.mkdir(parents=True)
    sheet.write_text(css)
    script.write_text('e.className="added"')
    (tmp_path / "index.html").write_text('<body dir="ltr"><p class="used p--never"></p></body>')
    subprocess.run(
        [sys.executable, "-c", "import pathlib, sys, slim; slim.slim(pathlib.Path(sys.argv[1]))", tmp_path],
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT / ".ci" / "site")},
    )  # fmt: skip
    assert sheet.read_text() == (
        '@charset "utf-8";:root{--read:1px;}.used{width:var(--read)}.used:not(.unused)>p{color:blue}.added{top:0}'
        ".p--never:not(.unused){top:3px}[dir=ltr] .used{float:left}@media print{p{top:1px}}@keyframes turn{0%{top:0}}"
    )


@pytest.mark.slow
def test_it_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra `docs` is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    for page in ("rules", "rules/la-pp"):
        assert (site / page / "index.html").is_file()
    assert not list(site.rglob("*.py")) + list(site.rglob("look.js")), "tools of ours are published"
    home = (site / "index.html").read_text(encoding="utf-8")
    assert "Out of GPU memory?" in home
    # Nothing asks another host: loaded files, not linked ones.
    loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"', home)
    loaded += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="([^"]+)"', home)
    loaded += re.findall(r'<link[^>]*href="([^"]+)"[^>]*rel="stylesheet"', home)
    assert loaded
    assert not [address for address in loaded if address.startswith(("http:", "https:", "//"))]
    assert 'rel="preconnect"' not in home
    assert "<title>as it is: weights 14." in home, "the figure has no values to point at"
    assert 'aria-label="Memory of one GPU' in home
    for page in ("layer-streaming", "distributed"):
        assert " ms</title>" in (site / page / "index.html").read_text(encoding="utf-8"), page
    planner = (site / "planner" / "index.html").read_text(encoding="utf-8")
    plans = json.loads(re.findall(r'id="plan-data">(.*?)</script>', planner)[0])
    assert len(plans) > 200
    assert plans["llama-3-8b rtx4090 2048"][0][0].startswith("trained layers streamed")
    assert len(gzip.compress(planner.encode())) < 40_000
    parts = {path: path.stat().st_size for path in [site / "index.html", *(site / name for name in loaded)]}
    assert sum(parts.values()) <= 300_000, f"the home page takes {parts}"
    assert 'href="../rules/la-pp/"' in (site / "choosing" / "index.html").read_text(encoding="utf-8")
    assert "HybridDeviceOptimizer" in (site / "api" / "index.html").read_text(encoding="utf-8")
    assert len(gzip.compress((site / "search" / "search_index.json").read_bytes())) <= 1_000_000
