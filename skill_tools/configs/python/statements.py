# SPDX-License-Identifier: Apache-2.0
"""Follows the statements of a Python recipe, and the functions of the same file that it calls.

Nothing is imported or run. An undecidable branch is followed with doubt: a value assigned in it becomes unreadable. The
number of statements and the depth of calls are bounded.
"""

import ast
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from skill_tools.configs.python.syntax import FUNCTIONS, Function, dotted_name, last_name
from skill_tools.configs.python.values import MAX_PARTS, Expressions, Section, plain
from skill_tools.configs.values import UNREADABLE
from skill_tools.errors import UnusableInput

MAX_STATEMENTS = 20_000
MAX_CALLS = 20
MAX_LOOPS = 64
MAX_EVALUATED_CALLS = 50_000

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
_TAKES_COMMAND = {
    "run", "call", "check_call", "check_output", "Popen", "system", "parse_args", "parse_known_args",
    "parse_args_into_dataclasses",
}  # fmt: skip
_LEAVE_ALONE = {  # functions that are given an object and do not set its fields
    "asdict", "bool", "dict", "dir", "format", "getattr", "hasattr", "id", "info", "debug", "warning", "isinstance",
    "issubclass", "len", "list", "log", "pformat", "pprint", "print", "replace", "repr", "setattr", "str", "type",
    "to_dict", "vars", "super", "field",
}  # fmt: skip


def takes_config(function: Function) -> str | None:
    """Return the name of the parameter that is the configuration, if the function takes one."""
    parameters = [parameter.arg for parameter in function.args.args]
    return next((parameter for parameter in parameters if parameter in _CONFIG_NAMES), None)


class Built(NamedTuple):
    """An object of a watched class, the call that makes it, and its positional arguments."""

    kind: str
    call: ast.Call
    section: Section
    positional: tuple[object, ...]


