# SPDX-License-Identifier: Apache-2.0
"""Takes out of the theme's stylesheets whatever no page of the site can show: half of them.

A rule stays where one of its selectors names only elements, classes, ids, colours and directions of text that some page
has, or classes that a script names. Of custom properties those stay that something reads.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|url\([^)"\']*\)|[{};]', re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_BETWEEN_SELECTORS = re.compile(r",(?![^()]*\))")
# What such a part holds only widens or excludes.
_ALTERNATIVES = re.compile(r":(?:not|is|where|has)\((?:[^()]|\([^()]*\))*\)")
_NAMED = re.compile(r"[.#](-?[A-Za-z_][\w-]*)")
_ATTRIBUTE = re.compile(r"\[(data-md-color-[\w-]+|dir)=\"?([\w-]+)\"?\]")
_NO_ELEMENT = re.compile(r"\[[^\]]*\]|::?[\w-]+(?:\([^)]*\))?|[.#]-?[\w-]+")
_PROPERTY = re.compile(
    r'(?<=[{;])(--[\w-]+):((?:"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|\([^()]*\)|[^;{}"\'()])*);?'
)


class Shown(NamedTuple):
    """What the pages have, and the scripts name: elements, classes with ids, attributes of colours and directions."""

    elements: frozenset[str]
    names: frozenset[str]
    attributes: frozenset[tuple[str, str]]


def slim(site: Path) -> None:
    """Rewrite the stylesheets of the theme in a built site."""
    shown = _shown(site)
    others = "".join(
        path.read_text(encoding="utf-8") for path in (*site.rglob("*.html"), *site.rglob("assets/*.css"))
    )
    kept = {
        path: purged(_COMMENT.sub("", path.read_text(encoding="utf-8")), shown)
        for path in sorted((site / "assets" / "stylesheets").glob("*.css"))
    }
    for path, text in kept.items():
        path.write_text(without_unread(text, others + "".join(kept.values())), encoding="utf-8")
    for stale in (site / "assets" / "stylesheets").glob("*.map"):
        stale.unlink()


def purged(css: str, shown: Shown) -> str:
    """Return `css` without rules that nothing `shown` can match."""
    rules = []
    for head, body in _blocks(css):
        if head.startswith(("@media", "@supports")):
            inner = purged(body, shown)
            rules += [f"{head}{{{inner}}}"] if inner else []
        elif head.startswith("@") or not body:
            rules.append(f"{head}{{{body}}}" if body else head)
        elif left := [part for part in _BETWEEN_SELECTORS.split(head) if _may_match(part, shown)]:
            rules.append(f"{','.join(left)}{{{body}}}")
    return "".join(rules)


def without_unread(css: str, readers: str) -> str:
    """Return `css` without custom properties that `readers` never ask for by `var()`."""
    read = set(re.findall(r"var\((--[\w-]+)", readers))
    return _PROPERTY.sub(lambda declared: declared[0] if declared[1] in read else "", css)


def _shown(site: Path) -> Shown:
    elements, names, attributes = {"from", "to"}, set[str](), set[tuple[str, str]]()
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        elements |= set(re.findall(r"<([a-z][a-z0-9]*)", text))
        attributes |= set(re.findall(r'(data-md-color-[\w-]+|dir)="([^"]*)"', text))
        for listed in re.findall(r'\s(?:class|id)="([^"]*)"', text):
            names |= set(listed.split())
    scripts = "".join(path.read_text(encoding="utf-8") for path in site.rglob("assets/**/*.js"))
    elements |= set(re.findall(r'"([a-z][a-z0-9]*)"', scripts))
    return Shown(
        frozenset(elements), frozenset(names | set(re.findall(r"[\w-]+", scripts))), frozenset(attributes)
    )


def _blocks(css: str) -> Iterator[tuple[str, str]]:
    """Yield each rule's head and body; a statement without a body has an empty one."""
    depth = start = body = 0
    head = ""
    for token in _TOKEN.finditer(css):
        if token[0] == "{":
            if not depth:
                head, body = css[start : token.start()].strip(), token.end()
            depth += 1
        elif token[0] == "}":
            depth -= 1
            if not depth:
                yield head, css[body : token.start()]
                start = token.end()
        elif token[0] == ";" and not depth:
            yield css[start : token.end()].strip(), ""
            start = token.end()


def _may_match(selector: str, shown: Shown) -> bool:
    certain = _ALTERNATIVES.sub("", selector).replace("\\", "")
    elements = re.findall(r"[A-Za-z][\w-]*", _NO_ELEMENT.sub(" ", certain))
    return (
        shown.names.issuperset(_NAMED.findall(re.sub(r"\[[^\]]*\]", "", certain)))
        and shown.elements.issuperset(elements)
        and shown.attributes.issuperset(_ATTRIBUTE.findall(certain))
    )
