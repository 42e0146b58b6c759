# SPDX-License-Identifier: Apache-2.0
"""Reads YAML that a framework turns into dataclasses section by section: a dotted path is a setting.

For dialects whose files have sections and no other form. A name below a section that is read has to be a key or in the
vocabulary; `NAME.*` there lets everything below through. The dialect's rules report the others.
"""

from collections.abc import Callable, Sequence

from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.entries import Entries
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import SAFE, single_document
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_events import parse
from skill_tools.configs.yaml_lines import OMEGACONF, as_omegaconf, plain
from skill_tools.errors import UnusableInput

_OVERRIDES = "<overrides>"


def read_tree(
    draft: Draft,
    sources: Sequence[Source],
    overrides: Sequence[str],
    *,
    expected: str,
    omegaconf: bool,
    reports: Callable[[str], bool] = lambda _: True,
) -> Entries:
    """Merge `sources` in order, then `overrides` (`a.b=c`), into `draft`, and return their values by path.

    `omegaconf` says that OmegaConf loads and merges the file into typed classes: it knows numbers unknown to
    YAML, and refuses null for a field with a value. `reports` says of which unknown names there is anything
    to say. Raises `UnusableInput` for a source that is no YAML.
    """
    draft.complete = True
    entries = Entries()
    for source in sources:
        if source.kind not in (Kind.YAML, Kind.JSON):
            raise source.refused(
                expected=expected,
                attempt="the YAML that the command names, with its settings in --overrides",
            )
        draft.take(source)
        loaders = OMEGACONF if omegaconf else SAFE
        entries.write_tree(single_document(source, loaders, draft=draft), source.name)
    for text in overrides:
        path, _, value = text.lstrip("-+").partition("=")
        entries.write(path, _loaded(value), path, Place(_OVERRIDES, 1, 1))
    _write(draft, entries, omegaconf=omegaconf, reports=reports)
    return entries


def _loaded(text: str) -> object:
    """Return the value of an override, as YAML has it."""
    try:
        documents = parse(text, _OVERRIDES)
    except UnusableInput:
        return UNREADABLE
    return plain(as_omegaconf(documents[0])) if len(documents) == 1 else None


def _write(draft: Draft, entries: Entries, *, omegaconf: bool, reports: Callable[[str], bool]) -> None:
    unknown: set[str] = set()
    for path, place in sorted(entries.sections.items()):
        if path.startswith(tuple(f"{each}." for each in unknown)):
            continue
        if not draft.accepts(path):
            if reports(path):
                unknown.add(path)
                draft.note_unknown(path, place)
        elif draft.key(path) is not None:
            draft.set(path, entries.tree(path), place)
    for path, entry in entries:
        if path.startswith(tuple(f"{each}." for each in unknown)):
            continue
        if not draft.accepts(path):
            if reports(path):
                draft.note_unknown(path, entry.place)
            continue
        key, value = draft.key(path), entries.resolved(entry.value)
        draft.set_key(draft.canonical(path), value, entry.written, entry.place)
        default = key.default.get(draft.framework) if key is not None else None
        if omegaconf and value is None and key is not None and default is not None:
            draft.refuse_type(key.name, "a value, not null")
