# SPDX-License-Identifier: Apache-2.0
"""Finds the citations of rules and messages again in a release: the file, the symbol in it, and the words.

A citation is `path::Class.method` with a quote. Words are compared without line breaks and without the joints of
adjacent strings in Python; a part in braces may be anything.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from skill_tools import knowledge
from skill_tools.configs.keys import load_keys
from skill_tools.diagnosis.texts import HOLE
from skill_tools.rules.knowledge import load_rules
from skill_tools.rules.values import RELEASE
from skill_tools.rules.versions import admits
from skill_tools.upkeep.release_files import in_package

_JOINT = re.compile(r"""(?<!\\)["']\s*\\?\n\s*[rRfFbBuU]{0,2}["']""")
_CITED = ("msg", "src")
_CLASS = re.compile(r"^\w+Error: ")  # in front of a traceback's message
_SCRIPT = "__main__"  # the symbol of the part that runs in a program's file


class Citation(NamedTuple):
    """A citation of a rule or a message: its id, the file's path, the symbol in it, and the words."""

    id: str
    path: str
    symbol: str
    words: str


class Lost(NamedTuple):
    """A citation missing in a release: the missing part, and the present place of its words, if any."""

    id: str
    ref: str
    what: str
    now: str


def cited(package: str, release: str) -> Iterator[Citation]:
    """Yield the citations of `package` for `release`, of rules and messages for that release."""
    for rule in load_rules():
        is_of = _is_of(rule.versions, package, release) and _may_hold(rule.tree, package, release)
        if rule.evidence.tag in _CITED and is_of:
            of_release = (
                each for each in rule.evidence_in if admits(each.versions.get(package, "<0"), release)
            )
            where = next(of_release, rule.evidence)
            path, _, symbol = where.ref.partition("::")
            yield Citation(rule.id, path, symbol, where.quote)
    for entry in knowledge.load_messages():
        source = str(entry.get("source", ""))
        if not source.startswith("http") and _is_of(entry.get("versions", {}), package, release):
            texts = entry["text"] if isinstance(entry["text"], list) else [entry["text"]]
            own = entry.get("of_text") or [{}] * len(texts)
            for words, where in zip(texts, own, strict=True):
                path, _, symbol = str(where.get("source", source)).partition("::")
                if admits(where.get("versions", ""), release):
                    yield Citation(str(entry["id"]), path, symbol, _CLASS.sub("", words))


def _may_hold(tree: list[Any], package: str, release: str) -> bool:
    """Return whether a condition may be true in a release: the release has its keys, and satisfies its ranges."""
    kind, *parts = tree or ["value"]
    if kind == "name":
        name = str(parts[0])
        asked = RELEASE.match(name)
        if asked:
            return asked[1] != package or admits(asked[2], release)
        key = load_keys().get(name.removeprefix("is_set(").removesuffix(")"))
        return key is None or package not in key.exists or admits(key.exists[package], release)
    if kind in ("value", "not"):
        return True
    each = [_may_hold(part, package, release) for part in parts if isinstance(part, list)]
    return any(each) if kind == "or" else all(each)


def _is_of(versions: Mapping[str, str], package: str, release: str) -> bool:
    """Return whether a range has the release; one of a build that takes the package's place alone has not."""
    if package in versions:
        return admits(versions[package], release)
    replaces = knowledge.index()["releases"]["replaces"]
    return all(replaces.get(each) != package for each in versions)


def lost(files: Mapping[str, str], package: str, release: str) -> Iterator[Lost]:
    """Yield each citation of `package` that `files` do not have any more.

    A path counts as the package's where its first two folders are those of a file here: a wheel holds a part.
    """
    folders = {"/".join(path.split("/")[:2]) for path in files} | {path.partition("/")[0] for path in files}
    flat: dict[str, str] = {}
    for citation in cited(package, release):
        each = citation._replace(path=in_package(citation.path))
        near = "/".join(each.path.split("/")[:2])
        if not each.path.endswith(".py") or (near not in folders and each.path not in files):
            continue
        ref = f"{each.path}::{each.symbol}" if each.symbol else each.path
        if _stands(each.words, _flat(flat, files, each.path)):
            if each.symbol and not _has_symbol(files[each.path], each.symbol):
                yield Lost(each.id, ref, "symbol", each.path)
            continue
        near_by = (path for path in files if _maybe(each.words, files[path]))
        elsewhere = next((path for path in near_by if _stands(each.words, _flat(flat, files, path))), "")
        yield Lost(each.id, ref, "quote" if each.path in files else "file", elsewhere)


def _flat(kept: dict[str, str], files: Mapping[str, str], path: str) -> str:
    """Return a file's text in one line, with its joined texts as one."""
    if path not in kept:
        kept[path] = " ".join(
            _JOINT.sub("", files.get(path, "").replace('\\"', '"').replace("\\'", "'")).split()
        )
    return kept[path]


def _stands(words: str, text: str) -> bool:
    flat = " ".join(words.split()).strip("\"'")
    if flat in text:
        return True
    pieces = re.split(r"\{[^{}]*\}|'\s*'|\"\s*\"", flat.replace(HOLE, "{x}"))
    at = 0
    for piece in filter(None, (each.strip() for each in pieces)):
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def _maybe(words: str, text: str) -> bool:
    """Return whether a file has the longest word, which is quick to see."""
    return max(re.findall(r"\w+", words), key=len, default="") in text


def _has_symbol(text: str, symbol: str) -> bool:
    """Return whether a file defines `symbol`; its parts may be classes, functions or assigned names."""
    names = set()
    try:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and node.value == _SCRIPT:
                names.add(_SCRIPT)
    except (SyntaxError, ValueError, RecursionError):
        return True
    parts = re.findall(r"\w+", symbol.partition(",")[0].partition(" ")[0])
    return all(part in names for part in parts)
