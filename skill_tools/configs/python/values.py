# SPDX-License-Identifier: Apache-2.0
"""The value of an expression in a Python recipe, as far as its text tells.

Configuration objects are `Section`s: their fields are kept with every value they were given and its place.
The result of another module's function is an empty section: fields may be set on it, but it has no value
itself.
"""

import ast
import operator
from collections.abc import Callable, Mapping

from skill_tools.configs.config import Place
from skill_tools.configs.python.syntax import dotted_name
from skill_tools.configs.values import UNREADABLE, dtype_name

MAX_NUMBER = 2**63
MAX_PARTS = 2000
MAX_EXPONENT = 64

_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class Section:
    """An object with fields; `made_by` is the class or function that made it, empty for a dict.

    `is_open`: unfollowed code got the object (`**` of an unknown value, a function of another module) and may set any
    field.
    """

    def __init__(self, made_by: str = "", *, is_literal: bool = False) -> None:
        self.made_by, self.is_literal = made_by, is_literal
        self.is_open = False
        self.fields: dict[str, list[tuple[object, Place]]] = {}

    def get(self, name: str, place: Place) -> object:
        """Return a field; an unset one becomes an unknown section, which is remembered."""
        values = self.fields.get(name)
        if values:
            return values[-1][0]
        if self.is_literal:
            return UNREADABLE
        child = Section(made_by="?")
        self.fields[name] = [(child, place)]
        return child

    def set(self, name: str, value: object, place: Place) -> None:
        """Give a field one more value; the last one counts."""
        self.fields.setdefault(name, []).append((value, place))

    def spread(self, value: object) -> None:
        """Take over the fields of `value`, as `**` and `update` do; an unreadable one may hold any field."""
        if isinstance(value, Section):
            for name, values in list(value.fields.items()):
                self.set(name, *values[-1])
        self.is_open |= not isinstance(value, Section) or value.is_open or not value.is_literal


def plain(value: object) -> object:
    """Return a value without sections: a dict literal becomes a dict, any other object is not readable.

    A value of more than `MAX_PARTS` parts, or one inside itself, is not readable either.
    """
    return UNREADABLE if _is_too_large(value) else _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, list):
        items = [_plain(item) for item in value]
        return UNREADABLE if UNREADABLE in items else items
    if isinstance(value, Section):
        if not value.is_literal or value.is_open:
            return UNREADABLE
        return {name: _plain(values[-1][0]) for name, values in value.fields.items()}
    return value


def _is_too_large(value: object) -> bool:
    pending, parts = [value], 0
    while pending and parts <= MAX_PARTS:
        part = pending.pop()
        parts += 1
        if isinstance(part, list):
            pending += part
        elif isinstance(part, Section):
            pending += [values[-1][0] for values in part.fields.values()]
    return parts > MAX_PARTS


def _number(kind: str, value: object) -> object:
    """Return `int(value)` or `float(value)`."""
    if not isinstance(value, int | float | str) or (isinstance(value, str) and len(value) > MAX_EXPONENT):
        return UNREADABLE
    try:
        return int(value) if kind == "int" else float(value)
    except (ValueError, OverflowError):
        return UNREADABLE


