# SPDX-License-Identifier: Apache-2.0
"""How Axolotl reads the options of its command line, on top of a file.

`axolotl train` parses them with click: dashes only, `--x/--no-x` for a bool, one value for anything else, and words
that it does not know go to the launcher. A launcher starts `axolotl.cli.train`, where Fire reads each value as a
Python literal; `--launcher python` hands the texts on. `load_cfg` then fits a value to the one in the file. Facts:
axolotl/cli/main.py::train, cli/utils/train.py::build_command and cli/config.py::load_cfg of 0.12.2 to 0.21.0,
fire/parser.py of 0.7.1.
"""

from collections.abc import Mapping
from typing import NamedTuple

from skill_tools.configs.releases import is_before
from skill_tools.configs.values import UNREADABLE

COERCED_SINCE = "0.15.0"  # until then an option over a bool was bool(text)
_TRUE = frozenset({"true", "1", "yes"})
_TEXTS: dict[str, object] = {
    "true": True, "yes": True, "false": False, "no": False, "null": None, "none": None, "~": None,
}  # fmt: skip

_NULLS = frozenset({"null", "none", "~"})


class Read(NamedTuple):
    """The value of an option; `by_release` says how releases differ on it, or read a text over a bool."""

    value: object
    by_release: str = ""


def read(text: str, existing: object, release: str | None, *, through_fire: bool) -> Read:
    """Return an option's value for `text` over `existing`, the value in the file, None for no such key.

    `release` is Axolotl's, None if unknown; `through_fire`: a launcher stands between.
    """
    given = literal(text) if through_fire else text
    before, since = _before(given, existing), _since(given, existing)
    if release is not None:
        value = before if is_before(release, COERCED_SINCE) else since
        is_lost = isinstance(existing, bool) and isinstance(given, str) and given.lower() not in _TEXTS
        return Read(value, f"{_shown(value)} in Axolotl {release}" if is_lost else "")
    if isinstance(before, str) is isinstance(since, str) and before == since:
        return Read(since)
    said = f"{_shown(before)} in Axolotl before {COERCED_SINCE}, {_shown(since)} since"
    # The release before leaves this text to pydantic, with the same result.
    is_left = isinstance(before, str) and not isinstance(existing, bool) and before.lower() not in _NULLS
    return Read(since) if is_left else Read(UNREADABLE, said)


def literal(text: str) -> object:
    """Return the value read by Fire: a Python literal with bare words as texts, else the text itself."""
    import ast  # a file without options needs no parser of Python

    class Words(ast.NodeTransformer):
        """Puts a text in the place of each bare word but True, False and None, which are constants already."""

        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.Constant(node.id)

    try:
        root = ast.parse(text, mode="eval")
        if isinstance(root.body, ast.BinOp):
            return text
        value = ast.literal_eval(Words().visit(root))
    except (SyntaxError, ValueError, MemoryError, RecursionError, TypeError):
        return text
    return list(value) if isinstance(value, tuple) else value


def value_at(root: Mapping[str, object], name: str) -> object:
    """Return the value that a file has for `name`, a key or `section.field`."""
    section, dot, field = name.partition(".")
    value = root.get(section)
    if not dot:
        return value
    return value.get(field) if isinstance(value, dict) else None


def _before(given: object, existing: object) -> object:
    return bool(given) if isinstance(existing, bool) else given


def _since(given: object, existing: object) -> object:
    if not isinstance(given, str):
        return given
    if existing is None:
        return _inferred(given)
    if isinstance(existing, bool):
        return given.lower() in _TRUE
    if isinstance(existing, int | float):
        return _number(given, type(existing))
    return given


def _inferred(text: str) -> object:
    lowered = text.lower()
    if lowered in _TEXTS:
        return _TEXTS[lowered]
    number = _number(text, int)
    return _number(text, float) if isinstance(number, str) else number


def _number(text: str, kind: type) -> object:
    try:
        value: object = kind(text)
    except ValueError:
        return text
    return value


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