class Interpreter:
    """One file; names are looked up in the followed function, then in the module.

    `built` keeps each object of a class in `watched`, or of its subclass in this file, in the order of the text;
    `commands` the command lines for other programs, each with its expression.
    """

    def __init__(self, file: str, module: ast.Module, watched: Collection[str] = ()) -> None:
        self.model_name: str | None = None
        self.built: list[Built] = []
        self.commands: list[tuple[ast.expr, object]] = []
        self._watched = watched
        self._followed: set[str] = set()
        self._file = file
        self._module = module
        self._globals: dict[str, object] = {}
        self._locals = [self._globals]
        self._returned: list[tuple[object] | None] = [None]
        self._functions = {node.name: node for node in module.body if isinstance(node, FUNCTIONS)}
        self._classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
        self._expressions = Expressions(file, self._lookup, self._call)
        self._statements = 0
        self._calls = 0
        self._doubts = 0

    def run_function(self, name: str) -> Section | None:
        """Follow one function; return the configuration that it returns or receives."""
        function = self._functions[name]
        given = Section(made_by="?")
        takes = takes_config(function)
        with self._not_too_deep():
            self._follow([node for node in self._module.body if isinstance(node, ast.Assign | ast.AnnAssign)])
            result = self._invoke(function, [], {takes: given} if takes else {})
        return result if isinstance(result, Section) else given if takes else None

    def run_module(self) -> Section | None:
        """Follow the script itself, then `main`; return the object that looks most like a configuration."""
        with self._not_too_deep():
            self._follow(self._module.body)
            if "main" in self._functions:  # once more, since its own names are wanted
                scope: dict[str, object] = {}
                with self._scope(scope):
                    self._follow(self._functions["main"].body)
                self._globals.update(scope)
        sections = [value for value in self._globals.values() if isinstance(value, Section)]
        best = max(sections, key=lambda section: len(section.fields.keys() & _SECTIONS), default=None)
        return best if best is not None and best.fields.keys() & _SECTIONS else None

    def run_everything(self) -> None:
        """Follow the script, then each function and method that it did not call: their arguments are not known."""
        with self._not_too_deep():
            self._follow(self._module.body)
            for node in self._module.body:
                for method in node.body if isinstance(node, ast.ClassDef) else [node]:
                    if isinstance(method, FUNCTIONS) and method.name not in self._followed:
                        every = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
                        self._invoke(method, [], {parameter.arg: UNREADABLE for parameter in every})

    @contextmanager
    def _not_too_deep(self) -> Iterator[None]:
        """Refuse code nested too deeply to follow on Python's stack."""
        try:
            yield
        except RecursionError as error:
            raise UnusableInput(
                f"{self._file} nests too deeply to be followed",
                expected="a Python file as people write them",
                attempt="linting the configuration that it makes",
            ) from error

    def _lookup(self, name: str) -> object:
        if name == "__name__":
            return "__main__"
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
            case ast.With(items=items, body=body):
                for item in items:
                    self._expressions.evaluate(item.context_expr)
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
            case ast.Attribute(value=ast.Name(id="sys"), attr="argv"):
                self.commands.append((target, value))
            case ast.Attribute(value=base, attr=name):
                self._set(base, name, value, target)
            case ast.Subscript(value=base, slice=index):
                self._set(base, plain(self._expressions.evaluate(index)), value, target)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                matches = isinstance(value, list) and len(value) == len(targets)
                for position, part in enumerate(targets):
                    known = value[position] if matches and isinstance(value, list) else Section(made_by="?")
                    self._assign(part, known)

    def _set(self, base: ast.expr, name: object, value: object, target: ast.expr) -> None:
        owner = self._expressions.evaluate(base)
        if isinstance(owner, Section) and isinstance(name, str):
            owner.set(name, value, self._expressions.place(target))
        elif isinstance(owner, Section):
            owner.is_open = True  # whichever field it is

    def _call(self, node: ast.Call) -> object:
        self._calls += 1
        if self._calls > MAX_EVALUATED_CALLS:
            return UNREADABLE
        name, last = dotted_name(node.func), last_name(node.func)
        if isinstance(node.func, ast.Attribute):
            owner = self._expressions.evaluate(node.func.value)
            if last == "update" and isinstance(owner, Section):
                self._update(owner, node)
            if last in ("append", "extend") and isinstance(owner, list) and node.args:
                self._lengthen(owner, node)
        if last == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            self._set(node.args[0], str(node.args[1].value), self._expressions.evaluate(node.args[2]), node)
        if last.startswith("from_hf") and node.args:
            model = self._expressions.evaluate(node.args[0])
            self.model_name = model if isinstance(model, str) else self.model_name
        if name in _SAME_OBJECT and node.args:
            return self._expressions.evaluate(node.args[0])
        keywords = {item.arg: self._expressions.evaluate(item.value) for item in node.keywords if item.arg}
        arguments = [self._expressions.evaluate(argument) for argument in node.args]
        if last in _TAKES_COMMAND and (arguments or "args" in keywords):
            stated = {each.arg: each.value for each in node.keywords}
            expression = node.args[0] if arguments else stated["args"]
            self.commands.append((expression, arguments[0] if arguments else keywords["args"]))
        if name in self._functions and len(self._locals) < MAX_CALLS:
            return self._invoke(self._functions[name], arguments, keywords)
        if not (last[:1].isupper() or last in _LEAVE_ALONE or last in self._watched):
            for given in (*arguments, *keywords.values()):
                if isinstance(given, Section):
                    given.is_open = True
        return self._object(last, node, arguments, keywords)

    def _lengthen(self, owner: list[object], node: ast.Call) -> None:
        """Change a list as `append` and `extend` do; a possible addition is one part that cannot be read."""
        value = self._expressions.evaluate(node.args[0])
        if len(owner) >= MAX_PARTS or self._doubts:
            value = [UNREADABLE]
        elif not (last_name(node.func) == "extend" and isinstance(value, list)):
            value = [value]
        owner += value[: MAX_PARTS - len(owner) + 1]

    def _update(self, owner: Section, node: ast.Call) -> None:
        for argument in node.args:
            owner.spread(self._expressions.evaluate(argument))
        for item in node.keywords:
            if item.arg:
                owner.set(item.arg, self._expressions.evaluate(item.value), self._expressions.place(item))

    def _object(
        self, name: str, node: ast.Call, arguments: list[object], keywords: dict[str, object]
    ) -> Section:
        """Build the object of a constructor; a class of this file brings its defaults along."""
        section = Section(made_by=name or "?", is_literal=name == "dict")
        if not (name[:1].isupper() or name == "dict" or name in self._watched):
            return section
        lineage = self._lineage(name)
        for ancestor in reversed(lineage):
            self._set_defaults(section, ancestor)
        for item in node.keywords:
            if item.arg:
                section.set(item.arg, keywords[item.arg], self._expressions.place(item))
            else:
                section.spread(self._expressions.evaluate(item.value))
        kind = next(
            (each for each in (name, *map(last_name, _bases(lineage))) if each in self._watched), None
        )
        if kind is not None:
            self.built.append(Built(kind, node, section, tuple(arguments)))
        return section

    def _lineage(self, name: str) -> list[ast.ClassDef]:
        """Return this file's class called `name`, then its base classes in this file."""
        found: list[ast.ClassDef] = []
        pending = [name]
        while pending:
            node = self._classes.get(pending.pop(0))
            if node is not None and node not in found:
                found.append(node)
                pending += [base.id for base in node.bases if isinstance(base, ast.Name)]
        return found

    def _set_defaults(self, section: Section, node: ast.ClassDef) -> None:
        """Set the fields that a class body gives a value, `x: int = 1` and `x: int = field(default=1)`."""
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = statement.value
                if isinstance(value, ast.Call) and last_name(value.func) == "field":
                    stated = {item.arg: item.value for item in value.keywords}
                    value = stated.get("default") or (stated.get("default_factory") and value)
                if value is not None:
                    place = self._expressions.place(statement)
                    section.set(statement.target.id, self._expressions.evaluate(value), place)

    def _invoke(self, function: Function, arguments: list[object], keywords: dict[str, object]) -> object:
        self._followed.add(function.name)
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


def _bases(lineage: list[ast.ClassDef]) -> list[ast.expr]:
    return [base for node in lineage for base in node.bases]
