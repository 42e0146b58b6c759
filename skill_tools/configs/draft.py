# SPDX-License-Identifier: Apache-2.0
"""A configuration in the making: readers write values into it in the framework's precedence, the last wins.

It turns spellings into canonical keys, brings values to their types, and keeps overridden values, unknown keys and
values that cannot be read. It knows no file format.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from skill_tools.configs.config import Config, Fault, Place, Setting, UnknownKey, WrongType
from skill_tools.configs.keys import Key, load_key_table
from skill_tools.configs.releases import stated_in
from skill_tools.configs.source import Source
from skill_tools.configs.values import UNREADABLE, is_template, typed, written
from skill_tools.configs.vocabulary import load_vocabulary

MAX_SUGGESTIONS = 20


class Draft:
    """Collects the values of one configuration of `framework`; `converts_text` as in `values.typed`.

    `embeds` names the dialects with sections in it. Whatever the user calls that section, its keys are
    spelled here as canonical ones are: the dialect's name, a dot, and its own spelling.
    `complete`, `model_name`, `versions`, `sources`, `missing_files`, `faults` and `shares` are the reader's to set;
    see `Config`. So are `checks_each`: the framework refuses a value that does not fit although a later
    one replaces it, as argparse does; and `as_written`: beginnings of canonical keys whose values it takes as they are.
    """

    def __init__(self, framework: str, *, embeds: tuple[str, ...] = (), converts_text: bool = True) -> None:
        self.framework = framework
        self.embeds = embeds
        self.complete = self.checks_each = False
        self.as_written: tuple[str, ...] = ()
        self.model_name: str | None = None
        self.versions: dict[str, str] = {}
        self.sources: dict[str, str] = {}
        self.missing_files: list[Setting] = []
        self.faults: list[Fault] = []
        self.table = load_key_table()
        self._converts_text = converts_text
        self.shares: Mapping[str, tuple[str, ...]] = {}
        self._settings: dict[str, Setting] = {}
        self._overridden: list[Setting] = []
        self._unknown: dict[tuple[str, Place], UnknownKey] = {}
        self._wrong: dict[str, str] = {}
        self._wrong_before: list[WrongType] = []
        self._known_wrong: set[str] = set()
        self._unresolved: dict[str, Place | None] = {}
        self._maybe_set: set[str] = set()
        self._outside: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._settings

    def take(self, source: Source) -> None:
        """Keep an input's text, and the releases stated in it."""
        self.sources[source.name] = source.text
        self.versions.update({name: each.version for name, each in stated_in(source.text).items()})

    def get(self, key: str) -> Setting | None:
        """Return the setting that holds so far for the canonical `key`."""
        return self._settings.get(key)

    def is_open(self, key: str) -> bool:
        """Return whether the input sets the canonical `key` to something that cannot be read."""
        return key in self._unresolved

    def leave_open(self, key: str, place: Place | None = None) -> None:
        """Note that the input may set the canonical `key`, to an unreadable value, at `place` if at a single one."""
        self._drop(key)
        self._unresolved[key] = place

    def may_be_set(self, prefix: str = "") -> None:
        """Note that unfollowed code may set the keys spelled with `prefix`."""
        spellings = self.table.by_spelling.get(self.framework, {})
        self._maybe_set |= {key.name for written, key in spellings.items() if written.startswith(prefix)}

    def environment_may_be_set(self) -> None:
        """Note that unfollowed code may set any environment variable."""
        self._maybe_set |= {name for name in self.table.by_name if name.startswith("env.")}

    def keys_may_be_set(self, names: Iterable[str]) -> None:
        """Note that unfollowed code may set the canonical keys `names`."""
        self._maybe_set.update(names)

    def launcher_may_set(self, names: Iterable[str]) -> None:
        """Note that the environment may set the canonical keys `names`; without it they have their default."""
        self._maybe_set.update(names)
        self._outside.update(names)

    def section_may_be_set(self, dialect: str) -> None:
        """Note that an embedded dialect's section is unknown, its set of keys included."""
        for setting in self.below(f"{dialect}."):
            self._drop(setting.key)
        self._maybe_set |= {key.name for key in self.table.by_spelling.get(dialect, {}).values()}

    def below(self, prefix: str) -> list[Setting]:
        """Return the settings whose canonical key begins with `prefix`."""
        return [setting for key, setting in self._settings.items() if key.startswith(prefix)]

    def names_below(self, prefix: str) -> list[str]:
        """Return the canonical keys that begin with `prefix` and are set, to whatever."""
        return [name for name in (*self._settings, *self._unresolved) if name.startswith(prefix)]

    def accepts(self, written: str) -> bool:
        """Return whether the framework knows this spelling."""
        dialect, own = self._owner(written)
        return self.table.find(dialect, own) is not None or load_vocabulary(dialect).accepts(own)

    def key(self, written: str) -> Key | None:
        """Return the key of the table that is spelled `written`."""
        return self.table.find(*self._owner(written))

    def canonical(self, written: str) -> str:
        """Return the canonical key of a spelling; one that the key table lacks stands for itself."""
        key = self.key(written)
        return (
            key.name if key else written.lstrip("-").replace("-", "_") if written.startswith("-") else written
        )

    def set(self, written: str, value: object, place: Place) -> None:
        """Give the key that is spelled `written` a value, above whatever it had."""
        self.set_key(self.canonical(written), value, written, place)

    def set_key(self, name: str, value: object, written: str, place: Place) -> None:
        """Give the canonical key `name` a value, or leave it open when that is `UNREADABLE`."""
        if value is UNREADABLE:
            self.leave_open(name, place)
            return
        key = self.table.by_name.get(name)
        expected = None
        if key is not None:
            if not name.startswith(self.as_written):
                dialect, _ = self._owner(name)
                value, expected = typed(key, value, dialect, converts_text=self._converts_text)
            if isinstance(value, str) and is_template(value):
                self.leave_open(name, place)
                return
        self._store(Setting(name, value, written, place), expected)

    def set_environment(self, variable: str, value: object, place: Place) -> None:
        """Give an environment variable a value, as text: that is all a process gets."""
        text = value if value is None or value is UNREADABLE else str(value)
        self.set_key(f"env.{variable}", text, variable, place)

    def remove(self, written: str) -> None:
        """Take back the values of this key and of all fields of it as a section (Hydra's `~`)."""
        name = self.canonical(written)
        for key, setting in list(self._settings.items()):
            if key == name or f"{setting.written}.".startswith(f"{written}."):
                self._drop(key)

    def remove_section(self, written: str) -> None:
        """Take back an earlier file's settings at and below this key: a plain value replaces the section."""
        self.remove(written)
        below = f"{written}."
        self._unknown = {
            key: each for key, each in self._unknown.items() if not each.written.startswith(below)
        }

    def is_leaf(self, spelling: str) -> bool:
        """Return whether the key's type leaves no room for fields below it."""
        key = self.key(spelling)
        return key is not None and key.type_in(self._owner(spelling)[0]) not in ("any", "dict")

    def refuse_type(self, key: str, expected: str, *, is_known: bool = False) -> None:
        """Note that the form of `key` does not allow its value; `expected` names an allowed one.

        `is_known`: the meaning is plain all the same, so rules may read it.
        """
        self._wrong[key] = expected
        if is_known:
            self._known_wrong.add(key)

    def refused(self, key: str) -> str | None:
        """Return an allowed value of the canonical `key` if its own is not, else None."""
        return self._wrong.get(key)

    def take_by_truth(self) -> None:
        """Note that the framework checks no type: a switch is read by Python's truth, and text stays as it is."""
        for name in self._wrong:
            key = self.table.by_name.get(name)
            kind = key.type_in(self._owner(name)[0]) if key is not None else ""
            if kind == "bool":
                value = self._settings[name].value
                self.refuse_type(
                    name, f"true or false; to Python it is {written(bool(value))}", is_known=True
                )
            elif kind == "str":
                self.refuse_type(name, self._wrong[name], is_known=True)

    def judge(self, prefix: str, fits: Callable[[Setting, str | None], str | None]) -> None:
        """Let `fits` have the last word on the value of each key that begins with `prefix`.

        It gets the setting and the expectation of its type, None where the value fits, and answers likewise.
        """
        for setting in self.below(prefix):
            expected = fits(setting, self._wrong.pop(setting.key, None))
            if expected is not None:
                self._wrong[setting.key] = expected

    def note_unknown(
        self,
        written: str,
        place: Place,
        *,
        spelling: str | None = None,
        nearest: tuple[str, ...] | None = None,
    ) -> None:
        """Note a key unknown to the framework; only the first few get suggestions, which are slow.

        `spelling` is the framework's name for it, where the user has a shorter or longer one for it. `nearest`
        are the suggestions, where the caller knows better than the vocabulary.
        """
        dialect, own = self._owner(written if spelling is None else spelling)
        if nearest is None:
            few = len(self._unknown) < MAX_SUGGESTIONS
            nearest = load_vocabulary(dialect).nearest(own.lstrip("+~")) if few else ()
        key = written if spelling is None else spelling
        self._unknown.setdefault((written, place), UnknownKey(written, place, nearest, key))

    def shadow(self, written: str, value: object, place: Place) -> None:
        """Note a value that lost before it counted, such as the first of a duplicate key."""
        self._overridden.append(Setting(self.canonical(written), value, written, place))

    def finish(self) -> Config:
        """Return the configuration."""
        return Config(
            framework=self.framework,
            settings=MappingProxyType(self._settings),
            complete=self.complete,
            overridden=tuple(self._overridden),
            unknown=tuple(self._unknown.values()),
            wrong_types=(
                *self._wrong_before,
                *(
                    WrongType(self._settings[key], text, key in self._known_wrong)
                    for key, text in self._wrong.items()
                ),
            ),
            versions=MappingProxyType(self.versions),
            sources=MappingProxyType(self.sources),
            model_name=self.model_name,
            unresolved=frozenset(self._unresolved),
            unread_places=MappingProxyType({key: at for key, at in self._unresolved.items() if at}),
            missing_files=tuple(self.missing_files),
            maybe_set=frozenset(self._maybe_set - self._settings.keys() - self._unresolved.keys()),
            embeds=self.embeds,
            faults=tuple(self.faults),
            shares=MappingProxyType(dict(self.shares)),
            outside=frozenset(self._outside - self._settings.keys() - self._unresolved.keys()),
        )

    def _owner(self, spelling: str) -> tuple[str, str]:
        """Return the dialect of `spelling`, and the dialect's own spelling."""
        section, dot, own = spelling.partition(".")
        return (section, own) if dot and section in self.embeds else (self.framework, spelling)

    def _store(self, setting: Setting, expected: str | None) -> None:
        self._drop(setting.key)
        self._unresolved.pop(setting.key, None)
        self._settings[setting.key] = setting
        if expected is not None:
            self._wrong[setting.key] = expected

    def _drop(self, key: str) -> None:
        loser = self._settings.pop(key, None)
        expected = self._wrong.pop(key, None)
        if self.checks_each and loser is not None and expected is not None:
            self._wrong_before.append(WrongType(loser, expected, key in self._known_wrong))
        self._known_wrong.discard(key)
        if loser is not None:
            self._overridden.append(loser)
