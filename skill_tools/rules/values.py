# SPDX-License-Identifier: Apache-2.0
"""The reading of a condition: the value that a key has in one configuration, set or by default.

A `Scope` returns the value of every name in `conditions` and caches it. A value is `UNKNOWN` when nobody set the key
and its default is not known: for this release, for this dialect, or because a recipe that is not among the inputs
usually sets it. A value that cannot be read statically is unknown. So is one outside its key's type, which has a
finding of its own.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeGuard

from skill_tools.configs.config import Config
from skill_tools.configs.keys import Key
from skill_tools.rules import versions as releases
from skill_tools.rules.operations import UNKNOWN

_IS_SET = re.compile(r"is_set\((.+)\)$")
RELEASE = re.compile(r"([a-z][a-z0-9-]*)([<>=!~].+)$")


_HASHABLE = (bool, int, float, str)
_MAYBE = "maybe"  # the answer of `said` to a key that unfollowed code may set
_OUTSIDE = "outside"  # and of one that the environment alone may set


@cache
def key_of(name: str) -> str:
    """Return the key behind a condition's name: `is_set(x)` is about x; a release is its package."""
    if name.isidentifier():
        return name
    asked = _IS_SET.match(name) or RELEASE.match(name)
    return asked[1] if asked else name


class Scope(dict[str, object]):
    """The names of one configuration; a missing one is worked out once, when it is first read.

    `as_written` takes the configuration at its word: an unset key has its default, although an unseen recipe or
    environment may set it.
    """

    def __init__(
        self,
        config: Config,
        keys: Mapping[str, Key],
        versions: Mapping[str, str],
        *,
        as_written: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.known_keys = keys
        self.versions = versions
        self._as_written = as_written
        self._maybe_set = config.maybe_set - config.outside if as_written else config.maybe_set
        self._unreadable = config.unresolved | {
            wrong.setting.key for wrong in config.wrong_types if not wrong.is_known
        }
        self._known_wrong = {wrong.setting.key for wrong in config.wrong_types if wrong.is_known}

    def said(self) -> dict[str, object]:
        """Return the input's statement of each key, where it has any; the same statements compare as equal."""
        said: dict[str, object] = dict.fromkeys(self.config.maybe_set, _MAYBE)
        said |= dict.fromkeys(self.config.outside, _OUTSIDE)
        for key, setting in self.config.settings.items():
            value = setting.value
            said[key] = (type(value), value if isinstance(value, _HASHABLE) else repr(value))  # true is not 1
        return said | dict.fromkeys(self._unreadable, UNKNOWN)

    def __missing__(self, name: str) -> object:
        self[name] = answer = self._answer(name)
        return answer

    def _answer(self, name: str) -> object:
        if name in self._unreadable or name in self._maybe_set:
            return UNKNOWN
        if name in self.config.settings:
            value = self.config.settings[name].value
            return bool(value) if name in self._known_wrong else value
        if name in self.known_keys:
            if self._left_to_recipe(name):
                return UNKNOWN
            return default(self.known_keys[name], self._decider(name), self.versions, self.config.framework)
        if asked := _IS_SET.match(name):
            return self._is_set(asked[1])
        if asked := RELEASE.match(name):
            found = releases.in_range(asked[1], asked[2], self.versions, self.config.framework)
            return UNKNOWN if found is releases.Standing.OPEN else found is releases.Standing.APPLIES
        return UNKNOWN

    def _is_set(self, key: str) -> object:
        if key in self.config.settings or key in self._unreadable:
            return True
        return UNKNOWN if key in self._maybe_set or self._left_to_recipe(key) else False

    def _decider(self, key: str) -> str:
        """Return the dialect with the default of an unset `key`: its owner, or shared code's."""
        owner = self.config.owner(key)
        if owner in self.known_keys[key].default:
            return owner
        return next((name for name in self.config.shares if name in self.known_keys[key].default), owner)

    def left_open(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the unset keys among `names` that a recipe or an environment may set."""
        return tuple(
            name for name in names if name not in self.config.settings and self._left_to_recipe(name)
        )

    def _left_to_recipe(self, key: str) -> bool:
        if self._as_written or key not in self.known_keys:
            return False
        known = self.known_keys[key]
        if key in self.config.outside:
            return True
        return (not self.config.complete and known.recipe_sets) or self.config.framework in known.outside


def unset(framework: str, embeds: tuple[str, ...], keys: Mapping[str, Key]) -> Scope:
    """Return the scope of a configuration without settings, with everything else unknown.

    Decisions in it stay in every configuration that does not set the keys asked for either.
    """
    return Scope(Config(framework, {}, complete=False, embeds=embeds), keys, {})


def default(key: Key, owner: str, versions: Mapping[str, str], framework: str = "") -> object:
    """Return the value that `key` of the dialect `owner` has when nobody sets it, or `UNKNOWN`.

    Where the default changed between releases and the user's release is not known, it is unknown; `framework` runs
    with some of them alone, perhaps.
    """
    if owner not in key.default:
        return UNKNOWN
    stated = key.default[owner]
    if not _is_history(stated):
        return stated
    for period in stated:
        standing, _ = releases.standing(period["versions"], versions, framework=framework)
        if standing is releases.Standing.APPLIES:
            return period["value"]
        if standing is releases.Standing.OPEN:
            return UNKNOWN
    return UNKNOWN


def _is_history(stated: object) -> TypeGuard[list[dict[str, Any]]]:
    """Tell `[{versions: .., value: ..}, ..]` from a default that is itself a list."""
    return (
        isinstance(stated, list) and bool(stated) and isinstance(stated[0], dict) and "versions" in stated[0]
    )
