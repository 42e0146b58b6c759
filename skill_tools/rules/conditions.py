# SPDX-License-Identifier: Apache-2.0
"""Conditions: small expressions over canonical keys, answered with True, False or UNKNOWN.

A condition reads *names* from a scope (any mapping of name to value or `UNKNOWN`, see `values.Scope`); `grammar`
defines the names and parses the text into a tree; the tree becomes closures here. `and`, `or` and `not` follow Kleene's
logic: learning an unknown value never changes a decided answer. `operations` defines the results for unsuitable
operands.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from skill_tools.rules.operations import OPERATIONS, UNKNOWN, Unknown, truth
from skill_tools.rules.predicates import PREDICATES

Scope = Mapping[str, object]
Evaluate = Callable[[Scope, list[str]], object]


class Node(NamedTuple):
    """One part of a condition: an `and`, `or` or `not` of `parts`, or a `leaf`; `names` is all it can read.

    `evaluate` returns the part's value; if that is `UNKNOWN`, it also adds the unknown names to its second argument.
    """

    kind: str
    names: tuple[str, ...]
    evaluate: Evaluate
    parts: tuple["Node", ...] = ()


class Condition(NamedTuple):
    """A condition ready to be asked."""

    root: Node

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the condition can read, in the order of the text."""
        return self.root.names

    def holds(self, scope: Scope) -> bool | Unknown:
        """Return the condition's truth in `scope`, which must answer for every name in `names`."""
        return truth(self.root.evaluate(scope, []))

    def ask(self, scope: Scope) -> tuple[bool | Unknown, list[str]]:
        """Return the condition's truth in `scope`, and the unknown names that keep it open, in the text's order."""
        missing: list[str] = []
        answer = truth(self.root.evaluate(scope, missing))
        return answer, list(dict.fromkeys(missing)) if missing else missing

    def deciding_names(self, scope: Scope) -> list[str]:
        """Return the names that make a true condition true in `scope`, in the order of the text."""
        return list(dict.fromkeys(_deciding(self.root, scope, True)))


def build(tree: list[Any]) -> Condition:
    """Make a condition of a tree of `grammar`."""
    return Condition(_node(tree))


def names_in(tree: list[Any]) -> list[str]:
    """Return the names that a tree of `grammar` reads; building its condition would take ten times as long."""
    names: list[str] = []
    left = [tree] if tree else []
    while left:
        part = left.pop()
        if part[0] == "name":
            names.append(part[1])
        elif part[0] == "call":
            left += part[2:]
        elif part[0] != "value":
            left += part[1:]
    return names


def guard_of(tree: list[Any]) -> str:
    """Return a name that must be true for the condition to hold, or "" if no name alone is one.

    It lets the linter pass over most rules without looking at the rest of them.
    """
    return next(iter(names_needed(tree)), "")


def names_needed(tree: list[Any]) -> list[str]:
    """Return the names that must all be true for the condition of `tree` to hold; none for an empty one."""
    parts = tree[1:] if tree[:1] == ["and"] else [tree] if tree else []
    return [part[1] for part in parts if part[0] == "name"]


def parse(text: str) -> Condition:
    """Make a condition of its text; raises `grammar.ConditionError` for anything outside the language."""
    from skill_tools.rules.grammar import tree_of

    return build(tree_of(text))


def _deciding(node: Node, scope: Scope, answer: bool) -> Iterator[str]:
    """Yield the names in the parts that carry `answer`, the truth of `node` in `scope`."""
    if node.kind == "leaf":
        yield from node.names
    elif node.kind == "not":
        yield from _deciding(node.parts[0], scope, not answer)
    elif answer is (node.kind == "or"):  # one true part decides an `or`, one false part an `and`
        yield from _deciding(next(part for part in node.parts if _is(part, answer, scope)), scope, answer)
    else:
        for part in node.parts:
            yield from _deciding(part, scope, answer)


def _is(part: Node, answer: bool, scope: Scope) -> bool:
    return truth(part.evaluate(scope, [])) is answer


def _node(tree: list[Any]) -> Node:
    kind = tree[0]
    if kind == "name":
        return _name(tree[1])
    if kind == "value":
        value = tree[1]
        return Node("leaf", (), lambda _scope, _missing: value)
    if kind == "call":
        return _call(PREDICATES[tree[1]], [_node(part) for part in tree[2:]])
    parts = [_node(part) for part in tree[1:]]
    if kind in ("and", "or"):
        return _junction(kind, parts)
    if kind == "not":
        return _negation(parts[0])
    if kind == "list":
        return _call(lambda *elements: list(elements), parts)
    return _operation(kind, *parts)


def _all_names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for node in nodes for name in node.names))


def _name(name: str) -> Node:
    def evaluate(scope: Scope, missing: list[str]) -> object:
        value = scope[name]
        if value is UNKNOWN:
            missing.append(name)
        return value

    return Node("leaf", (name,), evaluate)


def _junction(kind: str, nodes: list[Node]) -> Node:
    """Build a Kleene `and` or `or`: one deciding part is enough, whatever the others are."""
    decisive = kind == "or"
    evaluates = tuple(node.evaluate for node in nodes)

    def evaluate(scope: Scope, missing: list[str]) -> object:
        answer: bool | Unknown = not decisive
        before = len(missing)
        for part in evaluates:
            value = part(scope, missing)
            if value is UNKNOWN:
                answer = UNKNOWN
            elif bool(value) is decisive:
                del missing[before:]
                return decisive
        return answer

    return Node(kind, _all_names(nodes), evaluate, tuple(nodes))


def _negation(node: Node) -> Node:
    def evaluate(scope: Scope, missing: list[str]) -> object:
        value = truth(node.evaluate(scope, missing))
        return UNKNOWN if value is UNKNOWN else not value

    return Node("not", node.names, evaluate, (node,))


def _operation(symbol: str, left: Node, right: Node) -> Node:
    operation = OPERATIONS[symbol]
    evaluate_left, evaluate_right = left.evaluate, right.evaluate

    def evaluate(scope: Scope, missing: list[str]) -> object:
        left_value, right_value = evaluate_left(scope, missing), evaluate_right(scope, missing)
        if left_value is UNKNOWN or right_value is UNKNOWN:
            return UNKNOWN
        return operation(left_value, right_value)

    return Node("leaf", _all_names([left, right]), evaluate)


def _call(function: Callable[..., object], arguments: list[Node]) -> Node:
    def evaluate(scope: Scope, missing: list[str]) -> object:
        values = [argument.evaluate(scope, missing) for argument in arguments]
        return UNKNOWN if UNKNOWN in values else function(*values)

    return Node("leaf", _all_names(arguments), evaluate)
