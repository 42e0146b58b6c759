# SPDX-License-Identifier: Apache-2.0
"""Did you mean: the known names that look most like an unknown word.

One function for commands, rules, keys, settings, releases, models and GPUs: a slip is answered alike everywhere.
"""

import re
from collections.abc import Iterable

_FEWEST_CHARACTERS = 3  # of the beginning of a name's part: two say little
_MOST_CHARACTERS = 200  # of a word; comparing takes the product of both lengths


def nearest(word: str, known: Iterable[str], *, count: int = 3, likeness: float = 0.65) -> list[str]:
    """Return up to `count` of the `known` names that `word` may mean, the likeliest first; none if no one is like it.

    Case counts for nothing. `likeness` is the ratio of difflib's `SequenceMatcher`, 0 to 1, that a name has to reach.
    """
    from difflib import get_close_matches  # takes longer to import than a lint has for it

    by_lower: dict[str, str] = {}
    for name in sorted(known):
        by_lower.setdefault(name.lower(), name)
    found = get_close_matches(word.lower()[:_MOST_CHARACTERS], by_lower, n=count, cutoff=likeness)
    return [by_lower[each] for each in found]


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """Return the advice in place of `word`, in words: names with a part that begins so, else the likeliest ones.

    Where there is neither, `otherwise`.
    """
    known = list(known)
    return " or ".join(_beginning_with(word, known) or nearest(word, known)) or otherwise


def _beginning_with(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the `known` names with a part that begins with `word`, the shortest first."""
    if len(word) < _FEWEST_CHARACTERS:
        return []
    begun = re.compile(rf"(?:^|[-_.]){re.escape(word)}", re.IGNORECASE)
    return sorted(filter(begun.search, known), key=lambda name: (len(name), name))[:3]
