# SPDX-License-Identifier: Apache-2.0
"""Finds a text with holes in a log; the text between its pieces may differ, but has an end.

Apart because rules' texts and messages are found alike. A log has few of some eight hundred texts: a text with words
missing in the log is not looked for.
"""

import re
from functools import lru_cache

HOLE = "{..}"
REACH = 1200  # characters after the first piece in which the rest of a message has to follow
_WORD = re.compile(r"\w{6,}")
_NAME = re.compile(r"[A-Z]\w*")  # one word, such as the name of an exception
_TRIES = 10_000  # searched places of the first piece; a log with more repetitions is not more certain


def position(text: str, template: str) -> int:
    """Return where `template` first stands in `text`, or -1."""
    return span(text, template)[0]


def span(text: str, template: str, first: int = 0) -> tuple[int, int]:
    """Return the start and end of the first `template` in `text` from `first` on; (-1, -1) without one."""
    if not _inner_words(template) <= _words(text):
        return -1, -1
    pieces = [piece.strip() for piece in template.split(HOLE) if piece.strip()]
    start = text.find(pieces[0], first) if pieces else -1
    if start < 0 or any(text.find(piece, start) < 0 for piece in pieces[1:]):
        return -1, -1  # else each place of a first piece that is everywhere would be looked at
    is_word = _NAME.fullmatch(template) is not None
    for _ in range(_TRIES):
        if start < 0:
            return -1, -1
        if is_word and not _stands_alone(text, start, template):
            start = text.find(template, start + 1)
            continue
        end = start
        for piece in pieces:
            end = text.find(piece, end, start + REACH + len(template))
            if end < 0:
                break
            end += len(piece)
        else:
            return start, end
        start = text.find(pieces[0], start + 1)
    return -1, -1


def _stands_alone(text: str, start: int, word: str) -> bool:
    """Return whether no letter stands beside `word`: OutOfMemoryError is no MemoryError."""
    end = start + len(word)
    return not any(map(str.isalnum, text[max(0, start - 1) : start] + text[end : end + 1]))


@lru_cache(maxsize=4)
def _words(text: str) -> frozenset[str]:
    """Return the longer words of a text."""
    return frozenset(_WORD.findall(text))


@lru_cache(maxsize=4096)
def _inner_words(template: str) -> frozenset[str]:
    """Return the longer words that any text with `template` has; at a piece's ends a longer word may stand."""
    return frozenset(
        match.group()
        for piece in template.split(HOLE)
        for match in _WORD.finditer(piece.strip())
        if match.start() > 0 and match.end() < len(piece.strip())
    )


def place_at(name: str, text: str, at: int) -> str:
    """Return the place of a position in the text of a file, as file and line."""
    return f"{name}:{text.count(chr(10), 0, at) + 1}"
