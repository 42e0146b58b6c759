"""Checks that what a Markdown page names exists: links, anchors, paths in the repository, and commands.

It parses with markdown-it, so that an example inside a fence is not taken for a link. Pages on the network
are not looked up, and the output that a page shows is the tests' business.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from skill_tools.card.shell import command_problems

if TYPE_CHECKING:
    from markdown_it.token import Token

_SHELLS = {"bash", "sh", "shell", "console"}


def page_problems(page: Path, root: Path, commands: Mapping[str, str]) -> list[str]:
    """Return one line for each thing that `page` names and that does not exist.

    `commands` maps each command of the tool to its help text, which lists its options.
    """
    name = page.relative_to(root).as_posix()
    tokens = _tokens(page)
    problems = [*_links(page, tokens), *_paths(tokens, root)]
    for token in tokens:
        if token.type == "fence" and token.info.split(" ")[0] in _SHELLS:
            problems += command_problems(_typed(token), root, commands)
    for code in _inline_code(tokens):
        if code.startswith(("offload ", "python3 skill_tools ")):
            problems += command_problems(code, root, commands)
    return [f"{name}: {problem}" for problem in problems]


def _typed(fence: "Token") -> str:
    """Return what a reader would type: all of a script, the `$` lines of a console session."""
    if fence.info != "console":
        return fence.content
    return "\n".join(line[2:] for line in fence.content.splitlines() if line.startswith("$ "))


def _tokens(page: Path) -> "list[Token]":
    from markdown_it import MarkdownIt

    text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return MarkdownIt("commonmark").enable("table").parse(text)


def _children(tokens: "list[Token]") -> "Iterator[Token]":
    for token in tokens:
        yield from token.children or ()


def _inline_code(tokens: "list[Token]") -> Iterator[str]:
    return (token.content for token in _children(tokens) if token.type == "code_inline")


def _links(page: Path, tokens: "list[Token]") -> Iterator[str]:
    for token in _children(tokens):
        target = str(token.attrGet("href" if token.type == "link_open" else "src") or "")
        if not target or re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists():
            yield f"link to {target}: no such file"
        elif anchor and anchor not in _anchors(_tokens(file)):
            yield f"link to {target}: no such heading"


def _anchors(tokens: "list[Token]") -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _paths(tokens: "list[Token]", root: Path) -> Iterator[str]:
    """Yield inline code that is a path below one of the repository's folders and does not exist."""
    for code in _inline_code(tokens):
        if "/" not in code or re.search(r"[\s<>{}$=]", code) or not (root / code.split("/")[0]).is_dir():
            continue
        exists = any(root.glob(code)) if "*" in code else (root / code).exists()
        if not exists:
            yield f"names {code}: no such file"
