"""All names that a framework accepts, so that a misspelt key is seen and the right one offered.

Bridge and Axolotl drop a key that they do not know without an error; Megatron-LM refuses it. The names come from
`knowledge/vocabulary/*.txt` (through the compiled index) and from the key table. A name that ends in `.*` is a
free-form section: anything below it is accepted.
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Framework
from skill_tools.configs.keys import KeyTable, load_key_table

_FILE = {
    Framework.BRIDGE: "megatron_bridge",
    Framework.MEGATRON_LM: "megatron_lm",
    Framework.AXOLOTL: "axolotl",
}
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
        from difflib import get_close_matches

        field = written.rpartition(".")[2]
        moved = sorted(name for name in self.names if name.rpartition(".")[2] == field)
        alike = get_close_matches(written, sorted(self.names), n=_NEAREST, cutoff=0.7)
        return tuple(dict.fromkeys([*moved, *alike]))[:_NEAREST]


@cache
def load_vocabulary(framework: Framework) -> Vocabulary:
    """Return the vocabulary of `framework` from the compiled index."""
    return vocabulary(knowledge.index()["vocabulary"][_FILE[framework]], load_key_table(), framework)


def vocabulary(names: Iterable[str], keys: KeyTable, framework: Framework) -> Vocabulary:
    """Join `names` with every spelling that the key table has for `framework`."""
    every = {*names, *keys.by_spelling[framework]}
    if framework is Framework.MEGATRON_LM:
        every |= keys.by_negative.keys()
    free = {name.removesuffix(".*") for name in every if name.endswith(".*")}
    return Vocabulary(frozenset(every - {f"{name}.*" for name in free} | free), frozenset(free))
