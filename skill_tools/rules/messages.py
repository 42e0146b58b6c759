# SPDX-License-Identifier: Apache-2.0
"""Builds a finding's message from a rule's text and the user's own values.

A message names every key that decided the rule, in the user's spelling, with value and line: it is understood without
opening the configuration.
"""

import json
from collections.abc import Iterable, Mapping

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.rules.finding import Finding, Fix
from skill_tools.rules.knowledge import Rule
from skill_tools.rules.operations import UNKNOWN
from skill_tools.rules.values import Scope, key_of

_LONGEST_VALUE = 60
_AS_JSON = json.JSONEncoder(ensure_ascii=False, default=str)
CHANGED = Place("<change>", 1, 1)  # the place of a setting that a remedy adds


def from_rule(
    rule: Rule, *, message: str, place: Place, observed: Mapping[str, object] | None = None
) -> Finding:
    """Return the finding that says `message` about `place`, with all else as the rule has it."""
    fix = Fix(rule.fix.applicability, rule.fix.description, rule.fix.options)
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        title=rule.title,
        message=message,
        place=place,
        observed=observed or {},
        why=rule.why,
        evidence=rule.evidence,
        next=rule.next,
        fix=fix,
        docs=rule.docs,
        effect=rule.effect,
        text=rule.text,
    )


def observed_keys(names: Iterable[str]) -> tuple[str, ...]:
    """Return the keys behind a condition's names, each once, in order."""
    return tuple(dict.fromkeys(key_of(name) for name in names))


def place_of(keys: Iterable[str], config: Config) -> Place:
    """Return the place to point to: the first of `keys` set by the user, else the start of the first input."""
    for key in keys:
        if key in config.settings:
            return config.settings[key].place
        if key in config.unresolved and key in config.unread_places:
            return config.unread_places[key]
    return Place(next(iter(config.sources), "<input>"), 1, 1)


def worded(text: str, keys: Iterable[str], scope: Scope, place: Place) -> tuple[str, str]:
    """Return `text: model.cpu_offloading=true (line 3), num_layers=0 (default)` for `keys`.

    The second value leaves out the setting at `place`, for a display with that line.
    """
    values = dict.fromkeys(_described(key, scope, place) for key in keys)
    beside = ", ".join(value for value, is_there in values if not is_there)
    return f"{text}: {', '.join(value for value, _ in values)}", f"{text}: {beside}" if beside else text


def _described(key: str, scope: Scope, place: Place) -> tuple[str, bool]:
    """Return the value of `key` in words, and whether it is set at `place`."""
    setting = _as_written(key, scope.config)
    if setting is not None:
        said = f"{setting.written}={show(setting.value)} ({_where(setting, place)})"
        return said, setting.place == place
    if key in scope.versions:
        return f"{key} {scope.versions[key]}", False
    if scope[key] is UNKNOWN:
        return f"{key} ({'not readable' if key in scope.config.unresolved else 'not set'})", False
    return f"{key}={show(scope[key])} (default)", False


def _as_written(key: str, config: Config) -> Setting | None:
    """Return the setting of `key`, or the one before it that it follows from: that one's spelling and place it has."""
    setting = config.settings.get(key)
    if setting is None:
        return None
    origin = (setting.written, setting.place)
    return next(each for each in config.settings.values() if (each.written, each.place) == origin)


def _where(setting: Setting, place: Place) -> str:
    if setting.place == CHANGED:
        return "after the change"
    same_file = setting.place.file == place.file
    return f"line {setting.place.line}" if same_file else f"{setting.place.file} line {setting.place.line}"


def show(value: object) -> str:
    """Write a value on one line, as YAML and JSON do, cut to a readable length."""
    text = value if isinstance(value, str) else _AS_JSON.encode(value)
    text = " ".join(text.split()) or '""'
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
