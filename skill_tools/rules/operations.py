# SPDX-License-Identifier: Apache-2.0
"""The operations that a condition may use, each defined for every plain value.

They exist because a configuration is user input: `num_layers: twelve` must lead to a finding, never to a traceback.
So every operation has a result for every plain value: a meaningless operation (`None < 3`, `"a" - 1`, `1 / 0`) yields
None, and None is not true; `!=` and `not in` are the exact opposites of `==` and `in`.

Where Python itself has an answer, the answer here is the same. `UNKNOWN` never reaches an operation: `conditions`
answers for it, as it does for `and`, `or` and `not`.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType


class Unknown(Enum):
    """The third truth value, beside True and False."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN

Operation = Callable[[object, object], object]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _ordered(compare: Callable[[object, object], bool]) -> Operation:
    """Make `compare` total: only numbers with numbers and text with text have an order."""

    def ordered(left: object, right: object) -> object:
        if (_is_number(left) and _is_number(right)) or (isinstance(left, str) and isinstance(right, str)):
            return compare(left, right)
        return None

    return ordered


def _arithmetic(compute: Callable[[object, object], object]) -> Operation:
    """Make `compute` total: numbers only, and no answer where Python would raise."""

    def arithmetic(left: object, right: object) -> object:
        if not (_is_number(left) and _is_number(right)):
            return None
        try:
            return compute(left, right)
        except ArithmeticError:
            return None

    return arithmetic


def _contains(left: object, right: object) -> object:
    """Return `left in right`; text contains text, a mapping contains its keys."""
    if isinstance(right, str):
        return isinstance(left, str) and left in right
    if isinstance(right, list | tuple | dict):
        return any(left == element for element in right)
    return None


def _add(left: object, right: object) -> object:
    if isinstance(left, list) and isinstance(right, list):
        return left + right
    return _add_numbers(left, right)


def _subtract(left: object, right: object) -> object:
    if isinstance(left, list) and isinstance(right, list):
        return [element for element in left if element not in right]
    return _subtract_numbers(left, right)


def _intersect(left: object, right: object) -> object:
    if isinstance(left, list) and isinstance(right, list):
        return [element for element in left if element in right]
    return None


# Operands reach these lambdas only after the type checks above.
_add_numbers = _arithmetic(lambda a, b: a + b)  # type: ignore[operator]
_subtract_numbers = _arithmetic(lambda a, b: a - b)  # type: ignore[operator]

OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "is": lambda a, b: a is b,
        "is not": lambda a, b: a is not b,
        "<": _ordered(lambda a, b: a < b),  # type: ignore[operator]
        "<=": _ordered(lambda a, b: a <= b),  # type: ignore[operator]
        ">": _ordered(lambda a, b: a > b),  # type: ignore[operator]
        ">=": _ordered(lambda a, b: a >= b),  # type: ignore[operator]
        "in": _contains,
        "not in": lambda a, b: not _contains(a, b),
        "+": _add,
        "-": _subtract,
        "*": _arithmetic(lambda a, b: a * b),  # type: ignore[operator]
        "/": _arithmetic(lambda a, b: a / b),  # type: ignore[operator]
        "//": _arithmetic(lambda a, b: a // b),  # type: ignore[operator]
        "%": _arithmetic(lambda a, b: a % b),  # type: ignore[operator]
        "&": _intersect,
    }
)


def truth(value: object) -> bool | Unknown:
    """Return whether `value` counts as true, as Python's `bool` does, or `UNKNOWN`."""
    return UNKNOWN if value is UNKNOWN else bool(value)
