# SPDX-License-Identifier: Apache-2.0
"""Edits one key in the text of a YAML or JSON file and leaves every other character alone.

The places come from libyaml's own node marks, so that block and flow style, quotes and comments are kept.
An edit that would change anything but the one key (through an anchor, say) is refused: the result is None,
and the caller says the change in words. Nothing here knows rules or frameworks.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

Path = tuple[object, ...]

_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")  # the ends of lines of libyaml
_IMPOSSIBLE = object()


class Pair(NamedTuple):
    """One `key: value` of a mapping, with the way to it from the root and the mapping that holds it."""

    path: Path
    key: yaml.ScalarNode
    value: yaml.Node
    mapping: yaml.MappingNode

    @property
    def is_json(self) -> bool:
        """Whether the pair is written as JSON has it: its new value has to be JSON too."""
        return bool(self.mapping.flow_style) and self.key.style == '"'


def find_pair(text: str, *, line: int, name: str) -> Pair | None:
    """Return the pair on `line` (from 1) whose key is `name` or its last part."""
    for pair in pairs(text):
        lines = (pair.key.start_mark.line + 1, pair.value.start_mark.line + 1)
        if line in lines and (name == pair.key.value or name.endswith(f".{pair.key.value}")):
            return pair
    return None


def set_value(text: str, pair: Pair, value: object) -> str | None:
    """Return `text` with `pair`'s value replaced."""
    start, end = _offset(text, pair.value.start_mark), _end(text, pair.value)
    written = json.dumps(value) if pair.is_json else _written(value, pair.value)
    if isinstance(pair.value, yaml.ScalarNode) and end > start:
        edited = text[:start] + written + text[end:]
    else:
        # An empty or block value: keep the rest of the key's line behind the colon, which is at most a comment.
        colon = text.index(":", _offset(text, pair.key.end_mark)) + 1
        comment = text[colon : min(max(colon, start), _line_end(text, colon)[0])].rstrip()
        edited = f"{text[:colon]} {written}{comment}{text[max(colon, end) :]}"
    return edited if _load(edited) == _with(_load(text), pair.path, value) else None


def add_sibling(text: str, pair: Pair, key: str, value: object) -> str | None:
    """Return `text` with `key: value` added after `pair`, in the same mapping."""
    end = _end(text, pair.value)
    if pair.is_json:
        key_start = _offset(text, pair.key.start_mark)
        indent = text[key_start - pair.key.start_mark.column : key_start]
        comma = f",{_newline(text)}{indent}" if indent.isspace() else ", "
        edited = f"{text[:end]}{comma}{json.dumps(key)}: {json.dumps(value)}{text[end:]}"
    elif pair.mapping.flow_style:
        edited = f"{text[:end]}, {key}: {_written(value)}{text[end:]}"
    else:
        line_end, _ = _line_end(text, end)
        indent = " " * pair.key.start_mark.column
        edited = f"{text[:line_end]}{_newline(text)}{indent}{key}: {_written(value)}{text[line_end:]}"
    return edited if _load(edited) == _with(_load(text), (*pair.path[:-1], key), value) else None


def add_at_end(text: str, path: tuple[str, ...], value: object) -> str | None:
    """Return `text` with a new entry at its end, in sections of its own if `path` has more than one part."""
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(path)]
    lines[-1] += f" {_written(value)}"
    newline = _newline(text)
    edited = text.rstrip("\r\n") + newline * bool(text.strip()) + newline.join(lines) + newline
    return edited if _load(edited) == _with(_load(text) or {}, path, value) else None


def remove(text: str, pair: Pair) -> str | None:
    """Return `text` without `pair`, and without the sections that would be left empty."""
    path = pair.path
    while len(pair.mapping.value) == 1 and len(pair.path) > 1:
        holder = next(
            (other for other in pairs(text) if other.value is not None and other.path == pair.path[:-1]), None
        )
        if holder is None:
            return None
        pair = holder
    edited = _without_flow(text, pair) if pair.mapping.flow_style else _without_block(text, pair)
    if edited is None or _load(edited) != _without(_load(text), path):
        return None
    return edited


