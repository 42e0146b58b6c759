# SPDX-License-Identifier: Apache-2.0
"""The result of a dialect's reader: one value per key, and the place that gave it.

A `Config` is the user's configuration after composition: several inputs (recipe, files, overrides) merged in the
framework's own precedence. Each `Setting` knows file, line and column, so that a finding can point at the line that
won. It knows no rule and no default: a key that no input sets is absent.
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
    """A key that the framework does not know, with the nearest ones that it does; `key` is a draft's spelling."""

    written: str
    place: Place
    nearest: tuple[str, ...]
    key: str = ""


class WrongType(NamedTuple):
    """A value that the key's type cannot hold; `expected` names one that fits, `is_known` that its meaning is plain."""

    setting: Setting
    expected: str
    is_known: bool = False


class Fault(NamedTuple):
    """A reader's finding on the form of an input: the id of the rule that is about it, and the case.

    `versions` are the releases that it is about, a distribution and a range each, where nothing states which one runs.
    """

    rule: str
    text: str
    place: Place
    versions: tuple[tuple[str, str], ...] = ()


class Config(NamedTuple):
    """One configuration after composition.

    `framework` is the name of its dialect, as `--framework` takes it. `complete` says that a key that is not set here
    has the framework's default (a launch script, an Axolotl YAML, a saved run config); an override file is not, since a
    recipe that we do not see fills the rest. `versions` maps distribution names (`megatron-core`, `torch`) to the
    release that the input itself states. `sources` keeps each file's text for fixes and suppressions. `model_name` is
    the recipe, base model or architecture named by the input, if any. `unresolved` holds the keys that the input does
    set, to something that cannot be read statically (a shell variable, a computed value, a file that is not here): they
    are unknown, whatever their default. `maybe_set` holds those that nobody sets here but that something may set which
    is not followed (a function of another module that is given the configuration, a sourced file that is not here):
    their value is unknown, and so is whether they are set. `outside` holds those of them that only the environment of
    the process may set, so that they have their default unless it does. `missing_files` holds the settings that name
    such a file, `unread_files` the words of a script that name a configuration which is here and is not read. `embeds`
    names the dialects of which it may hold a section; whatever is in such a section has a canonical key that begins
    with the dialect's name. `faults` are those of an input's form, such as a key that stands there twice. `shares` maps
    a dialect whose program this framework runs a part of to the paths of that part: the rules about it apply here, and
    its keys have that dialect's defaults where the framework has none.
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

    def owner(self, key: str) -> str:
        """Return the dialect that defines the canonical `key`: an embedded one, or the configuration's own."""
        section, dot, _ = key.partition(".")
        return section if dot and section in self.embeds else self.framework

    def dialects(self) -> frozenset[str]:
        """Return the configuration's own dialect, and the embedded ones of which it sets anything."""
        if not self.embeds:
            return frozenset((self.framework,))
        return frozenset((self.framework, *map(self.owner, self.settings)))

    def value(self, key: str, default: object = None) -> object:
        """Return the value that was set for the canonical `key`, or `default` when nobody set it."""
        setting = self.settings.get(key)
        return default if setting is None else setting.value

    def missing_file_notes(self) -> tuple[str, ...]:
        """Return one line for each file that is named and is not here."""
        return tuple(
            f"{setting.place.file}:{setting.place.line} {setting.written}={setting.value}: no such file beside it or "
            "in the working folder, so what it sets is unknown"
            for setting in self.missing_files
        )

    def unread_file_notes(self) -> tuple[str, ...]:
        """Return one line for each file that is named and is another configuration, to be linted too."""
        return tuple(
            f"{setting.place.file}:{setting.place.line} {setting.written}: a configuration of {setting.key} that is "
            f"not read with this one; {COMMAND} lint {setting.value}"
            for setting in self.unread_files
        )
