# SPDX-License-Identifier: Apache-2.0
"""Checks that all names of a Markdown page exist: links, anchors, paths in the repository, commands and their options.

It parses with markdown-it, so that an example inside a fence is not taken for a link. Shell lines are split into
words and not run. A word that starts with one of the repository's folders must exist; any other file name is the
reader's own. Links to the network are not followed. A test checks the output that a page shows.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it.token import Token

_SHELLS = {"bash", "sh", "shell", "console"}
_TOOLS = ("offload", ".venv/bin/offload")
_MADE = "build"  # the folder of made and fetched files, which is not kept in git


def page_problems(page: Path, root: Path, commands: Mapping[str, str]) -> list[str]:
    """Return one line for each missing file, command or name in `page`.

    `commands` maps each command of the tool to its help text, which lists its options.
    """
    name = page.relative_to(root).as_posix()
    tokens = _tokens(page)
    problems = [*_links(page, tokens), *_paths(tokens, root)]
    for token in tokens:
        if token.type == "fence" and token.info.split(" ")[0] in _SHELLS:
            problems += _command_problems(_typed(token), root, commands)
    for code in _inline_code(tokens):
        if code.startswith(("offload ", "python3 skill_tools ")):
            problems += _command_problems(code, root, commands)
    return [f"{name}: {problem}" for problem in problems]


def _typed(fence: "Token") -> str:
    """Return the lines that a reader would type: all of a script, the `$` lines of a console session."""
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
    """Yield inline code that is a path below one of the repository's folders and does not exist.

    `NAME` in a path, as `<...>`, stands for a name that the reader chooses.
    """
    for code in _inline_code(tokens):
        if not re.search(r"[\s<>{}$=]|\bNAME\b", code) and _is_missing(code, root):
            yield f"names {code}: no such file"


def _is_missing(path: str, root: Path) -> bool:
    """Return whether a path below one of the repository's folders does not exist; made files are in none of them."""
    first, slash, _ = path.partition("/")
    if not slash or first in ("", _MADE) or not (root / first).is_dir():
        return False
    return not (any(root.glob(path)) if "*" in path else (root / path).exists())


def _command_problems(script: str, root: Path, commands: Mapping[str, str]) -> list[str]:
    """Return one line for each unknown command, unknown option or missing file in `script`."""
    problems: list[str] = []
    for words in _simple_commands(script):
        problems += _missing_files(words, root)
        arguments = _arguments(words)
        if arguments is not None:
            problems += _tool_problems(arguments, commands)
        elif words[0] == "make" and len(words) > 1:
            problems += _make_problems(words[1:], root)
    return problems


def _simple_commands(script: str) -> Iterator[list[str]]:
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set(";&|"):
                yield from [words] if words else []
                words = []
            else:
                words.append(word)
        yield from [words] if words else []


def _arguments(words: Sequence[str]) -> list[str] | None:
    """Return the words behind the tool's name, or None for another program."""
    if words[0] in _TOOLS:
        return list(words[1:])
    if words[0].startswith("python") and len(words) > 1 and words[1].rstrip("/").endswith("skill_tools"):
        return list(words[2:])
    return None


def _tool_problems(arguments: Sequence[str], commands: Mapping[str, str]) -> Iterator[str]:
    if not arguments or arguments[0].startswith("-"):
        return
    name = arguments[0]
    if name not in commands:
        yield f"names the command {name}: no such command"
        return
    options = set(re.findall(r"--[a-z][a-z0-9-]*", commands[name]))
    for word in arguments[1:]:
        option = re.match(r"--[a-z][a-z0-9-]*", word)
        if option and option[0] not in options:
            yield f"names {name} {option[0]}: no such option"


def _make_problems(targets: Sequence[str], root: Path) -> Iterator[str]:
    rules = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in targets:
        if target not in rules:
            yield f"names make {target}: no such target"


def _missing_files(words: Sequence[str], root: Path) -> Iterator[str]:
    for word in words:
        if not word.startswith(".") and _is_missing(word, root):
            yield f"names {word}: no such file"
