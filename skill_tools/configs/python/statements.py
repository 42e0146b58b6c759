"""Follows the statements of a Python recipe, and the functions of the same file that it calls.

Nothing is imported or run. A branch that cannot be decided is followed with doubt: what it assigns becomes
unreadable. The number of statements and the depth of calls are bounded.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager

from skill_tools.configs.python.values import Expressions, Section, dotted_name
from skill_tools.configs.values import UNREADABLE

MAX_STATEMENTS = 20_000
MAX_CALLS = 20
MAX_LOOPS = 64

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_CONFIG_NAMES = {"cfg", "config", "recipe", "conf"}
_SECTIONS = {
    "model",
    "train",
    "optimizer",
    "ddp",
    "dataset",
    "checkpoint",
    "mixed_precision",
    "comm_overlap",
    "peft",
}
_SAME_OBJECT = {"deepcopy", "copy.deepcopy", "copy.copy"}


def takes_config(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return the name of the parameter that is the configuration, if the function takes one."""
    parameters = [parameter.arg for parameter in function.args.args]
    return next((parameter for parameter in parameters if parameter in _CONFIG_NAMES), None)


class Interpreter:
    """One file; names are looked up in the function that is being followed, then in the module."""

    def __init__(self, file: str, module: ast.Module) -> None:
        self.model_name: str | None = None
        self._module = module
        self._globals: dict[str, object] = {}
        self._locals = [self._globals]
        self._returned: list[tuple[object] | None] = [None]
        self._functions = {node.name: node for node in module.body if isinstance(node, Function)}
        self._classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
        self._expressions = Expressions(file, self._lookup, self._call)
        self._statements = 0
        self._doubts = 0

    def run_function(self, name: str) -> Section | None:
        """Follow one function; return the configuration that it returns or that it is given."""
        self._follow([node for node in self._module.body if isinstance(node, ast.Assign | ast.AnnAssign)])
        function = self._functions[name]
        given = Section(made_by="?")
        takes = takes_config(function)
        result = self._invoke(function, [], {takes: given} if takes else {})
        return result if isinstance(result, Section) else given if takes else None

    def run_module(self) -> Section | None:
        """Follow the script itself, then `main`; return the object that looks most like a configuration."""
        self._follow(self._module.body)
        if "main" in self._functions:
            scope: dict[str, object] = {}
            with self._scope(scope):
                self._follow(self._functions["main"].body)
            self._globals.update(scope)
        sections = [value for value in self._globals.values() if isinstance(value, Section)]
        best = max(sections, key=lambda section: len(section.fields.keys() & _SECTIONS), default=None)
        return best if best is not None and best.fields.keys() & _SECTIONS else None

    def _lookup(self, name: str) -> object:
        return self._locals[-1].get(name, self._globals.get(name, UNREADABLE))

    def _follow(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statements += 1
            if self._statements > MAX_STATEMENTS or self._returned[-1] is not None:
                return
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                evaluated = self._expressions.evaluate(value)
                for target in targets:
                    self._assign(target, evaluated)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._expressions.evaluate(value))
            case ast.AugAssign(target=target, op=kind, value=value) if isinstance(
                target, ast.Name | ast.Attribute
            ):
                current = ast.copy_location(ast.BinOp(left=target, op=kind, right=value), node)
                self._assign(target, self._expressions.evaluate(current))
            case ast.Expr(value=value):
                self._expressions.evaluate(value)
            case ast.Return(value=value):
                if not self._doubts:
                    self._returned[-1] = (self._expressions.evaluate(value),)
            case ast.If(test=test, body=body, orelse=orelse):
                self._branches(self._expressions.truth(test), body, orelse)
            case ast.For(target=target, iter=iterable, body=body):
                self._loop(target, self._expressions.evaluate(iterable), body)
            case ast.While(body=body):
                self._with_doubt(body)
            case ast.With(body=body):
                self._follow(body)
            case ast.Try():
                self._follow(node.body)
                for handler in node.handlers:
                    self._with_doubt(handler.body)
                self._follow(node.finalbody)

    def _branches(self, holds: bool | None, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        if holds is None:
            self._with_doubt(body)
            self._with_doubt(orelse)
        else:
            self._follow(body if holds else orelse)

    def _loop(self, target: ast.expr, items: object, body: list[ast.stmt]) -> None:
        if isinstance(items, list) and len(items) <= MAX_LOOPS:
            for item in items:
                self._assign(target, item)
                self._follow(body)
        else:
            self._assign(target, UNREADABLE)
            self._with_doubt(body)

    def _with_doubt(self, statements: list[ast.stmt]) -> None:
        self._doubts += 1
        self._follow(statements)
        self._doubts -= 1

    def _assign(self, target: ast.expr, value: object) -> None:
        if self._doubts and not isinstance(value, Section):
            value = UNREADABLE
        match target:
            case ast.Name(id=name):
                self._locals[-1][name] = value
            case ast.Attribute(value=base, attr=name):
                self._set(base, name, value, target)
            case ast.Subscript(value=base, slice=ast.Constant(value=str() as name)):
                self._set(base, name, value, target)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                matches = isinstance(value, list) and len(value) == len(targets)
                for position, part in enumerate(targets):
                    known = value[position] if matches and isinstance(value, list) else Section(made_by="?")
                    self._assign(part, known)

    def _set(self, base: ast.expr, name: str, value: object, target: ast.expr) -> None:
        owner = self._expressions.evaluate(base)
        if isinstance(owner, Section):
            owner.set(name, value, self._expressions.place(target))

    def _call(self, node: ast.Call) -> object:
        name = dotted_name(node.func) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
        last = name.rpartition(".")[2]
        if isinstance(node.func, ast.Attribute):
            owner = self._expressions.evaluate(node.func.value)
            if last == "update" and isinstance(owner, Section):
                self._update(owner, node)
        if last == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            self._set(node.args[0], str(node.args[1].value), self._expressions.evaluate(node.args[2]), node)
        if last.startswith("from_hf") and node.args:
            model = self._expressions.evaluate(node.args[0])
            self.model_name = model if isinstance(model, str) else self.model_name
        if name in _SAME_OBJECT and node.args:
            return self._expressions.evaluate(node.args[0])
        keywords = {item.arg: self._expressions.evaluate(item.value) for item in node.keywords if item.arg}
        if name in self._functions and len(self._locals) < MAX_CALLS:
            arguments = [self._expressions.evaluate(argument) for argument in node.args]
            return self._invoke(self._functions[name], arguments, keywords)
        return self._object(last, node, keywords)

    def _update(self, owner: Section, node: ast.Call) -> None:
        for argument in node.args:
            other = self._expressions.evaluate(argument)
            if isinstance(other, Section):
                for name, values in other.fields.items():
                    owner.set(name, *values[-1])

    def _object(self, name: str, node: ast.Call, keywords: dict[str, object]) -> Section:
        """Build what a constructor makes; a class of this file brings its defaults along."""
        section = Section(made_by=name or "?", is_literal=name == "dict")
        if not (name[:1].isupper() or name == "dict"):
            return section
        if name in self._classes:
            for statement in self._classes[name].body:
                if (
                    isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and statement.value
                ):
                    value = self._expressions.evaluate(statement.value)
                    section.set(statement.target.id, value, self._expressions.place(statement))
        for item in node.keywords:
            if item.arg:
                section.set(item.arg, keywords[item.arg], self._expressions.place(item))
        return section

    def _invoke(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        arguments: list[object],
        keywords: dict[str, object],
    ) -> object:
        parameters = [parameter.arg for parameter in function.args.args]
        scope = dict(zip(parameters, arguments, strict=False))
        defaults = dict(zip(reversed(parameters), reversed(function.args.defaults), strict=False))
        only = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        defaults |= {parameter.arg: default for parameter, default in only if default is not None}
        for name, default in defaults.items():
            scope.setdefault(name, self._expressions.evaluate(default))
        scope |= keywords
        with self._scope(scope):
            self._follow(function.body)
            returned = self._returned[-1]
        return returned[0] if returned else UNREADABLE

    @contextmanager
    def _scope(self, scope: dict[str, object]) -> Iterator[None]:
        self._locals.append(scope)
        self._returned.append(None)
        try:
            yield
        finally:
            self._locals.pop()
            self._returned.pop()
