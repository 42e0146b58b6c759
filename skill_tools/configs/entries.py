# SPDX-License-Identifier: Apache-2.0
"""A configuration before anything is resolved: values by dotted path, merged as OmegaConf merges them.

The merge knows neither keys nor frameworks: a value takes the place of a section and the other way round, a file wins
over those before it, and interpolations are resolved last, whatever wrote the values that they name. `override` changes
it as Hydra does, for the frameworks that lay overrides over a closed configuration.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from skill_tools.configs.config import Place
from skill_tools.configs.hydra import Override
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import Node, plain

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_MOST_STEPS = 10
_MISSING = "???"  # OmegaConf's own: a value that is not there yet


class Entry(NamedTuple):
    """A value as it was written, before interpolation."""

    value: object
    written: str
    place: Place


class Entries:
    """The merged values; `sections` are the paths of all mappings, `lost` the values whose place something else took.

    `clashes` are lists over a section and sections over a list; OmegaConf refuses both.
    """

    def __init__(self) -> None:
        self.sections: dict[str, Place] = {}
        self.lost: list[Entry] = []
        self.clashes: list[Entry] = []
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        return iter(self._entries.items())

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    def top(self) -> dict[str, Place]:
        """Return the names at the top, each with its place."""
        sections = {name: place for name, place in self.sections.items() if "." not in name}
        return {**sections, **{name: entry.place for name, entry in self if "." not in name}}

    def referenced(self) -> frozenset[str]:
        """Return the names at the top that an interpolation names."""
        texts = (str(entry.value) for _, entry in self if "${" in str(entry.value))
        return frozenset(name.partition(".")[0] for text in texts for name in _REFERENCE.findall(text))

    def write_tree(self, root: Node, file: str) -> None:
        """Write everything below `root`; a list is one value."""
        pending = [("", root)]
        while pending:
            path, node = pending.pop()
            place = Place(file, node.line, node.column)
            if path and not isinstance(node.value, dict):
                self._merge_value(path, plain(node), place)
            elif isinstance(node.value, dict):
                if path:
                    self._merge_section(path, place)
                children = [(f"{path}.{name}" if path else name, child) for name, child in node.value.items()]
                pending += reversed(children)

    def write(self, path: str, value: object, written: str, place: Place) -> None:
        """Give `path` a value, in the place of whatever stood there or below it."""
        self.remove(path)
        parent = path.rpartition(".")[0]
        if parent:
            self._open_section(parent, place)
        self._entries[path] = Entry(value, written, place)

    def override(self, given: Override, value: object, place: Place, *, is_open: bool = False) -> str | None:
        """Change the configuration as Hydra does; return why it refuses to, None where it does not.

        `value` is that of `given`, or `UNREADABLE`. `is_open` says that more may be in the configuration than is known.
        Facts from hydra/_internal/config_loader_impl.py, `ConfigLoaderImpl._apply_overrides_to_config`.
        """
        key = given.key
        if given.sign in ("+", "~") and self._is_in_list(key):
            return f"{key}: it lies in a list"
        if given.sign == "~":
            return self._delete(key, value, is_open=is_open)
        if given.sign == "+" and self._holds(key) and not isinstance(value, dict | list):
            return f"{given.sign}{key}: there is a value already"
        return self._update(key, value, place, is_closed=not given.sign and not is_open)

    def _delete(self, key: str, value: object, *, is_open: bool) -> str | None:
        if not self._holds(key):
            return None if is_open else f"~{key}: there is no such value"
        held = self._entries[key].value if key in self._entries else self.tree(key)
        is_certain = UNREADABLE not in (value, held) and "${" not in str(held)
        if value is not None and is_certain and held != (_flat(value) if key in self.sections else value):
            return f"~{key}={value}: its value is {held}"
        self.remove(key)
        return None

    def _update(self, key: str, value: object, place: Place, *, is_closed: bool) -> str | None:
        parent = key.rpartition(".")[0]
        is_there = (not parent or parent in self.sections) and (key in self.sections or key in self._entries)
        if is_closed and not is_there:
            return f"{key}: there is no such key"
        held = self._entries[key].value if key in self._entries else None
        if (isinstance(value, dict) and isinstance(held, list)) or (
            isinstance(value, list) and key in self.sections
        ):
            return f"{key}: a list and a section cannot be merged"
        if not isinstance(value, dict):
            self.write(key, value, key, place)
            return None
        is_merged = key in self.sections
        if not is_merged:
            self._open_section(key, place)
        refused = (
            self._update(f"{key}.{name}", each, place, is_closed=is_closed and is_merged)
            for name, each in value.items()
        )
        return next(filter(None, refused), None)

    def _holds(self, path: str) -> bool:
        """Return whether something other than null stands at `path`."""
        return path in self.sections or (
            path in self._entries and self._entries[path].value not in (None, _MISSING)
        )

    def _is_in_list(self, path: str) -> bool:
        """Return whether `path` leads through a list; a scalar on the way makes room for a section."""
        parts = path.split(".")
        held = (self._entries.get(".".join(parts[:end])) for end in range(1, len(parts)))
        return any(entry is not None and isinstance(entry.value, list) for entry in held)

    def _merge_value(self, path: str, value: object, place: Place) -> None:
        if value == _MISSING and (path in self._entries or path in self.sections):
            return
        if isinstance(value, list) and path in self.sections:
            self.clashes.append(Entry(value, path, place))
        self.write(path, value, path, place)

    def _merge_section(self, path: str, place: Place) -> None:
        held = self._entries.get(path)
        if held is not None and isinstance(held.value, list):
            self.clashes.append(Entry({}, path, place))
        self._open_section(path, place)

    def remove(self, path: str) -> None:
        """Take out the value at `path`, or the section."""
        inside = f"{path}."
        for known in [each for each in self._entries if each == path or each.startswith(inside)]:
            self.lost.append(self._entries.pop(known))
        for known in [each for each in self.sections if each == path or each.startswith(inside)]:
            del self.sections[known]

    def tree(self, path: str) -> dict[str, object]:
        """Return the entries of the section at `path`, a dotted name each, before interpolation."""
        inside = f"{path}."
        return {name.removeprefix(inside): entry.value for name, entry in self if name.startswith(inside)}

    def resolved(self, value: object) -> object:
        """Return `value` with plain references to other values filled in; `UNREADABLE` where anything else is left."""
        for _ in range(_MOST_STEPS):
            if isinstance(value, list):
                items = [self.resolved(item) for item in value]
                return UNREADABLE if UNREADABLE in items else items
            if not isinstance(value, str) or "${" not in value:
                return value
            whole = _REFERENCE.fullmatch(value)
            if whole:
                named = self._entries.get(whole[1])
                value = UNREADABLE if named is None else named.value
                continue
            value = self._filled(value)
        return UNREADABLE

    def _filled(self, text: str) -> object:
        """Return `text` with each reference to a scalar replaced by its text."""
        for name in set(_REFERENCE.findall(text)):
            entry = self._entries.get(name)
            if entry is None or isinstance(entry.value, list) or entry.value is UNREADABLE:
                return UNREADABLE
            text = text.replace(f"${{{name}}}", str(entry.value))
            if len(text) > 10_000:
                return UNREADABLE
        rest = _REFERENCE.sub("", text)
        return UNREADABLE if "${" in rest else text

    def _open_section(self, path: str, place: Place) -> None:
        """Make `path` and its parents sections, in the place of values."""
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            section = ".".join(parts[:end])
            if section in self._entries:
                self.lost.append(self._entries.pop(section))
            self.sections.setdefault(section, place)


def _flat(value: object, path: str = "") -> object:
    """Return a mapping as `tree` has it; anything else as it is."""
    if not isinstance(value, dict):
        return value
    found: dict[str, object] = {}
    for name, each in value.items():
        inside = f"{path}{name}"
        below = _flat(each, f"{inside}.")
        found |= below if isinstance(each, dict) and isinstance(below, dict) else {inside: each}
    return found
