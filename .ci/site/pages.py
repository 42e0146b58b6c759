# SPDX-License-Identifier: Apache-2.0
"""What the site has beside docs/: home from README, rules, changelog, models, GPUs, API; and links from ids of rules.

MkDocs calls these functions (`hooks` in mkdocs.yml). Guides come before rules in its search. What is built has no
bytes that no reader sees: indentation, and styles of parts that no page has.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import planner
import slim
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import cpu_offloading
from skill_tools.knowledge import load_yaml
from skill_tools.reports.rule_folder import rule_pages

ROOT = Path(__file__).resolve().parent.parent.parent
# [text](path) and ![text](path), not of another site or of a heading of the same page.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")
_RULE = re.compile(r"(?<!\[)`([a-z0-9]+(?:-[a-z0-9]+)+)`(?!\])")
_FENCE = re.compile(r"(?ms)^(`{3,}).*?^\1\s*$")
_OPTION = re.compile(r"<!-- /?(?:run|card):.*?-->|<!-- /(?:run|card) -->\n?")
_FIGURE = re.compile(r'<img alt="([^"]+)" src="(?:\.\./)*figures/([\w-]+\.svg)" />')
_ORDER = {"index.md": 4, "faq.md": 3, "choosing.md": 3, "configuration.md": 0.3, "changelog.md": 0.2}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of docs/ is; docs/README.md, which a repository shows, becomes `overview.md`."""
    overview = files.get_file_from_path("README.md")
    assert overview is not None
    files.remove(overview)
    made = {
        "overview.md": overview.content_string,
        "index.md": _of_root("README.md"),
        "changelog.md": _of_root("CHANGELOG.md"),
        "models.md": _models_page(),
        "planner.md": planner.page(),
        "api.md": _api_page(),
    }
    # Those in docs/rules, which `offload card pages` writes for a checkout, may be older than the rules.
    made |= {f"rules/{name}": text for name, text in rule_pages().items()}
    for old in [file for file in files if file.src_uri in made or file.src_uri.startswith("rules/")]:
        files.remove(old)
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make rule ids links to their pages, and rank the page in the search."""
    path = page.file.src_uri
    page.meta["search"] = {"boost": _boost(path)}
    if path.startswith("rules/") and path not in ("rules/README.md", "rules/coverage.md"):
        page.meta["hide"] = ["navigation"]
        return markdown
    return "".join(_linked(part, path, files) for part in _outside_fences(_OPTION.sub("", markdown)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put a figure that has values into the page itself, where they are under the pointer."""
    return _FIGURE.sub(_inlined, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the indentation out of a page, but not out of its code."""
    parts = re.split(r"(<pre\b.*?</pre>)", output, flags=re.DOTALL)
    return "".join(part if part.startswith("<pre") else re.sub(r"\n\s+", "\n", part) for part in parts)


def on_post_build(config: MkDocsConfig) -> None:
    """Take out of the theme's stylesheets what no page can show."""
    slim.slim(Path(config.site_dir))


def _inlined(image: re.Match[str]) -> str:
    drawn = (ROOT / "docs" / "figures" / image[2]).read_text(encoding="utf-8")
    if not re.search(r"<title>.*\d", drawn):
        return image[0]
    drawn = re.sub(
        r"<style>svg\{.*?</style>|<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL
    )
    drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{image[1]}"', 1)
    return f'<div class="figure" tabindex="0">{drawn}</div>'


def _boost(path: str) -> float:
    return 0.1 if path.startswith("rules/") else _ORDER.get(path, 2)


def _outside_fences(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a page in order, each with whether it is prose, not a fence of code."""
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield markdown[end : fence.start()], True
        yield fence[0], False
        end = fence.end()
    yield markdown[end:], True


def _linked(part: tuple[str, bool], path: str, files: Files) -> str:
    text, is_prose = part
    up = "" if path.startswith("rules/") else "rules/"

    def link(rule: re.Match[str]) -> str:
        is_rule = files.get_file_from_path(f"rules/{rule[1]}.md") is not None
        return f"[`{rule[1]}`]({up}{rule[1]}.md)" if is_rule else rule[0]

    return _RULE.sub(link, text) if is_prose else text


def _of_root(name: str) -> str:
    """Return a page of the repository's root with links that lead from the site's own root."""
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    address = f"{server}/{repository}/blob/HEAD" if server and repository else ""

    def moved(link: re.Match[str]) -> str:
        picture, text, path, heading = link[1], link[2], link[3], link[4] or ""
        if path == "docs/README.md":
            path = "docs/overview.md"
        if path.startswith("docs/"):
            return f"{picture}[{text}]({path.removeprefix('docs/')}{heading})"
        return f"[{text}]({address}/{path}{heading})" if address else text

    return _LINK.sub(moved, (ROOT / name).read_text(encoding="utf-8"))


def _models_page() -> str:
    models: Mapping[str, Any] = load_yaml("models.yaml")["models"]
    machines: Mapping[str, Any] = load_yaml("hardware.yaml")["gpus"]
    lines = [
        "# Models and GPUs",
        "",
        "`offload plan --model NAME --gpu NAME` knows these by name. Another model is planned from its `config.json`,"
        " and another GPU from the four numbers of its row.",
        "",
        "## Models",
        "",
        "| Model | Parameters, 10⁹ | Layers | Hidden | Vocabulary | Experts | Source |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for name, shape in models.items():
        sizes = (shape.get(key, "") for key in ("num_layers", "hidden", "vocab", "experts"))
        cells = (f"`{name}`", f"{shape['parameters'] / 1e9:.1f}", *map(str, sizes), str(shape["source"]))
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    lines += [
        "",
        "## GPUs",
        "",
        "Memory is what torch reports. Rates are of data sheets unless the source says measured.",
        "",
        "| GPU | Memory, GiB | bf16, TFLOP/s | Memory, GB/s | Link, GB/s | Source |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, gpu in machines.items():
        numbers = (gpu.get(key, "") for key in ("memory_gib", "bf16_tflops", "hbm_gbs", "link_gbs"))
        cells = (f"`{name}`", *map(str, numbers), str(gpu["source"]))
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _api_page() -> str:
    """Return a page that mkdocstrings fills from the docstrings of all public names."""
    names = [name for name in cpu_offloading.__all__ if not name.startswith("_")]
    heading = (
        "# API\n\nAll that `cpu_offloading` exports. The lines for trainers are in [Trainers](trainers.md).\n"
    )
    return heading + "".join(
        f"\n::: cpu_offloading.{name}\n    options: {{heading_level: 2}}\n" for name in names
    )
