"""Parses YAML into plain values that know their line and column.

PyYAML's own composer recurses, and its constructors forget where a value stood. This one builds nodes from
the parser's event stream with an explicit stack, so that nesting cannot exhaust Python's stack, and counts
what aliases expand to, so that an alias bomb is refused before it is unrolled. It follows PyYAML's safe loader
otherwise: merge keys, last duplicate wins, no tag is ever turned into an object.
"""

from collections.abc import Iterator
from typing import NamedTuple

import yaml

from skill_tools.configs.yaml_scalars import omegaconf_float, resolve
from skill_tools.errors import UnusableInput

MAX_DEPTH = 64
MAX_NODES = 100_000

_LOADER = yaml.CLoader if yaml.__with_libyaml__ else yaml.Loader
_EXPECTED = "a training configuration"


class Node(NamedTuple):
    """A value and its place, from 1: in a mapping that of its key, else its own.

    `value` is a scalar, `list[Node]` or `dict[str, Node]`; `text` is a scalar as it was written, `bare` without quotes
    and tag. `shadowed` holds the earlier values of a duplicate key, `size` and `height` what the node expands to.
    """

    value: object
    line: int
    column: int
    text: str | None = None
    shadowed: tuple["Node", ...] = ()
    size: int = 1
    height: int = 0
    bare: bool = False


class _Frame:
    """A collection that is being read; `key` is the key whose value comes next."""

    def __init__(self, *, is_mapping: bool, anchor: str | None, line: int, column: int) -> None:
        self.is_mapping = is_mapping
        self.anchor = anchor
        self.line = line
        self.column = column
        self.items: list[Node] = []
        self.entries: dict[str, Node] = {}
        self.merged: dict[str, Node] = {}
        self.key: Node | None = None
        self.key_is_merge = False
        self.size = 1
        self.height = 0


def parse(text: str, filename: str) -> list[Node]:
    """Return the root of every document in `text`; an empty text has none.

    Raises `UnusableInput` for invalid YAML, and for input beyond `MAX_DEPTH` levels or `MAX_NODES` values.
    """
    builder = _Builder(filename)
    try:
        for event in _events(text):
            builder.take(event)
    except yaml.YAMLError as error:
        raise _invalid(error, filename) from error
    return builder.documents


def plain(node: Node) -> object:
    """Return the node's value without places: nested lists and dicts of scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def as_omegaconf(node: Node) -> Node:
    """Return the tree as OmegaConf loads it: a bare `1e-4`, which YAML 1.1 has as text, is a number."""
    value = node.value
    if isinstance(value, dict):
        value = {key: as_omegaconf(child) for key, child in value.items()}
    elif isinstance(value, list):
        value = [as_omegaconf(child) for child in value]
    elif node.bare and isinstance(value, str) and (number := omegaconf_float(value)) is not None:
        value = number
    if value is node.value and not node.shadowed:
        return node
    return node._replace(value=value, shadowed=tuple(map(as_omegaconf, node.shadowed)))


def _events(text: str) -> Iterator[yaml.Event]:
    events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
    return events


def _place(event: yaml.Event) -> tuple[int, int]:
    """Return line and column, from 1; events that a parser makes always have a mark."""
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def _invalid(error: yaml.YAMLError, filename: str) -> UnusableInput:
    mark = getattr(error, "problem_mark", None)
    place = f"{filename}:{mark.line + 1}:{mark.column + 1}" if mark else filename
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable characters"
    language = "JSON" if filename.endswith(".json") else "YAML"
    return UnusableInput(
        f"{place} is not valid {language} ({problem})",
        expected=f"{language} that a safe loader accepts",
        attempt="mending that line",
    )


class _Builder:
    """Builds nodes from events; one frame an open collection."""

    def __init__(self, filename: str) -> None:
        self.documents: list[Node] = []
        self._filename = filename
        self._frames: list[_Frame] = []
        self._anchors: dict[str, Node | None] = {}
        self._nodes = 0

    def take(self, event: yaml.Event) -> None:
        """Read one event."""
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._open(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close()
        elif isinstance(event, yaml.DocumentStartEvent):
            self._anchors.clear()

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        text = event.value
        bare: bool = event.implicit[0]
        node = Node(resolve(text, tag=event.tag, plain=bare), *_place(event), text, bare=bare)
        is_merge = text == "<<" and bare
        if event.anchor:
            self._anchors[event.anchor] = node
        self._add(node, is_merge=is_merge)

    def _alias(self, event: yaml.AliasEvent) -> None:
        line, column = _place(event)
        node = self._anchors.get(event.anchor or "")
        if node is None:
            what = "refers to itself" if event.anchor in self._anchors else "is not defined"
            raise UnusableInput(
                f"{self._filename}:{line}: the alias *{event.anchor} {what}",
                expected="an anchor that is complete before it is used",
                attempt=f"defining &{event.anchor} above that line",
            )
        self._nodes += node.size - 1
        self._add(node._replace(line=line, column=column), is_merge=False)

    def _open(self, event: yaml.CollectionStartEvent) -> None:
        line, column = _place(event)
        if event.anchor:
            self._anchors[event.anchor] = None
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        self._frames.append(_Frame(is_mapping=is_mapping, anchor=event.anchor, line=line, column=column))
        self._check_depth(len(self._frames), line)

    def _close(self) -> None:
        frame = self._frames.pop()
        value: object = frame.items
        if frame.is_mapping:
            value = {**frame.merged, **frame.entries} if frame.merged else frame.entries
        node = Node(value, frame.line, frame.column, size=frame.size, height=frame.height + 1)
        if frame.anchor:
            self._anchors[frame.anchor] = node
        self._add(node, is_merge=False)

    def _add(self, node: Node, *, is_merge: bool) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise UnusableInput(
                f"{self._filename}:{node.line}: more than {MAX_NODES} values once aliases are expanded",
                expected=_EXPECTED,
                attempt="linting the configuration itself, without data",
            )
        if not self._frames:
            self.documents.append(node)
            return
        frame = self._frames[-1]
        frame.size += node.size
        frame.height = max(frame.height, node.height)
        self._check_depth(len(self._frames) + node.height, node.line)
        if not frame.is_mapping:
            frame.items.append(node)
        elif frame.key is None:
            frame.key, frame.key_is_merge = node, is_merge
        else:
            self._add_entry(frame, frame.key, node)
            frame.key = None

    def _add_entry(self, frame: _Frame, key: Node, node: Node) -> None:
        if frame.key_is_merge:
            for merged in _mappings(node):
                frame.merged = {**merged, **frame.merged}
            return
        name = key.text if key.text is not None else str(plain(key))
        entry = node._replace(line=key.line, column=key.column)
        earlier = frame.entries.pop(name, None)
        if earlier is not None:
            entry = entry._replace(shadowed=(*earlier.shadowed, earlier._replace(shadowed=())))
        frame.entries[name] = entry

    def _check_depth(self, depth: int, line: int) -> None:
        if depth > MAX_DEPTH:
            raise UnusableInput(
                f"{self._filename}:{line}: nested deeper than {MAX_DEPTH} levels",
                expected=_EXPECTED,
                attempt="linting a file with less nesting",
            )


def _mappings(node: Node) -> list[dict[str, Node]]:
    """Return the mappings that a merge key names: one, or a list of them, the first having precedence."""
    candidates = node.value if isinstance(node.value, list) else [node]
    return [candidate.value for candidate in candidates if isinstance(candidate.value, dict)]
