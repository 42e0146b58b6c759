# SPDX-License-Identifier: Apache-2.0
"""Parses Python text into its tree, and names its parts; nothing is imported, compiled or run."""

import ast
import warnings
from collections.abc import Collection

from skill_tools.errors import UnusableInput

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(text: str, filename: str) -> ast.Module:
    """Return the tree of `text`; raises `UnusableInput` where it is no Python, or nested beyond reading."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stray backslash in somebody's docstring is no matter of ours
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        reason = getattr(error, "msg", None) or "too deeply nested"
        raise UnusableInput(
            f"{filename}:{line} is not valid Python ({reason})",
            expected="a Python file",
            attempt="mending that line",
        ) from error


def dotted_name(node: ast.expr) -> str:
    """Return `a.b.c` for a chain of names, else the empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def last_name(node: ast.expr) -> str:
    """Return the last name of a called or inherited object: `b` of `a.b` and of `f().b`, else the empty text."""
    return dotted_name(node).rpartition(".")[2] or (node.attr if isinstance(node, ast.Attribute) else "")


def calls_one_of(text: str, names: Collection[str]) -> bool:
    """Return whether Python `text` calls something of these names. A mention, such as in a docstring, is no call."""
    try:
        tree = parse(text, "")
    except UnusableInput:
        return False
    return any(isinstance(node, ast.Call) and last_name(node.func) in names for node in ast.walk(tree))
