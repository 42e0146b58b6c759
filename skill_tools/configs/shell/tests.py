# SPDX-License-Identifier: Apache-2.0
"""Decides `[ ... ]` and `[[ ... ]]` if all words are known; answers None otherwise."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from skill_tools.configs.shell.command import Argument

_NUMERIC: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
_OPENING = {"[", "[[", "test"}


def evaluate(words: Sequence[Argument]) -> bool | None:
    """Return the answer of the test command, or None when that cannot be known or `words` are another command."""
    if not words or words[0].text not in _OPENING:
        return {"true": True, "false": False, ":": True}.get(words[0].text) if words else None
    is_pattern = words[0].text == "[["
    operands = [word for word in words[1:] if word.text not in ("]", "]]")]
    if not all(word.resolved for word in operands):
        return None
    texts = [word.text for word in operands]
    if texts[:1] == ["!"]:
        return negate(_decide(texts[1:], is_pattern=is_pattern))
    return _decide(texts, is_pattern=is_pattern)


def negate(answer: bool | None) -> bool | None:
    """Return the opposite of a three-valued answer."""
    return None if answer is None else not answer


def combine(operator: str, before: bool | None, after: bool | None) -> bool | None:
    """Return `before operator after` in three-valued logic; any operator but `&&` and `||` starts anew."""
    if operator == "&&":
        return False if False in (before, after) else None if None in (before, after) else True
    if operator == "||":
        return True if True in (before, after) else None if None in (before, after) else False
    return after


def _decide(texts: list[str], *, is_pattern: bool) -> bool | None:
    match texts:
        case [text]:
            return bool(text)
        case ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, "=" | "==", right]:
            return fnmatchcase(left, right) if is_pattern else left == right
        case [left, "!=", right]:
            return not fnmatchcase(left, right) if is_pattern else left != right
        case [left, operator, right] if operator in _NUMERIC:
            return _compare(operator, left, right)
    return None


def _compare(operator: str, left: str, right: str) -> bool | None:
    try:
        return _NUMERIC[operator](int(left), int(right))
    except ValueError:
        return None
