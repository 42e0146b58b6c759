# SPDX-License-Identifier: Apache-2.0
"""The names and texts of a release: fields and flags with their defaults, messages, log texts and private names.

A field is an annotated name of a class, a dataclass's or pydantic's; `Class.field`. A flag is the text that
`add_argument` gets. A message is the text of a `raise`, an `assert` or a warning. Only those about offload are kept of
messages, log texts and names: the rest of a framework changes with every release.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

OFFLOAD = re.compile(
    r"off_?load|nvme|pin_mem|pinned|swap|(?<!p)recompute|checkpointing|cpu_adam|cpuadam|ram_efficient|host_mem|reshard"
    r"|blocks_to|_to_cpu|_on_cpu|cpu_ram|zenflow|save_on_cpu",
    re.IGNORECASE,
)
_ELSEWHERE = re.compile(r"(?:^|/)(?:models|tests?|examples?|benchmarks?)/")
_OF_EACH_FILE = ""  # where files of a release disagree, as recipes do, none holds a default
_LOGGERS = frozenset({"debug", "info", "warning", "warn", "error", "warning_once", "log", "info_once"})


class Summary(NamedTuple):
    """A release's facts, each kind a mapping of names: to a default's source text, or to where a text stands."""

    fields: dict[str, str]
    flags: dict[str, str]
    messages: dict[str, str]
    logs: dict[str, str]
    private: dict[str, str]

    def kinds(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each kind with its facts."""
        yield from self._asdict().items()


def summarize(files: Mapping[str, str]) -> Summary:
    """Return the names and texts of `files`, by path; a file that does not parse says nothing."""
    found = Summary({}, {}, {}, {}, {})
    for path, text in files.items():
        if _ELSEWHERE.search(path) or not (OFFLOAD.search(text) or "add_argument" in text):
            continue
        if path.endswith(".py"):
            _read_python(found, path, text)
        elif "config" in path:
            _read_yaml(found, path, text)
    return found


def _read_python(found: Summary, path: str, text: str) -> None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, owner = pending.pop()
        if isinstance(node, ast.ClassDef):
            owner = node.name
            _keep(found.private, node.name, path, only_private=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _keep(found.private, node.name, path, only_private=True)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and owner:
            found.fields[f"{owner}.{node.target.id}"] = _default(node.value)
        elif isinstance(node, ast.Attribute):
            _keep(found.private, node.attr, path, only_private=True)
        elif isinstance(node, ast.Call):
            _read_call(found, path, node)
        elif isinstance(node, ast.Raise | ast.Assert):
            told = node.exc if isinstance(node, ast.Raise) else node.msg
            for said in _texts(told):
                _keep(found.messages, said, path)
        pending += [(child, owner) for child in ast.iter_child_nodes(node)]


def _read_call(found: Summary, path: str, node: ast.Call) -> None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "add_argument":
        given = {each.arg: each.value for each in node.keywords}
        default = ast.unparse(given.get("default") or given.get("action") or ast.Constant(None))
        for argument in node.args:
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                found.flags[str(argument.value)] = default
    elif name in _LOGGERS or name == "print":
        for argument in node.args:
            for said in _texts(argument):
                _keep(found.logs, said, path)


def _keep(kept: dict[str, str], name: str, path: str, *, only_private: bool = False) -> None:
    if OFFLOAD.search(name) and (not only_private or (name.startswith("_") and not name.startswith("__"))):
        kept.setdefault(name, path)


def _default(value: ast.expr | None) -> str:
    """Return a field's default as source: behind `Field(...)` and `field(...)` too; empty where it has none."""
    if isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) in (
        "Field",
        "field",
    ):
        given = {each.arg: each.value for each in value.keywords}
        inner = (
            given.get("default") or given.get("default_factory") or (value.args[0] if value.args else None)
        )
        return ast.unparse(inner) if inner is not None else ""
    return ast.unparse(value) if value is not None else ""


def _texts(node: ast.expr | None) -> Iterator[str]:
    """Yield the texts in an expression, with their variable parts as `{..}`."""
    pending: list[ast.AST] = [node] if node is not None else []
    while pending:
        part = pending.pop()
        if isinstance(part, ast.JoinedStr):
            pieces = [str(each.value) if isinstance(each, ast.Constant) else "{..}" for each in part.values]
            yield " ".join("".join(pieces).split())
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield " ".join(part.value.split())
        else:
            pending += ast.iter_child_nodes(part)


def _read_yaml(found: Summary, path: str, text: str) -> None:
    import yaml

    try:
        root = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError):
        return
    pending: list[tuple[str, object]] = [("", root)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{name}.{key}" if name else str(key), below) for key, below in value.items()]
        elif name and found.fields.setdefault(name, repr(value)) != repr(value):
            found.fields[name] = _OF_EACH_FILE
