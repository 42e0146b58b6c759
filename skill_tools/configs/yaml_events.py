# SPDX-License-Identifier: Apache-2.0
"""Parses YAML into the plain values of `yaml_lines`, which know their line and column.

PyYAML's own composer recurses, and its constructors forget where a value stood. This one builds nodes from
the parser's event stream with an explicit stack: nesting cannot exhaust Python's stack. It counts the
expansion of aliases, and refuses an alias bomb before unrolling it. Otherwise it follows PyYAML's safe loader: merge
keys, last duplicate wins, no tag ever makes an object. Frameworks load with one of several loaders. A text that some
refuse is read all the same, and `Documents.refusals` names those loaders.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import yaml

from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import (
    IN_PYTHON,
    MAX_DEPTH,
    MAX_NODES,
    OMEGACONF,
    ON_LIBYAML,
    Documents,
    Doubt,
    Loader,
    Node,
    Refusal,
    plain,
)
from skill_tools.configs.yaml_scalars import RefusedError, resolve, shown_tag
from skill_tools.errors import UnusableInput

MERGE_ORDER_CHANGED = (
    "6.0.4"  # PyYAML: of several mappings in the list of one merge key the last wins, no longer the first
)

_LOADER = yaml.CLoader if yaml.__with_libyaml__ else yaml.Loader
_EXPECTED = "a training configuration"
_LONGEST_SHOWN = 40
# The Python loader and libyaml's differ here: a tab between tokens, a tag without a name, a question mark in a text
# between brackets.
_READ_IN_TWO_WAYS = re.compile(r"\t|(?<![^\s:,\[{-])!(?:\s|$)|[\[{,][^\]}\n#]{0,99}[^\s,\[{]\?")
_COLLECTIONS = {
    "tag:yaml.org,2002:map": True, "tag:yaml.org,2002:set": True,
    "tag:yaml.org,2002:seq": False, "tag:yaml.org,2002:omap": False, "tag:yaml.org,2002:pairs": False, "!": None,
}  # fmt: skip
_OF_PYTHON_ALONE = frozenset({"tag:yaml.org,2002:set"})
_PYTHON = "tag:yaml.org,2002:python/"


class _Frame:
    """An open collection; `key` is the key whose value comes next."""

    def __init__(self, *, is_mapping: bool, anchor: str | None, line: int, column: int) -> None:
        self.is_mapping = is_mapping
        self.anchor = anchor
        self.line = line
        self.column = column
        self.items: list[Node] = []
        self.entries: dict[str, Node] = {}
        self.merges: list[list[dict[str, Node]]] = []
        self.names: dict[object, str] = {}
        self.key: Node | None = None
        self.key_is_merge = False
        self.size = 1
        self.height = 0


def parse(text: str, filename: str, *, last_merge_wins: bool | None = None) -> Documents:
    """Return the root of every document in `text`; an empty text has none.

    `last_merge_wins`: the last mapping in a merge key's list wins, else the first; None if PyYAML's release
    is unknown. Raises `UnusableInput` for YAML that every loader refuses, and for input beyond `MAX_DEPTH`
    levels or `MAX_NODES` values.
    """

    def built(loader: type) -> Documents:
        builder = _Builder(filename, last_merge_wins)
        for event in _events(text, loader):
            builder.take(event)
        return builder.documents

    if not _READ_IN_TWO_WAYS.search(text):
        try:
            return built(_LOADER)
        except yaml.YAMLError as error:
            return _by_the_other(built, yaml.SafeLoader, _refusal(ON_LIBYAML, error, filename))
    try:
        documents = built(yaml.SafeLoader)
    except yaml.YAMLError as error:
        return _by_the_other(built, _LOADER, _refusal(IN_PYTHON, error, filename))
    try:
        for _ in _events(text, _LOADER):
            pass
    except yaml.YAMLError as error:
        documents.refusals.append(_refusal(ON_LIBYAML, error, filename))
    return documents


def _by_the_other(built: Callable[[type], Documents], loader: type, refusal: Refusal) -> Documents:
    """Return `loader`'s reading of a text refused by the other one; raises the other's error if both refuse."""
    try:
        documents = built(loader)
    except yaml.YAMLError:
        raise refusal.error from None
    documents.refusals.insert(0, refusal)
    return documents


def _refusal(loaders: frozenset[Loader], error: yaml.YAMLError, filename: str) -> Refusal:
    mark = getattr(error, "problem_mark", None)
    return Refusal(loaders, mark.line + 1 if mark else 1, _invalid(error, filename))


def _events(text: str, loader: type) -> Iterator[yaml.Event]:
    events: Iterator[yaml.Event] = yaml.parse(text, Loader=loader)
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


class _Merging(NamedTuple):
    """A mapping with merge keys: OmegaConf finds the same key twice in it once it is merged itself.

    `depth` counts the collections around it, `refusing` are the loaders that refuse it at any depth. `repeats`: one key
    comes from two mappings; OmegaConf 2.3 notices that only if an outer mapping merges this one before it is made.
    `pairs` are the identities of all merged pairs.
    """

    value: dict[str, Node]
    depth: int
    refusing: frozenset[Loader]
    repeats: bool
    pairs: set[object]


class _Builder:
    """Builds nodes from events; one frame an open collection."""

    def __init__(self, filename: str, last_merge_wins: bool | None) -> None:
        self.documents = Documents()
        self.filename = filename
        self._last_merge_wins = last_merge_wins
        self._frames: list[_Frame] = []
        self._anchors: dict[str, Node | None] = {}
        self._nodes = 0
        self._merging: dict[int, _Merging] = {}

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
        place = _place(event)
        is_merge = bare and text == "<<"
        if is_merge or (bare and text == "=" and self._expects_key()):
            value: object = text
        else:
            value = self._value(event, place)
        node = Node(value, *place, text, bare=bare)
        if event.anchor is not None:
            self._anchor(event.anchor, node, place)
        if is_merge and not self._expects_key():
            raise self._refused("a merge key stands where a value belongs", place)
        self._add(node, is_merge=is_merge)

    def _value(self, event: yaml.ScalarEvent, place: tuple[int, int]) -> object:
        try:
            return resolve(event.value, tag=event.tag, plain=event.implicit[0])
        except RefusedError as refused:
            if event.tag and event.tag.startswith(_PYTHON):
                self._refuse_for(frozenset(Loader) - {Loader.FULL}, str(refused), place)
                return UNREADABLE
            if not (refused.is_date and event.tag is None):
                raise self._refused(str(refused), place) from None
            self._refuse_for(frozenset({Loader.SAFE, Loader.FULL}), str(refused), place)
            return event.value

    def _expects_key(self) -> bool:
        return bool(self._frames) and self._frames[-1].is_mapping and self._frames[-1].key is None

    def _anchor(self, anchor: str, node: "Node | None", place: tuple[int, int]) -> None:
        if anchor in self._anchors and (node is None or self._anchors[anchor] is not None):
            raise self._refused(f"found duplicate anchor {anchor!r}", place)
        self._anchors[anchor] = node

    def _refused(self, problem: str, place: tuple[int, int], by: str = "a safe loader") -> UnusableInput:
        return UnusableInput(
            f"{self.filename}:{place[0]}:{place[1]} is not valid YAML ({problem})",
            expected=f"YAML that {by} accepts",
            attempt="mending that line",
        )

    def _refuse_for(self, loaders: frozenset[Loader], problem: str, place: tuple[int, int]) -> None:
        by = "OmegaConf" if loaders <= OMEGACONF else "a safe loader"
        self.documents.refusals.append(Refusal(loaders, place[0], self._refused(problem, place, by)))

    def _alias(self, event: yaml.AliasEvent) -> None:
        line, column = _place(event)
        node = self._anchors.get(event.anchor or "")
        if node is None:
            what = "refers to itself" if event.anchor in self._anchors else "is not defined"
            raise UnusableInput(
                f"{self.filename}:{line}: the alias *{event.anchor} {what}",
                expected="an anchor that is complete before it is used",
                attempt=f"defining &{event.anchor} above that line",
            )
        self._nodes += node.size - 1
        self._add(node._replace(line=line, column=column), is_merge=False)

    def _open(self, event: yaml.CollectionStartEvent) -> None:
        line, column = _place(event)
        if event.anchor is not None:
            self._anchor(event.anchor, None, (line, column))
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag and _COLLECTIONS.get(event.tag, not is_mapping) not in (is_mapping, None):
            problem = f"could not determine a constructor for the tag {shown_tag(event.tag)}"
            if not event.tag.startswith(_PYTHON):
                raise self._refused(problem, (line, column))
            self._refuse_for(frozenset(Loader) - {Loader.FULL}, problem, (line, column))
        elif event.tag in _OF_PYTHON_ALONE:
            self._refuse_for(
                OMEGACONF, f"{shown_tag(event.tag)} is no value of a configuration", (line, column)
            )
        self._frames.append(_Frame(is_mapping=is_mapping, anchor=event.anchor, line=line, column=column))
        self._check_depth(len(self._frames), line)

    def _close(self) -> None:
        frame = self._frames.pop()
        value: object = frame.items
        if frame.is_mapping:
            value = self._with_merged(frame) if frame.merges else frame.entries
        node = Node(value, frame.line, frame.column, size=frame.size, height=frame.height + 1)
        if frame.anchor:
            self._anchors[frame.anchor] = node
        self._add(node, is_merge=False)

    def _with_merged(self, frame: _Frame) -> dict[str, Node]:
        merged = self._merged(frame)
        value = {**merged, **frame.entries}
        names = [
            name for each in frame.merges for mapping in each for name in mapping if name not in frame.entries
        ]
        is_twice = len(names) > len(set(names))
        pairs: set[object] = {
            id(node) for each in frame.merges for mapping in each for node in mapping.values()
        }
        for inner in filter(
            None, (self._merging.get(id(mapping)) for each in frame.merges for mapping in each)
        ):
            pairs |= inner.pairs
        self._merging[id(value)] = _Merging(
            value,
            len(self._frames),
            ON_LIBYAML if is_twice else frozenset(),
            is_twice or not merged.keys().isdisjoint(frame.entries),
            pairs,
        )
        return value

    def _merged(self, frame: _Frame) -> dict[str, Node]:
        """Return the entries of a mapping's merge keys; unknown where releases of PyYAML differ on them."""
        first, last = _first_of_list_wins(frame.merges), self._last_of_list_wins(frame.merges)
        if self._last_merge_wins is not None:
            return last if self._last_merge_wins else first
        for name, node in first.items():
            if name not in frame.entries and last[name] is not node and plain(last[name]) != plain(node):
                before, since = _shown(node), _shown(last[name])
                shown = f"{name} is {before} in PyYAML before {MERGE_ORDER_CHANGED} and {since} since"
                self.documents.doubts.append(Doubt(frame.line, frame.column, shown))
                first[name] = node._replace(value=UNREADABLE)
        return first

    def _last_of_list_wins(self, merges: list[list[dict[str, Node]]]) -> dict[str, Node]:
        """Return the reading of PyYAML from 6.0.4: the last wins, but a mapping merged once is not merged again.

        It recognises a pair by the identity of its key's text (Python shares that of a single Latin-1 character). A
        merging mapping keeps the pairs that its own keys override.
        """
        seen: set[object] = set()
        merged: dict[str, Node] = {}
        for mapping in (mapping for each in merges for mapping in each):
            for name, node in mapping.items():
                identity = name if len(name) <= 1 and name < "\u0100" else id(node)
                if identity not in seen:
                    seen.add(identity)
                    merged[name] = node
            if (merging := self._merging.get(id(mapping))) is not None:
                seen |= merging.pairs
        return merged

    def _add(self, node: Node, *, is_merge: bool) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise UnusableInput(
                f"{self.filename}:{node.line}: more than {MAX_NODES} values once aliases are expanded",
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
            frame.merges.append(self._mappings(node, key))
            return
        if isinstance(key.value, str):
            name = key.value
        elif isinstance(key.value, list | dict):
            raise self._refused("found unhashable key", (key.line, key.column))
        else:
            name = frame.names.setdefault(key.value, key.text or "")
            if key.value is None:
                self._refuse_for(OMEGACONF, "a key is null", (key.line, key.column))
        entry = node._replace(line=key.line, column=key.column)
        earlier = frame.entries.pop(name, None)
        if earlier is not None:
            entry = entry._replace(shadowed=(*earlier.shadowed, earlier._replace(shadowed=())))
            if isinstance(key.value, str):
                self._refuse_for(OMEGACONF, f"found duplicate key {name}", (key.line, key.column))
        frame.entries[name] = entry

    def _mappings(self, node: Node, key: Node) -> list[dict[str, Node]]:
        """Return the mappings that a merge key names: one, or a list of them."""
        candidates = node.value if isinstance(node.value, list) else [node]
        mappings = [each.value for each in candidates if isinstance(each.value, dict)]
        if len(mappings) < len(candidates):
            problem = "expected a mapping or list of mappings for merging"
            raise self._refused(problem, (key.line, key.column))
        for each in filter(None, map(self._merging.get, map(id, mappings))):
            is_flattened_first = each.repeats and len(self._frames) <= each.depth
            refusing = each.refusing | ({Loader.OMEGACONF_2_3} if is_flattened_first else frozenset())
            if refusing:
                problem = "found duplicate key in a mapping that is merged and merges itself"
                self._refuse_for(refusing, problem, (key.line, key.column))
        return mappings

    def _check_depth(self, depth: int, line: int) -> None:
        if depth > MAX_DEPTH:
            raise UnusableInput(
                f"{self.filename}:{line}: nested deeper than {MAX_DEPTH} levels",
                expected=_EXPECTED,
                attempt="linting a file with less nesting",
            )


def _first_of_list_wins(merges: list[list[dict[str, Node]]]) -> dict[str, Node]:
    """Return the reading of merge keys by PyYAML up to 6.0.3: a later key wins, in its list the first mapping."""
    return {name: node for each in merges for mapping in reversed(each) for name, node in mapping.items()}


def _shown(node: Node) -> str:
    text = "a section" if isinstance(node.value, dict) else str(plain(node))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