class Expressions:
    """Evaluates expressions; names and calls are looked up by the two functions that it is given."""

    def __init__(self, file: str, name: Callable[[str], object], call: Callable[[ast.Call], object]) -> None:
        self._file = file
        self._name = name
        self._call = call

    def place(self, node: ast.expr | ast.stmt | ast.keyword) -> Place:
        """Return where `node` begins."""
        return Place(self._file, node.lineno, node.col_offset + 1)

    def evaluate(self, node: ast.expr | None) -> object:
        """Return the value of `node`, or `UNREADABLE`."""
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript(value=base, slice=index):
                return self._part(self.evaluate(base), plain(self.evaluate(index)), node)
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.evaluate(element) for element in node.elts]
            case ast.Dict():
                return self._dict(node)
            case ast.Call(func=ast.Name(id="int" | "float" as kind), args=[argument], keywords=[]):
                return _number(kind, self.evaluate(argument))
            case ast.Call():
                return self._call(node)
            case ast.UnaryOp() | ast.BinOp():
                return self._arithmetic(node)
            case ast.IfExp():
                holds = self.truth(node.test)
                chosen = node.body if holds else node.orelse
                return UNREADABLE if holds is None else self.evaluate(chosen)
        return UNREADABLE

    def truth(self, node: ast.expr) -> bool | None:
        """Return whether a condition holds, or None when that is not known."""
        match node:
            case ast.BoolOp(op=kind, values=values):
                decisive = isinstance(kind, ast.Or)
                answers = [self.truth(value) for value in values]
                return decisive if decisive in answers else None if None in answers else not decisive
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                holds = self.truth(operand)
                return None if holds is None else not holds
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                return self._comparison(type(kind), plain(self.evaluate(left)), plain(self.evaluate(right)))
            case ast.Call(func=ast.Name(id="hasattr")):
                return True
        value = plain(self.evaluate(node))
        return None if value is UNREADABLE else bool(value)

    def _attribute(self, node: ast.Attribute) -> object:
        name = dotted_name(node)
        if dtype_name(name) and name.startswith("torch."):
            return dtype_name(name)
        base = self.evaluate(node.value)
        if isinstance(base, Section):
            return base.get(node.attr, self.place(node))
        owner = name.split(".")[-2] if name.count(".") else ""
        # A member in capitals, as `OptimizerNames.ADAMW_TORCH`, has another value than its name.
        is_named_as_its_value = owner[:1].isupper() and not owner.isupper() and not node.attr.isupper()
        return node.attr if is_named_as_its_value else UNREADABLE

    def _part(self, owner: object, index: object, node: ast.expr) -> object:
        if isinstance(owner, Section) and isinstance(index, str):
            return owner.get(index, self.place(node))
        if isinstance(owner, list) and isinstance(index, int) and -len(owner) <= index < len(owner):
            return owner[index]
        return UNREADABLE

    def _dict(self, node: ast.Dict) -> Section:
        section = Section(is_literal=True)
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                spread = self.evaluate(value)
                section.spread(spread)
                continue
            name = self.evaluate(key)
            if isinstance(name, str):
                section.set(name, self.evaluate(value), self.place(key))
        return section

    def _arithmetic(self, node: ast.UnaryOp | ast.BinOp) -> object:
        if isinstance(node, ast.UnaryOp):
            value = self.evaluate(node.operand)
            if isinstance(node.op, ast.Not):
                holds = self.truth(node)
                return UNREADABLE if holds is None else holds
            negated = isinstance(node.op, ast.USub) and isinstance(value, int | float)
            return -value if negated and isinstance(value, int | float) else UNREADABLE
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        if isinstance(node.op, ast.Add):
            if isinstance(left, list) and isinstance(right, list):
                return [*left, *right] if len(left) + len(right) < MAX_PARTS else UNREADABLE
            if isinstance(left, str) and isinstance(right, str):
                return left + right if len(left) + len(right) < MAX_PARTS else UNREADABLE
        compute = _ARITHMETIC.get(type(node.op))
        if compute is None or not (isinstance(left, int | float) and isinstance(right, int | float)):
            return UNREADABLE
        if isinstance(node.op, ast.Pow) and not (abs(left) < MAX_NUMBER and 0 <= right <= MAX_EXPONENT):
            return UNREADABLE
        try:
            result = compute(left, right)
        except ArithmeticError:
            return UNREADABLE
        return result if abs(result) < MAX_NUMBER else UNREADABLE

    def _comparison(self, kind: type[ast.cmpop], left: object, right: object) -> bool | None:
        if left is UNREADABLE or right is UNREADABLE:
            return None
        if kind in (ast.In, ast.NotIn):
            found = any(left == item for item in right) if isinstance(right, list | dict) else None
            return None if found is None else found is (kind is ast.In)
        if kind in _COMPARISONS:
            return _COMPARISONS[kind](left, right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            return {
                ast.Lt: left < right,
                ast.LtE: left <= right,
                ast.Gt: left > right,
                ast.GtE: left >= right,
            }[kind]
        return None
