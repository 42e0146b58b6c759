# SPDX-License-Identifier: Apache-2.0
"""One key in a few lines: its name in each framework, its type, default and releases, and the rules about it."""

from collections.abc import Mapping, Sequence

from skill_tools.configs.keys import Key
from skill_tools.dialects import registry
from skill_tools.rules.knowledge import Rule

_MOST_RULES = 20


def keys_named(word: str, keys: Mapping[str, Key]) -> list[Key]:
    """Return the keys that `word` names: by canonical name, by a spelling of some framework, or by the end of one."""
    if word in keys:
        return [keys[word]]
    spelled = [key for key in keys.values() if {word, f"--{word}"} & _spellings(key)]
    end = f".{word.lstrip('-.')}"
    return spelled or [key for key in keys.values() if any(each.endswith(end) for each in _spellings(key))]


def names_of(keys: Mapping[str, Key]) -> set[str]:
    """Return every name that a key has anywhere, and the field at its end."""
    names = {name for key in keys.values() for name in (key.name, *_spellings(key))}
    return names | {name.rpartition(".")[2] for name in names}


def key_lines(key: Key, rules: Sequence[Rule]) -> str:
    """Return the facts of `key`, in the order in which it is asked for."""
    data = key_data(key, rules)
    kinds = sorted(set(key.types.values()))
    unit = f", in {key.unit}" if key.unit else ""
    lines = [f"{key.name}: {' or '.join(kinds)}{unit}"]
    for framework, spelling in key.spelling.items():
        also = key.aliases.get(framework, ())
        aliases = f" (also {', '.join(also)})" if also else ""
        default = f"; default {_default(key.default[framework])}" if framework in key.default else ""
        lines.append(f"  {registry.named(framework).label}: {spelling}{aliases}{default}")
    if key.choices:
        lines.append(f"  one of: {', '.join(map(str, key.choices))}")
    if key.exists:
        lines.append(f"  releases: {', '.join(f'{name} {range_}' for name, range_ in key.exists.items())}")
    if key.note:
        lines.append(f"  note: {key.note}")
    about = data["rules"]
    if isinstance(about, list) and about:
        more = f" and {len(about) - _MOST_RULES} more" if len(about) > _MOST_RULES else ""
        lines.append(f"  rules: {', '.join(about[:_MOST_RULES])}{more}")
    return "\n".join(lines) + "\n"


def key_data(key: Key, rules: Sequence[Rule]) -> dict[str, object]:
    """Return the same as plain data, with all rules."""
    return {
        "key": key.name,
        "type": dict(key.types),
        "unit": key.unit,
        "choices": list(key.choices),
        "spelling": dict(key.spelling),
        "aliases": {name: list(each) for name, each in key.aliases.items()},
        "default": dict(key.default),
        "exists": dict(key.exists),
        "note": key.note,
        "rules": [rule.id for rule in rules if key.name in rule.keys],
    }


def _spellings(key: Key) -> set[str]:
    aliases = (alias for each in key.aliases.values() for alias in each)
    return {*key.spelling.values(), *aliases, *key.negatives}


def _default(default: object) -> str:
    """Return a default in words, with its releases where it changed."""
    if not isinstance(default, list) or not all(
        isinstance(each, dict) and "value" in each for each in default
    ):
        return _written(default)
    parts = []
    for each in default:
        ranges = ", ".join(f"{name} {range_}" for name, range_ in each.get("versions", {}).items())
        parts.append(f"{_written(each['value'])} ({ranges})" if ranges else _written(each["value"]))
    return ", ".join(parts)


def _written(value: object) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
