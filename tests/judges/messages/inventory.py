# SPDX-License-Identifier: Apache-2.0
"""Lists every text with which offload can end a run, in the sources here, and the unknown ones among them.

    python tests/judges/messages/inventory.py         # texts that no message, no rule and no review knows
    python tests/judges/messages/inventory.py --all       # every text, with its releases and who knows it

A text stands in a `raise`, an `assert`, a warning or a logger's error in a file of `scope.yaml`. Of a file that only
offloading runs all count; of the others the texts about offloading's work, or with such a condition. `scope.yaml` says
too which texts were read and set aside, each with the reason.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from messages_judge import trees
from packaging.version import Version

from skill_tools import knowledge
from skill_tools.diagnosis.texts import HOLE

_SPEAKS = re.compile(
    r"(?i)offload|\bcpu\b|\bcpu_|_cpu\b|nvme|swap|\bpin|pinned|same device|on device|devices\b|device type"
    r"|materializ|meta device"
)
_LEAST = 12  # letters that a text needs to be told from others
_WARNS = frozenset(
    ("warn", "warning", "warning_once", "error", "exception", "critical", "warn_once", "log_single_rank")
)


class Text(NamedTuple):
    """A text of a file: how it is said (`raise`, `assert` or `warn`), the words with holes, and its function."""

    package: str
    path: str
    symbol: str
    how: str
    words: str


def texts(package: str, folder: Path, patterns: dict[str, list[str]]) -> Iterator[Text]:
    """Yield the texts of one release: of the files in `whole` all, of those in `part` those about offloading."""
    for scope in ("whole", "part"):
        for pattern in patterns.get(scope, []):
            for path in sorted(folder.glob(pattern)):
                yield from _of_file(package, folder, path, everything=scope == "whole")


def _of_file(package: str, folder: Path, path: Path, *, everything: bool) -> Iterator[Text]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for symbol, node, conditions in _statements(tree, "", ""):
        for how, words in _said(node):
            about = everything or _SPEAKS.search(words) or _SPEAKS.search(conditions)
            if about and len(re.sub(r"\W", "", words.replace(HOLE, ""))) >= _LEAST:
                yield Text(package, str(path.relative_to(folder)), symbol, how, words)


def _statements(node: ast.AST, symbol: str, conditions: str) -> Iterator[tuple[str, ast.stmt, str]]:
    """Yield every statement with its function and the condition right above it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, f"{symbol}.{child.name}".lstrip("."), "")
            continue
        if isinstance(child, ast.stmt):
            yield symbol, child, conditions
        above = ast.unparse(child.test) if isinstance(child, ast.If) else ""
        yield from _statements(child, symbol, above or conditions)


def _said(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        yield "raise", _words(node.exc.args[0])
    elif isinstance(node, ast.Assert) and node.msg is not None:
        yield "assert", _words(node.msg)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        function = node.value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in _WARNS:
            first = next((each for each in map(_words, node.value.args) if each), "")
            yield "warn", first
        elif name in ("_p_assert", "_check", "torch_check") and len(node.value.args) > 1:
            yield "assert", _words(node.value.args[1])


def _words(node: ast.expr) -> str:
    """Return a text with holes; empty where the expression is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_words(node.left) or HOLE) + (_words(node.right) or HOLE)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return re.sub(r"%[-\d.]*[sdrfx]", HOLE, _words(node.left))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{[^{}]*\}", HOLE, _words(node.func.value))
    if isinstance(node, ast.Lambda):
        return _words(node.body)
    return ""


@cache
def scope() -> dict[str, dict[str, object]]:
    """Return the counted files, by package, and the texts set aside."""
    data: dict[str, dict[str, object]] = yaml.safe_load(
        (Path(__file__).parent / "scope.yaml").read_text(encoding="utf-8")
    )
    return data


def inventory(packages: dict[str, dict[str, Path]]) -> dict[Text, list[str]]:
    """Return every text with the releases here that have it."""
    found: dict[Text, list[str]] = {}
    for package, patterns in scope()["files"].items():
        for release, folder in sorted(packages.get(package, {}).items(), key=lambda each: Version(each[0])):
            for text in set(texts(package, folder, patterns)):
                found.setdefault(text, []).append(release)
    return found


def known_by(text: Text) -> str:
    """Return the message or rule that quotes `text`, or why it was set aside; empty where nobody knows it."""
    for name, pieces in _quotes():
        place = 0
        for piece in pieces:
            place = text.words.find(piece, place)
            if place < 0:
                break
            place += len(piece)
        else:
            return name
    return next(
        (f"set aside: {why}" for pattern, why in _aside() if pattern.search(f"{text.path} {text.words}")), ""
    )


@cache
def _quotes() -> tuple[tuple[str, tuple[str, ...]], ...]:
    named = [(f"message {entry['id']}", entry["text"]) for entry in knowledge.load_messages()]
    named += [
        (f"rule {rule['id']}", rule["raises"]) for rule in knowledge.index()["rules"] if rule.get("raises")
    ]
    return tuple(
        (name, pieces)
        for name, given in named
        for each in (given if isinstance(given, list) else [given])
        if (pieces := _pieces(each))
    )


def _pieces(quote: str) -> tuple[str, ...]:
    plain = re.sub(r"^[A-Z]\w*(?:Error|Exception): ", "", quote)
    return tuple(piece.strip() for piece in plain.split(HOLE) if len(piece.strip()) > 3)


@cache
def _aside() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(each["text"]), str(each["why"])) for each in scope().get("aside", []))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="print the known ones too")
    parser.add_argument("--package", help="one package alone")
    args = parser.parse_args()
    found = inventory(trees())
    unknown = 0
    for text, releases in sorted(found.items()):
        if args.package and text.package != args.package:
            continue
        known = known_by(text)
        unknown += not known
        if args.all or not known:
            print(
                f"{text.package} {releases[0]}..{releases[-1]} ({len(releases)}) {text.path}::{text.symbol} {text.how}"
            )
            print(f"    {text.words[:300]!r}")
            print(f"    {known}" if known else "    NOBODY")
    print(f"{len(found)} texts, {unknown} of them unknown")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
