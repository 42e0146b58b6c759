# SPDX-License-Identifier: Apache-2.0
"""Writes a tree of sections, as in YAML and JSON files, into a draft: one dotted key per value.

The key table may make a section a value too (`peft`, `fsdp_config`), so a rule can ask whether it is there.
Nothing is read below an unknown key: one finding is enough.
"""

from collections.abc import Callable

from skill_tools.configs.config import Fault, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.releases import is_before
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import OMEGACONF, Documents, Loader, Node, as_omegaconf, plain
from skill_tools.errors import UnusableInput

Value = Callable[[Node], object]
SAFE = frozenset({Loader.SAFE})
FULL = frozenset({Loader.FULL})
_BY_RELEASE = "yaml-by-release"
_AS_OMEGACONF_2_4_MERGES = "6.0.3"  # it has a merge of its own, in which the first of a list wins


def single_document(
    source: Source, loaders: frozenset[Loader] = SAFE, *, draft: Draft | None = None, which: str = ""
) -> Node:
    """Return the root of a YAML or JSON source, an empty mapping if it holds nothing.

    `loaders` are the framework's, several if its releases load differently; `which` names each release's loader in a
    few words. A `draft` gets the faults of form that depend on the release of one. Raises `UnusableInput` for several
    documents, for no mapping, and for text refused by all `loaders`: no framework takes these.
    """
    documents = source.documents
    if source.kind is Kind.YAML and (documents.refusals or "<<" in source.text):
        loaders = _of_release(source, loaders)
        if loaders == {Loader.OMEGACONF_2_4}:
            documents = source.documents_of(_AS_OMEGACONF_2_4_MERGES)
        _hear_loaders(source, documents, loaders, draft)
    root = documents[0] if documents and documents[0].value is not None else Node({}, 1, 1)
    if len(documents) > 1 or not isinstance(root.value, dict):
        what = f"{len(documents)} documents" if len(documents) > 1 else "no mapping of keys to values"
        raise UnusableInput(
            f"{source.name}:{documents[-1].line} holds {what}",
            expected="one mapping of keys to values",
            attempt="linting a configuration file",
        )
    if source.kind is Kind.YAML and not loaders.isdisjoint(OMEGACONF) and not loaders <= OMEGACONF:
        return _in_doubt(root, source.name, draft, which)
    return as_omegaconf(root) if loaders <= OMEGACONF or source.kind is Kind.JSON else root


def _in_doubt(node: Node, file: str, draft: Draft | None, which: str) -> Node:
    """Return the tree without the values that OmegaConf reads as numbers and the safe loader as text."""
    value = node.value
    if isinstance(value, dict):
        value = {name: _in_doubt(child, file, draft, which) for name, child in value.items()}
    elif isinstance(value, list):
        value = [_in_doubt(child, file, draft, which) for child in value]
    elif (read := as_omegaconf(node)) is not node:
        value = UNREADABLE
        if draft is not None:
            text = f"{node.text} is text to {Loader.SAFE.value}, the number {read.value} to OmegaConf{which}"
            draft.faults.append(Fault(_BY_RELEASE, text, Place(file, node.line, node.column)))
    return node if value is node.value else node._replace(value=value)


def _hear_loaders(
    source: Source, documents: Documents, loaders: frozenset[Loader], draft: Draft | None
) -> None:
    """Raise a refusal of all `loaders`; note in the draft those of some, and differences in reading."""
    for refusal in documents.refusals:
        if loaders <= refusal.loaders:
            raise refusal.error
        refusing = sorted(each.value for each in loaders & refusal.loaders)
        if refusing and draft is not None:
            taking = sorted(each.value for each in loaders - refusal.loaders)
            text = f"{', '.join(taking)} takes it, {', '.join(refusing)} refuses it"
            draft.faults.append(Fault(_BY_RELEASE, text, Place(source.name, refusal.line, 1)))
    if draft is not None:
        draft.faults += [
            Fault(_BY_RELEASE, doubt.text, Place(source.name, doubt.line, doubt.column))
            for doubt in documents.doubts
        ]


def _of_release(source: Source, loaders: frozenset[Loader]) -> frozenset[Loader]:
    """Return those of `loaders` that fit the stated release of OmegaConf."""
    if not (loaders >= OMEGACONF and (release := source.release("omegaconf"))):
        return loaders
    before = is_before(release, "2.4")
    return loaders - {Loader.OMEGACONF_2_4 if before else Loader.OMEGACONF_2_3}


def entries_of(node: Node | None) -> dict[str, Node]:
    """Return the entries of a mapping; anything else has none."""
    return node.value if node is not None and isinstance(node.value, dict) else {}


def write_tree(
    draft: Draft,
    root: Node,
    file: str,
    *,
    prefix: str = "",
    spell: Callable[[str], str] = str,
    value_of: Value = plain,
    is_value: Callable[[Node], bool] = lambda node: not isinstance(node.value, dict),
    report_unknown: bool = True,
) -> None:
    """Write every entry below `root` into `draft`, in the order of the file.

    `spell` maps a dotted path to the framework's spelling, `is_value` tells mappings that are values,
    `value_of` gives the value of a node, perhaps `UNREADABLE`.
    """
    pending = [(prefix, root)]
    while pending:
        path, node = pending.pop()
        if path != prefix and not _write(draft, path, node, file, spell, value_of, report_unknown):
            continue
        if isinstance(node.value, dict) and not is_value(node):
            children = [(f"{path}.{name}" if path else name, child) for name, child in node.value.items()]
            pending += reversed(
                [child for child in children if not child[0].rpartition(".")[2].startswith("_")]
            )


def _write(
    draft: Draft,
    path: str,
    node: Node,
    file: str,
    spell: Callable[[str], str],
    value_of: Value,
    report_unknown: bool,
) -> bool:
    """Write one entry; return whether those below it should be read."""
    place = Place(file, node.line, node.column)
    spelling = spell(path)
    for loser in node.shadowed:
        draft.shadow(spelling, plain(loser), Place(file, loser.line, loser.column))
    if not draft.accepts(spelling):
        if report_unknown:
            draft.note_unknown(path, place, spelling=spelling)
        return not report_unknown
    is_section = isinstance(node.value, dict) and draft.key(spelling) is None
    if is_section:
        return True
    draft.set_key(draft.canonical(spelling), value_of(node), path, place)
    if node.value is UNREADABLE and not draft.is_leaf(spelling):
        draft.may_be_set(f"{spelling}.")
    return not draft.is_leaf(spelling)