def pairs(text: str) -> Iterator[Pair]:
    """Yield every pair of the document, outer ones first; nothing for text that is not one YAML document."""
    try:
        root = yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError:
        return
    stack: list[tuple[Path, yaml.Node | None]] = [((), root)]
    seen: set[int] = set()
    while stack:
        path, node = stack.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            stack += [((*path, position), item) for position, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    yield Pair((*path, key.value), key, value, node)
                    stack.append(((*path, key.value), value))


def _without_block(text: str, pair: Pair) -> str | None:
    start = _offset(text, pair.key.start_mark) - pair.key.start_mark.column
    if text[start : start + pair.key.start_mark.column].strip():
        return None
    _, next_line = _line_end(text, _end(text, pair.value))
    return text[:start] + text[next_line:]


def _without_flow(text: str, pair: Pair) -> str:
    start, end = _offset(text, pair.key.start_mark), _end(text, pair.value)
    after = text[end:].lstrip()
    if after.startswith(","):
        return text[:start] + after[1:].lstrip()
    before = text[:start].rstrip()
    return (before[:-1] if before.endswith(",") else before) + text[end:]


def _end(text: str, node: yaml.Node) -> int:
    """Return the end of `node`'s own text; a block's end mark stands behind the comments after it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    start, end = _offset(text, node.start_mark), _offset(text, node.end_mark)
    if isinstance(node, yaml.ScalarNode) and node.style in {"|", ">"}:
        return start + len(text[start:end].rstrip())
    return end


def _offset(text: str, mark: Any) -> int:
    """Return the position of a mark; libyaml counts lines and columns in characters."""
    starts = [0, *(match.end() for match in _BREAK.finditer(text))]
    return starts[int(mark.line)] + int(mark.column)


def _line_end(text: str, offset: int) -> tuple[int, int]:
    """Return the end of the line at `offset`, and the start of the next one."""
    found = _BREAK.search(text, offset)
    return (found.start(), found.end()) if found else (len(text), len(text))


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _written(value: object, old: yaml.Node | None = None) -> str:
    """Write `value` so that it stands in block and in flow style; text keeps the quotes of the replaced text."""
    quotes = old.style if isinstance(old, yaml.ScalarNode) and isinstance(value, str) else None
    style = quotes if quotes in {"'", '"'} else None
    dumped = yaml.safe_dump([value], default_flow_style=True, default_style=style, width=10**6)
    return dumped.strip()[1:-1]


def _load(text: str) -> Any:
    try:
        return yaml.load(text, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError):
        return None


def _with(data: Any, path: Path, value: object) -> Any:
    """Return a copy of `data` with the entry at `path` set, its sections made where they are missing.

    `_IMPOSSIBLE`, which no text loads as, when a section holds something else.
    """
    changed = _unshared(data)
    place = changed
    for part in path[:-1]:
        if isinstance(place, dict):
            place = place.setdefault(part, {})
        elif isinstance(place, list) and isinstance(part, int):
            place = place[part]
    if not isinstance(place, dict):
        return _IMPOSSIBLE
    place[path[-1]] = value
    return changed


def _without(data: Any, path: Path) -> Any:
    """Return a copy of `data` without the entry at `path` and the mappings that this leaves empty.

    `_IMPOSSIBLE` when there is no such entry, as with a key that is no text.
    """
    places = [_unshared(data)]
    try:
        for part in path[:-1]:
            places.append(places[-1][part])
        del places[-1][path[-1]]
    except (KeyError, TypeError):
        return _IMPOSSIBLE
    for depth in range(len(places) - 1, 0, -1):
        if places[depth] == {}:
            del places[depth - 1][path[depth - 1]]
    return places[0]


def _unshared(data: Any) -> Any:
    """Copy `data` so that a node of aliases is there once for each place: a change to one must not show in all."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(value) for value in data] if isinstance(data, list) else data
