"""A torchtune configuration before anything is resolved: values by dotted path, merged as OmegaConf merges them.

Apart because the merge knows neither keys nor recipes: a value takes the place of a section and the other way round, an
override wins over the file, and interpolations are resolved last, whatever wrote the values that they name.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from skill_tools.configs.config import Place
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import Node, plain

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_MOST_STEPS = 10


class Entry(NamedTuple):
    """A value as it was written, before interpolation."""

    value: object
    written: str
    place: Place


class Entries:
    """The merged values; `sections` are the paths of all mappings, `lost` what something else took the place of."""

    def __init__(self) -> None:
        self.sections: dict[str, Place] = {}
        self.lost: list[Entry] = []
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
                self.write(path, plain(node), path, place)
            elif isinstance(node.value, dict):
                if path:
                    self._open_section(path, place)
                children = [(f"{path}.{name}" if path else name, child) for name, child in node.value.items()]
                pending += reversed(children)

    def write(self, path: str, value: object, written: str, place: Place) -> None:
        """Give `path` a value, in the place of whatever stood there or below it."""
        self.remove(path)
        parent = path.rpartition(".")[0]
        if parent:
            self._open_section(parent, place)
        self._entries[path] = Entry(value, written, place)

    def remove(self, path: str) -> None:
        """Take out the value at `path`, or the section."""
        inside = f"{path}."
        for known in [each for each in self._entries if each == path or each.startswith(inside)]:
            self.lost.append(self._entries.pop(known))
        for known in [each for each in self.sections if each == path or each.startswith(inside)]:
            del self.sections[known]

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
        """Make `path` and what it lies in sections, in the place of values."""
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            section = ".".join(parts[:end])
            if section in self._entries:
                self.lost.append(self._entries.pop(section))
            self.sections.setdefault(section, place)
