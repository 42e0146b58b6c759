# SPDX-License-Identifier: Apache-2.0
"""A project's settings of lint: `offload.toml`, or the table `[tool.offload]` of a `pyproject.toml`.

The nearest file above an input counts, and no other; in one folder `offload.toml` comes first. Options of the command
line win over it. Each key is checked when the file is read, and a file that cannot be used ends the call by its name.
"""

import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.commands import releases
from skill_tools.configs.files import read_text
from skill_tools.configs.releases import Stated
from skill_tools.dialects import registry
from skill_tools.errors import UnusableInput
from skill_tools.nearest import did_you_mean
from skill_tools.rules.finding import Severity
from skill_tools.rules.knowledge import load_rules
from skill_tools.rules.selection import Selection, checked
from skill_tools.rules.versions import read_targets

OWN_FILE = "offload.toml"
SHARED_FILE = "pyproject.toml"
KEYS = ("select", "ignore", "per-file-ignores", "target", "framework", "fail-on")


class Settings(NamedTuple):
    """The settings of one file; `targets` are releases by distribution, each with the file as where it is stated."""

    selection: Selection = Selection()
    targets: Mapping[str, Stated] = MappingProxyType({})
    framework: str | None = None
    fail_on: Severity | None = None


def selection_of(select: list[str] | None, ignore: list[str]) -> Selection:
    """Return the rules of `--select` and `--ignore`; raises `UnusableInput` for a name that no rule has."""
    if select is None and not ignore:
        return Selection()
    known = [rule.id for rule in load_rules()]
    selected = None if select is None else checked(_words(select), known, "--select")
    return Selection(selected, checked(_words(ignore), known, "--ignore"))


def _words(lists: list[str]) -> list[str]:
    """Return the words of an option that may be given often, each with several words between commas."""
    return [word.strip() for each in lists for word in each.split(",") if word.strip()]


def nearest_settings(folder: str, kept: dict[str, Settings]) -> Settings:
    """Return the settings of the nearest file in or above `folder`; `kept` remembers those of each folder.

    Raises `UnusableInput` for a file that cannot be used.
    """
    if folder not in kept:
        level = os.path.abspath(folder)
        above = os.path.dirname(level)
        here = _in_folder(level)
        if here is None:
            here = Settings() if above == level else nearest_settings(above, kept)
        kept[folder] = here
    return kept[folder]


def _in_folder(folder: str) -> Settings | None:
    """Return the settings that a file of `folder` has; None if none has any."""
    own = os.path.join(folder, OWN_FILE)
    if os.path.isfile(own):
        own = os.path.relpath(own)
        return _settings(_table(own, read_text(own)), own, folder)
    shared = os.path.join(folder, SHARED_FILE)
    if os.path.isfile(shared):
        shared = os.path.relpath(shared)
        text = read_text(shared)
        if re.search(r"\btool\b.*\boffload\b", text, re.DOTALL):
            tool = _table(shared, text).get("tool")
            table = tool.get("offload") if isinstance(tool, dict) else None
            if table is not None:
                return _settings(table, f"{shared} [tool.offload]", folder)
    return None


def _table(path: str, text: str) -> dict[str, object]:
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UnusableInput(
            f"{path} is not TOML: {error}", expected="settings of lint", attempt="mending that line"
        ) from error


def _settings(table: object, where: str, folder: str) -> Settings:
    """Return the settings in `table` at `where` in `folder`; raises `UnusableInput` for unknown ones."""
    if not isinstance(table, dict):
        raise _wrong(where, "offload", "a table")
    for key in table:
        if key not in KEYS:
            raise UnusableInput(
                f"{where}: there is no setting {key!r}",
                expected=f"one of {', '.join(KEYS)}",
                attempt=did_you_mean(key, KEYS, otherwise="removing it"),
            )
    known = [rule.id for rule in load_rules()]
    rules = _Reader(table, where, lambda names, key: checked(names, known, f"{where}: {key}"))
    targets = list(rules.texts("target") or ())
    try:
        releases.check(targets)
        stated = read_targets(targets)
    except UnusableInput as error:
        problem = f"{where}: {error.problem.removeprefix('--target ')}"
        raise UnusableInput(problem, expected=error.expected, attempt=error.attempt) from error
    framework = rules.one_of("framework", registry.names())
    fail_on = rules.one_of("fail-on", [str(each) for each in Severity])
    return Settings(
        Selection(
            rules.names("select"), rules.names("ignore") or (), rules.per_file("per-file-ignores"), folder
        ),
        {name: Stated(version, where) for name, version in stated.items()},
        framework,
        Severity(fail_on) if fail_on else None,
    )


class _Reader:
    """Reads settings by their type; `check` returns selectors if rules answer to them."""

    def __init__(
        self, table: Mapping[str, object], where: str, check: Callable[[list[str], str], tuple[str, ...]]
    ) -> None:
        self._table, self._where, self._check = table, where, check

    def texts(self, key: str) -> list[str] | None:
        """Return a list of texts; None where nothing is said."""
        if key not in self._table:
            return None
        return _texts(self._table[key], self._where, key)

    def names(self, key: str) -> tuple[str, ...] | None:
        """Return selectors of rules; None where nothing is said."""
        texts = self.texts(key)
        return None if texts is None else self._check(texts, key)

    def per_file(self, key: str) -> dict[str, tuple[str, ...]]:
        """Return selectors by pattern of file names."""
        table = self._table.get(key, {})
        if not isinstance(table, dict):
            raise _wrong(self._where, key, "a table of patterns, each with a list of rules")
        return {
            pattern: self._check(_texts(rules, self._where, f"{key} {pattern!r}"), key)
            for pattern, rules in table.items()
        }

    def one_of(self, key: str, known: list[str] | tuple[str, ...]) -> str | None:
        """Return one of the `known` words; None where nothing is said."""
        value = self._table.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or value not in known:
            raise UnusableInput(
                f"{self._where}: {key} is {value!r}",
                expected=f"one of {', '.join(known)}",
                attempt=did_you_mean(str(value), known, otherwise=known[0]),
            )
        return value


def _texts(value: object, where: str, key: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(where, key, 'a list of texts, such as ["la-pp"]')
    return value


def _wrong(where: str, key: str, expected: str) -> UnusableInput:
    return UnusableInput(f"{where}: {key} has the wrong type", expected=expected, attempt="docs/linting.md")
