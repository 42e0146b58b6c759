# SPDX-License-Identifier: Apache-2.0
"""The key table: which spellings name a key, its type, and its default.

The facts are in `knowledge/keys.yaml` and `knowledge/keys/`; commands load them from the compiled index. This module
knows no rule. The framework may accept further spellings; `vocabulary` knows them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from skill_tools import knowledge

_EMPTY: Mapping[Any, Any] = MappingProxyType({})
# In a spelling of the index, its key's own name, and that name with dashes; no spelling and no name has these signs.
OWN, DASHED = "*", "%"


class Key(NamedTuple):
    """One key of `keys.yaml`; the fields are described in docs/design.md.

    `default` maps a framework to a value, or to a list of `{versions, value}` where it changed. `negatives` are
    flags that set the key to false. Inputs of the frameworks in `outside` never show the key: it is set elsewhere.
    `implies` maps a value of the key to the fields that it stands for. `planned` names a plan's mechanism that the key
    carries out.
    """

    name: str
    mechanism: str
    types: Mapping[str, str]
    unit: str | None = None
    choices: tuple[object, ...] = ()
    spelling: Mapping[str, str] = _EMPTY
    aliases: Mapping[str, tuple[str, ...]] = _EMPTY
    negatives: tuple[str, ...] = ()
    default: Mapping[str, object] = _EMPTY
    recipe_sets: bool = False
    outside: tuple[str, ...] = ()
    exists: Mapping[str, str] = _EMPTY
    implies: Mapping[str, Mapping[str, object]] = _EMPTY
    note: str = ""
    planned: str = ""

    def type_in(self, framework: str) -> str:
        """Return the key's type in one dialect: bool, int, float, str, dtype, list, dict or any."""
        return self.types.get(framework) or self.types["default"]


class KeyTable(NamedTuple):
    """All keys by canonical name, and by each spelling of each dialect."""

    by_name: Mapping[str, Key]
    by_spelling: Mapping[str, Mapping[str, Key]]
    by_negative: Mapping[str, Key]

    def find(self, framework: str, written: str) -> Key | None:
        """Return the key that `written` spells in this dialect (`model.num_layers`, `--num-layers`)."""
        return self.by_spelling.get(framework, _EMPTY).get(written)


def load_keys() -> Mapping[str, Key]:
    """Return every key of the compiled index by its canonical name."""
    return load_key_table().by_name


@knowledge.derived
def load_key_table() -> KeyTable:
    """Return the keys of the compiled index, by name and by spelling."""
    return key_table(keys_from_data(knowledge.index()["keys"]))


def load_keys_yaml() -> tuple[Key, ...]:
    """Return the keys of the files themselves, for tests, which must see an edit at once."""
    return keys_from_data(knowledge.load_keys())


def keys_from_data(entries: Iterable[Mapping[str, Any]]) -> tuple[Key, ...]:
    """Build keys from entries of the form of `keys.yaml`."""
    return tuple(_key(entry) for entry in entries)


def key_table(keys: Iterable[Key]) -> KeyTable:
    """Index `keys` by name and by spelling."""
    by_name = {key.name: key for key in keys}
    by_spelling: dict[str, dict[str, Key]] = defaultdict(dict)
    for key in by_name.values():
        for framework, spelling in key.spelling.items():
            by_spelling[framework][spelling] = key
        for framework, aliases in key.aliases.items():
            by_spelling[framework].update(dict.fromkeys(aliases, key))
    by_negative = {flag: key for key in by_name.values() for flag in key.negatives}
    return KeyTable(by_name, by_spelling, by_negative)


def own_name(key: str) -> str:
    """Return the name of a key without its framework: `training.mode` of `torchtitan.training.mode`."""
    return key.partition(".")[2] or key


def _spelt(spellings: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the spellings of a key by framework, with its name for the signs."""
    own, spelt = own_name(key), {}
    for framework, spelling in spellings.items():
        if OWN in spelling:
            spelling = spelling.replace(OWN, own)
        elif DASHED in spelling:
            spelling = spelling.replace(DASHED, own.replace("_", "-"))
        spelt[framework] = spelling
    return spelt


def _key(entry: Mapping[str, Any]) -> Key:
    get, types = entry.get, entry["type"]
    aliases = get("aliases", _EMPTY)
    negatives = aliases.get("negative", ())
    if aliases:
        aliases = {name: tuple(names) for name, names in aliases.items() if name != "negative"}
    return Key(
        entry["key"],
        entry["mechanism"],
        types if isinstance(types, dict) else {"default": types},
        get("unit"),
        tuple(get("choices", ())),
        _spelt(entry["spelling"], entry["key"]) if "spelling" in entry else _EMPTY,
        aliases,
        tuple(negatives),
        get("default", _EMPTY),
        get("recipe_sets", False),
        tuple(get("outside", ())),
        get("exists", _EMPTY),
        get("implies", _EMPTY),
        get("note", ""),
        get("planned", ""),
    )
