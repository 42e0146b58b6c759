# SPDX-License-Identifier: Apache-2.0
"""Runs single definitions of a source tree, so that a framework's own checks answer without its training stack.

`Sources.take("pkg.module", "function")` or `"Class.method"` executes that definition and, from the same tree, whatever
it names. A missing library has a stand-in, and so has each name given by a judge itself.
"""

import ast
import builtins
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Sources:
    """The modules below some folders; `given` replaces names, as `module.name`, by objects of a judge."""

    def __init__(self, *roots: Path, real: tuple[str, ...] = (), given: dict[str, Any] | None = None) -> None:
        self._roots = roots
        self._real = {*sys.stdlib_module_names, *real}
        self._given = given or {}
        self._tables: dict[str, dict[str, ast.AST]] = {}
        self._scopes: dict[str, dict[str, Any]] = {}

    def path(self, module: str) -> Path | None:
        """Return the file of a module of the tree."""
        for root in self._roots:
            base = root / module.replace(".", "/")
            for found in (base.with_suffix(".py"), base / "__init__.py"):
                if found.is_file():
                    return found
        return None

    def names(self, module: str) -> tuple[str, ...]:
        """Return the names that a module defines or imports, in its order."""
        return tuple(self._table(module))

    def take(self, module: str, name: str) -> Any:
        """Return a definition of `module`; a method comes as the plain function."""
        owner, _, method = name.rpartition(".")
        if not owner:
            return self._resolved(module, name)
        holder = self._table(module)[owner]
        (node,) = (
            each
            for each in getattr(holder, "body", [])
            if isinstance(each, ast.FunctionDef) and each.name == method
        )
        bare = ast.parse(ast.unparse(node)).body[0]
        assert isinstance(bare, ast.FunctionDef)
        bare.decorator_list = []
        for part in ast.walk(bare):  # a function that stands alone has no class to look above
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "super":
                part.func.id = "_above"
        self._scopes[module]["_above"] = lambda: MagicMock(name="super", unsafe=True)
        return self._run(module, bare, method, apart=True)

    def _table(self, module: str) -> dict[str, ast.AST]:
        if module not in self._tables:
            path = self.path(module)
            assert path is not None, f"{module} is not in {self._roots}"
            table: dict[str, ast.AST] = {}
            pending: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
            while pending:
                node = pending.pop(0)
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    table[node.name] = node
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    for alias in node.names:
                        table.setdefault(alias.asname or alias.name.partition(".")[0], _one(node, alias))
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in targets:
                        for part in ast.walk(target):
                            if isinstance(part, ast.Name):
                                table[part.id] = node
                elif not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
                    pending[:0] = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            self._tables[module] = table
            self._scopes[module] = {"__name__": module, "__file__": str(path), "__builtins__": builtins}
        return self._tables[module]

    def _resolved(self, module: str, name: str) -> Any:
        table, scope = self._table(module), self._scopes[module]
        if name in scope:
            return scope[name]
        if f"{module}.{name}" in self._given:
            scope[name] = self._given[f"{module}.{name}"]
            return scope[name]
        scope[name] = MagicMock(name=name)  # a self-naming definition sees this meanwhile
        node = table.get(name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            scope[name] = self._imported(module, node)
        elif isinstance(node, Definition):
            self._run(module, node, name)
        return scope[name]

    def _run(self, module: str, node: Definition, name: str, *, apart: bool = False) -> Any:
        scope = self._scopes[module]
        if isinstance(node, ast.FunctionDef):  # names in its annotations are not needed
            node.returns = None
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in self._table(module):
                self._resolved(module, part.id)
        if isinstance(node, ast.ClassDef):
            node = ast.parse(ast.unparse(node)).body[0]  # type: ignore[assignment]
            assert isinstance(node, ast.ClassDef)
            node.bases = [base for base in node.bases if isinstance(self._value(base, scope), type)]
        target = dict(scope) if apart else scope
        try:
            exec(compile(ast.Module([node], []), f"<{module}>", "exec"), scope if not apart else target)
        except Exception:
            if apart or isinstance(node, ast.FunctionDef):
                raise
        if apart:
            function = target[name]
            return type(function)(function.__code__, scope, name, function.__defaults__, function.__closure__)
        return scope[name]

    @staticmethod
    def _value(node: ast.expr, scope: dict[str, Any]) -> Any:
        try:
            return eval(compile(ast.Expression(node), "<base>", "eval"), scope)
        except Exception:
            return None

    def _imported(self, module: str, node: ast.Import | ast.ImportFrom) -> Any:
        (alias,) = node.names
        if isinstance(node, ast.Import):
            return self._module(alias.name if alias.asname else alias.name.partition(".")[0])
        base = node.module or ""
        if node.level:
            path = self.path(module)
            is_package = path is not None and path.name == "__init__.py"
            parts = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
            base = ".".join([*parts, *([node.module] if node.module else [])])
        if self.path(f"{base}.{alias.name}") is not None:
            return self._module(f"{base}.{alias.name}")
        return getattr(self._module(base), alias.name)

    def _module(self, name: str) -> Any:
        if self.path(name) is not None:
            return _Module(self, name)
        if name.partition(".")[0] in self._real:
            return importlib.import_module(name)
        return MagicMock(name=name)


class _Module(ModuleType):
    """A module of the tree whose definitions run when they are asked for."""

    def __init__(self, sources: Sources, name: str) -> None:
        super().__init__(name)
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._sources.take(self.__name__, name)


def _one(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.AST:
    if isinstance(node, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(node.module, [alias], node.level)
