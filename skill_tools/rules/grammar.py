# SPDX-License-Identifier: Apache-2.0
"""The language of conditions: from an expression's text to a tree of plain lists, which `conditions` evaluates.

The text is parsed by `ast` and walked through a whitelist; nothing is ever evaluated as Python. Trees are JSON, so
that the index carries them and a lint parses nothing. A tree is one of

    ["and" | "or", tree, ..]  ["not", tree]  ["name", name]  ["value", literal]
    ["list", tree, ..]  ["call", predicate, tree, ..]  [operator, tree, tree]

A name is a key (`env.NVTE_CPU_OFFLOAD_V1`), `is_set(key)`, or a release in a range: `release("torch", "<2.3")` becomes
the name `torch<2.3`.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

from skill_tools.rules.predicates import PREDICATES
from skill_tools.rules.values import RELEASE

Tree = list[Any]

_SYMBOLS: Mapping[type[ast.AST], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&",
}  # fmt: skip


_COMPARED = 4  # the place of a comparison in `_BINDS`
# How tightly a tree's head binds its parts in the text, as Python's operators do; nothing else needs brackets.
_BINDS: Mapping[str, int] = {
    "or": 1, "and": 2, "not": 3,
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not"), _COMPARED),
    "&": 5, "+": 6, "-": 6, "*": 7, "/": 7, "//": 7, "%": 7,
}  # fmt: skip


class ConditionError(ValueError):
    """The text of a condition is not in the language; a fault of the rule, never of the user's input."""


def tree_of(text: str) -> Tree:
    """Parse `text`; raises `ConditionError` for anything outside the language."""
    try:
        parsed = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ConditionError(f"{text!r} is not an expression: {error}") from error
    return _tree(parsed.body)


def text_of(tree: Tree) -> str:
    """Return the text of `tree`; `tree_of` makes the same tree of it."""
    match tree:
        case ["value", constant]:
            return _constant(constant)
        case ["name", name]:
            asked = RELEASE.match(name)
            return f'release("{asked[1]}", "{asked[2]}")' if asked else str(name)
        case ["list", *parts]:
            return f"[{', '.join(map(text_of, parts))}]"
        case ["call", function, *arguments]:
            return f"{function}({', '.join(map(text_of, arguments))})"
        case ["not", part]:
            return f"not {_bracketed(part, _BINDS['not'])}"
        case ["-", ["value", 0], part]:
            return f"-{_bracketed(part, _BINDS['*'] + 1)}"
        case ["and" | "or" as word, *parts]:
            return f" {word} ".join(_bracketed(part, _BINDS[word] + 1) for part in parts)
    symbol, left, right = tree
    # Python chains comparisons, so one in another needs brackets on both sides.
    loosest = _BINDS[symbol] + (_BINDS[symbol] == _COMPARED)
    return f"{_bracketed(left, loosest)} {symbol} {_bracketed(right, _BINDS[symbol] + 1)}"


def _bracketed(tree: Tree, loosest: int) -> str:
    """Return the text of a part, in brackets where it binds less than `loosest`."""
    return text_of(tree) if _BINDS.get(tree[0], loosest) >= loosest else f"({text_of(tree)})"


def _constant(constant: object) -> str:
    if isinstance(constant, list):
        return f"[{', '.join(map(_constant, constant))}]"
    return json.dumps(constant, ensure_ascii=False) if isinstance(constant, str) else repr(constant)


def _tree(node: ast.expr) -> Tree:
    match node:
        case ast.BoolOp():
            return ["and" if isinstance(node.op, ast.And) else "or", *map(_tree, node.values)]
        case ast.UnaryOp(op=ast.Not()):
            return ["not", _tree(node.operand)]
        case ast.UnaryOp(op=ast.USub()):
            return ["-", ["value", 0], _tree(node.operand)]
        case ast.Compare():
            return _comparison(node)
        case ast.BinOp():
            return [_symbol(node.op), _tree(node.left), _tree(node.right)]
        case ast.Constant(value=bool() | int() | float() | str() | None as constant):
            return ["value", constant]
        case ast.List() | ast.Set() | ast.Tuple():
            return _list([_tree(element) for element in node.elts])
        case ast.Name() | ast.Attribute():
            return ["name", _dotted(node)]
        case ast.Call(func=ast.Name(id=function), keywords=[]):
            return _call(function, node.args)
    raise ConditionError(f"{ast.unparse(node)!r} is not allowed in a condition")


def _symbol(operator: ast.AST) -> str:
    if type(operator) not in _SYMBOLS:
        raise ConditionError(f"the operator {type(operator).__name__} is not allowed in a condition")
    return _SYMBOLS[type(operator)]


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{_dotted(value)}.{attribute}"
    raise ConditionError(f"{ast.unparse(node)!r} is not the name of a key")


def _list(elements: list[Tree]) -> Tree:
    if all(element[0] == "value" for element in elements):
        return ["value", [element[1] for element in elements]]
    return ["list", *elements]


def _comparison(node: ast.Compare) -> Tree:
    """Return a comparison; a chain `a < b < c` is the `and` of its links."""
    operands = [node.left, *node.comparators]
    links = [
        [
            _comparator(operator, operands[position + 1]),
            _tree(operands[position]),
            _tree(operands[position + 1]),
        ]
        for position, operator in enumerate(node.ops)
    ]
    return links[0] if len(links) == 1 else ["and", *links]


def _comparator(operator: ast.cmpop, right: ast.expr) -> str:
    singleton = isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool))
    if isinstance(operator, ast.Is | ast.IsNot) and not singleton:
        raise ConditionError("`is` compares with None, True or False only")
    return _symbol(operator)


def _call(function: str, arguments: list[ast.expr]) -> Tree:
    match function, arguments:
        case "is_set", [key]:
            return ["name", f"is_set({_dotted(key)})"]
        case "release", [ast.Constant(value=str(package)), ast.Constant(value=str(specifier))]:
            return ["name", f"{package}{specifier}"]
    if function not in PREDICATES:
        raise ConditionError(f"{function!r} is not a predicate; there are {', '.join(sorted(PREDICATES))}")
    return ["call", function, *map(_tree, arguments)]
