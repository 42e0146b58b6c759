# SPDX-License-Identifier: Apache-2.0
"""All names that a framework accepts: they detect a misspelt key and offer the right one.

Some frameworks drop a key that they do not know without an error, others refuse it. The names come from the file in
`knowledge/vocabulary/` that is called like the framework (through the compiled index) and from the key table. A name
that ends in `.*` is a free-form section: anything below it is accepted.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.keys import KeyTable, load_key_table
from skill_tools.configs.releases import is_before
from skill_tools.nearest import nearest

_NEAREST = 3


class Vocabulary(NamedTuple):
    """The names of one framework."""

    names: frozenset[str]
    free_sections: frozenset[str]

    def accepts(self, written: str) -> bool:
        """Return whether the framework knows `written`, or it lies in a free-form section."""
        if written in self.names:
            return True
        cut = written.rfind(".")
        while cut > 0:
            if written[:cut] in self.free_sections:
                return True
            cut = written.rfind(".", 0, cut)
        return False

    def nearest(self, written: str) -> tuple[str, ...]:
        """Return up to three known names that `written` may have meant, the likeliest first.

        The same field in another section comes first, then names that look alike.
        """
        field = written.rpartition(".")[2]
        moved = sorted(name for name in self.names if name.rpartition(".")[2] == field)
        alike = _alike(self.names, written) if len(moved) < _NEAREST else ()
        return tuple(dict.fromkeys([*moved, *alike]))[:_NEAREST]


def lacking(framework: str, name: str, release: str) -> str | None:
    """Return the message if `release` is before or after those with `name`; None if it has it or nobody knows."""
    since, before = _releases(framework).get(name, (None, None))
    if since is not None and is_before(release, since):
        return f"{framework} {release} has no {name}, which came in {since}"
    if before is not None and not is_before(release, before):
        return f"{framework} {release} has no {name}, which went in {before}"
    return None


def gone_since(framework: str, name: str) -> str | None:
    """Return the first release without `name`; None if the newest known one has it, or none ever did."""
    return _releases(framework).get(name, (None, None))[1]


@knowledge.derived
def _releases(framework: str) -> dict[str, tuple[str | None, str | None]]:
    """Return the first release with a name, and the first one without it again, where known."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for line in knowledge.names(f"{framework.replace('-', '_')}_releases"):
        kind, release, name = line.split(" ", 2)
        since, before = found.get(name, (None, None))
        found[name] = (release, before) if kind == "since" else (since, release)
    return found


@lru_cache(maxsize=4096)
def _alike(names: frozenset[str], written: str) -> list[str]:
    """Return the names that look most like `written`; kept, because a long vocabulary takes 30 ms."""
    return nearest(written, names, count=_NEAREST, likeness=0.7)


@knowledge.derived
def load_vocabulary(framework: str) -> Vocabulary:
    """Return the vocabulary of `framework` from the compiled index."""
    return vocabulary(knowledge.names(framework.replace("-", "_")), load_key_table(), framework)


def vocabulary(names: Iterable[str], keys: KeyTable, framework: str) -> Vocabulary:
    """Join `names` with every spelling for `framework` in the key table.

    A flag also has its negative.
    """
    every = {*names, *keys.by_spelling.get(framework, ())}
    flags = {key.name for name, key in keys.by_spelling.get(framework, {}).items() if name.startswith("--")}
    every |= {flag for flag, key in keys.by_negative.items() if key.name in flags}
    free = {name.removesuffix(".*") for name in every if name.endswith(".*")}
    return Vocabulary(frozenset(every - {f"{name}.*" for name in free} | free), frozenset(free))
