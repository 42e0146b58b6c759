# SPDX-License-Identifier: Apache-2.0
"""The result of a dialect's reader: one value per key, and the place that gave it.

A `Config` is the user's configuration after composition: several inputs (recipe, files, overrides) merged in the
framework's own precedence. Each `Setting` knows file, line and column: a finding points at the winning line. It knows
no rule and no default: a key that no input sets is absent.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.started import COMMAND


class Place(NamedTuple):
    """Where a value stands: `file` as the user named it (or `<overrides>`), `line` and `column` from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Setting(NamedTuple):
    """One value of one key.

    `key` is the canonical name of `knowledge/keys.yaml` (`cpu_offloading`, `env.NVTE_CPU_OFFLOAD_V1`),
    `written` the spelling in the input (`model.cpu_offloading`, `--num-layers`). `value` is plain data: None,
    bool, int, float, str, list or dict.
    """

    key: str
    value: object
    written: str
    place: Place


class UnknownKey(NamedTuple):
    """A key unknown to the framework, with the nearest known ones; `key` is a draft's spelling."""

    written: str
    place: Place
    nearest: tuple[str, ...]
    key: str = ""


class WrongType(NamedTuple):
    """A value outside its key's type; `expected` names one that fits; `is_known`: its meaning is plain all the same."""

    setting: Setting
    expected: str
    is_known: bool = False


class Fault(NamedTuple):
    """A reader's finding on the form of an input: the id of its rule, and the case.

    `versions` are the affected releases, a distribution and a range each, for an input that states none.
    """

    rule: str
    text: str
    place: Place
    versions: tuple[tuple[str, str], ...] = ()


class Config(NamedTuple):
    """One configuration after composition.

    `framework` is the name of its dialect, as `--framework` takes it. `complete`: an unset key has the
    framework's default (a launch script, an Axolotl YAML, a saved run config). An override file is not
    complete, since an unseen recipe fills the rest. `versions` maps distribution names (`megatron-core`,
    `torch`) to the release that the input states, or of a plan the user. `sources` keeps each file's text for fixes and
    suppressions. `model_name` is the recipe, base model or architecture named by the input, if any.
    `unresolved` holds keys set to a value that cannot be read statically (a shell variable, a computed value, a
    missing file), `unread_places` the places of such values: they are unknown, whatever their default. `maybe_set`
    holds keys that unfollowed code may set (another module's function called with the configuration, a missing
    sourced file): it is unknown whether they are set, and their value. `outside` holds those of them that only the
    environment of the process may set: without it they have their default. `missing_files` holds the settings that
    name a missing file, `unread_files` a script's words for present but unread configurations. `embeds` names the
    dialects with a section of their own here: a canonical key in such a section begins with the dialect's name.
    `faults` are those of an input's form, such as a repeated key. `shares` maps a dialect to the paths of its
    program that this framework runs: the dialect's rules apply here, and its defaults if the framework has none.
    """

    framework: str
    settings: Mapping[str, Setting]
    complete: bool
    overridden: tuple[Setting, ...] = ()
    unknown: tuple[UnknownKey, ...] = ()
    wrong_types: tuple[WrongType, ...] = ()
    versions: Mapping[str, str] = MappingProxyType({})
    sources: Mapping[str, str] = MappingProxyType({})
    model_name: str | None = None
    unresolved: frozenset[str] = frozenset()
    missing_files: tuple[Setting, ...] = ()
    maybe_set: frozenset[str] = frozenset()
    embeds: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    shares: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    outside: frozenset[str] = frozenset()
    unread_files: tuple[Setting, ...] = ()
    unread_places: Mapping[str, Place] = MappingProxyType({})

    def owner(self, key: str) -> str:
        """Return the dialect that defines the canonical `key`: an embedded one, or the configuration's own."""
        section, dot, _ = key.partition(".")
        return section if dot and section in self.embeds else self.framework

    def dialects(self) -> frozenset[str]:
        """Return the configuration's own dialect, and the embedded ones with a setting."""
        if not self.embeds:
            return frozenset((self.framework,))
        return frozenset((self.framework, *map(self.owner, self.settings)))

    def value(self, key: str, default: object = None) -> object:
        """Return the value that was set for the canonical `key`, or `default` when nobody set it."""
        setting = self.settings.get(key)
        return default if setting is None else setting.value

    def missing_file_notes(self) -> tuple[str, ...]:
        """Return one line for each named file that is missing."""
        return tuple(
            f"{setting.place.file}:{setting.place.line} {setting.written}={setting.value}: no such file beside it or "
            "in the working folder, so its settings are unknown"
            for setting in self.missing_files
        )

    def unread_file_notes(self) -> tuple[str, ...]:
        """Return one line for each file that is named and is another configuration, to be linted too."""
        return tuple(
            f"{setting.place.file}:{setting.place.line} {setting.written}: a configuration of {setting.key} that is "
            f"not read with this one; {COMMAND} lint {setting.value}"
            for setting in self.unread_files
        )
