# SPDX-License-Identifier: Apache-2.0
"""Asks the argument parser of a release of ms-swift, whose folder is on the path; imported by the witness.

The release's own function makes a command line of a file, and Transformers' `HfArgumentParser` parses it into the
release's own argument classes. These are taken out of their modules, which import every model and template.
"""

import ast
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

_CLASS = "SftArguments"


def run(text: str | None, suffix: str, words: list[str], names: list[str]) -> dict[str, Any]:
    """Return the arguments called `names`; raises for words that the parser does not take."""
    from transformers import HfArgumentParser

    argv = list(words)
    if text is not None:
        path = Path(tempfile.gettempdir(), f"ms-swift-{os.getpid()}{suffix}")
        path.write_text(text, encoding="utf-8")
        argv.insert(0, str(path))
        _file_reader()(argv)
    if not all(isinstance(each, str) for each in argv):
        raise TypeError("subprocess.run takes text alone")
    (given, left) = HfArgumentParser([arguments()]).parse_args_into_dataclasses(
        argv, return_remaining_strings=True
    )
    if left:
        raise ValueError(f"remaining_argv: {left}")
    return {name: getattr(given, name) for name in names if hasattr(given, name)}


def _root() -> Path:
    return next(Path(each, "swift") for each in sys.path if Path(each, "swift", "version.py").is_file())


@lru_cache
def _file_reader() -> Any:
    """Return the function that puts a file's arguments on the command line, before or behind its words."""
    logger = types.SimpleNamespace(get_logger=lambda: types.SimpleNamespace(warning=print, info=print))
    sys.modules["swift"], sys.modules["swift.utils"] = types.ModuleType("swift"), logger  # type: ignore[assignment]
    path = _root() / "cli" / "main.py"
    spec = importlib.util.spec_from_file_location("swift_main", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parse_yaml_args


@lru_cache
def arguments() -> Any:
    """Return the class of `swift sft`, which checks none of its arguments."""
    import transformers

    definitions = dict(_definitions())
    scope: dict[str, Any] = {**vars(typing), "dataclass": dataclass, "field": field, "os": os, "json": json}
    scope |= {name: value for name in ("torch",) if (value := sys.modules.get(name))}
    _define(_CLASS, definitions, scope, transformers)
    made = scope[_CLASS]
    made.__post_init__ = lambda self: None
    return made


def _definitions() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sorted(_root().rglob("*.py")):
        if "argument" in str(path) or "tuner_plugin" in str(path):
            with contextlib.suppress(SyntaxError):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                yield from ((node.name, node) for node in tree.body if isinstance(node, ast.ClassDef))


def _define(
    name: str, definitions: dict[str, ast.ClassDef], scope: dict[str, Any], transformers: Any
) -> None:
    """Define a class of the release, after those that it inherits; any other is Transformers' own."""
    if name in scope:
        return
    node = definitions.get(name)
    if node is None or hasattr(transformers, name):
        scope[name] = getattr(transformers, name, object)
        return
    for base in node.bases:
        assert isinstance(base, ast.Name | ast.Attribute)
        _define(base.id if isinstance(base, ast.Name) else base.attr, definitions, scope, transformers)
    node.bases = [
        ast.Name(each.attr, ast.Load()) if isinstance(each, ast.Attribute) else each for each in node.bases
    ]
    node.body = [each for each in node.body if isinstance(each, ast.AnnAssign)] or [ast.Pass()]
    annotated = {
        each.id for part in node.body if isinstance(part, ast.AnnAssign) for each in ast.walk(part.annotation)
        if isinstance(each, ast.Name)
    }  # fmt: skip
    module = ast.fix_missing_locations(ast.Module([node], []))
    for _ in range(20):
        try:
            exec(compile(module, name, "exec"), scope)
            return
        except NameError as error:  # a type of an annotation, or a name in a help text
            scope[str(error.name)] = str if error.name in annotated else MagicMock()
