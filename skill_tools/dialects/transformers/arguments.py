# SPDX-License-Identifier: Apache-2.0
"""Writes one argument into the draft, whatever form it came in: a key of a recipe, an option, a keyword.

Sections may be mappings, JSON in a text, or paths of JSON files. Facts:
transformers/training_args.py::TrainingArguments.__post_init__ and _process_fsdp_args of 4.57.3 to 5.23.0.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from skill_tools.configs.config import Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source, find
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.deepspeed import DEEPSPEED, section
from skill_tools.dialects.transformers import TRANSFORMERS

FSDP_CONFIG = "fsdp_config"
KWARGS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_SECTIONS = (FSDP_CONFIG, DEEPSPEED, *KWARGS)
# Of torch's checkpoint, then those that Transformers and TRL remove before its call.
_OF_CHECKPOINT = frozenset(
    {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
    | {"offload", "every_n_layers", "selective"}
)
_TRUTHS = frozenset({"use_reentrant", "preserve_rng_state", "debug", "offload", "selective"})
_EVERY = "every_n_layers"
_MODEL = "base_model"
_LIKENESS = 0.86  # from this likeness on a key is a misspelt known one, not a script's own
_MOST_ALIKE = 2  # letters more or less in a misspelt key
_LEAST_LETTERS = 10  # of a key; use_lora of a script is no slip for use_dora, nor is a plural one
_RENAMED = {"evaluation_strategy": "eval_strategy"}  # since 4.46


def write(draft: Draft, name: str, node: Node, file: str) -> None:
    """Give the argument `name` a value above whatever it had; a mapping gives each of its fields one, too."""
    place = Place(file, node.line, node.column)
    for loser in node.shadowed:
        draft.shadow(name, plain(loser), Place(file, loser.line, loser.column))
    if name in _SECTIONS:
        draft.remove(name)
        node = _from_json(node, file)
    value = plain(node)
    if name == "fsdp" and isinstance(value, str):
        value = value.split()
    draft.set(name, value, place)
    if name not in _SECTIONS:
        return
    if value is UNREADABLE:
        _open_section(draft, name)
    elif name in KWARGS and draft.framework == TRANSFORMERS:
        _write_kwargs(draft, name, node, file)
    elif isinstance(node.value, dict):
        write_tree(draft, node, file, prefix=name, spell=without_prefix)


def with_place(value: object, place: Place) -> Node:
    """Return a plain value as a node; all of it stands at `place`."""
    if isinstance(value, dict):
        entries = {str(name): with_place(each, place) for name, each in value.items()}
        return Node(entries, place.line, place.column)
    if isinstance(value, list):
        return Node([with_place(each, place) for each in value], place.line, place.column)
    return Node(value, place.line, place.column)


def without_prefix(path: str) -> str:
    """Return `path` without the `fsdp_` that fields of fsdp_config may begin with."""
    head, _, field = path.partition(".")
    return f"{head}.{field.removeprefix('fsdp_')}" if head == FSDP_CONFIG else path


def settle(draft: Draft, folders: Sequence[Path]) -> None:
    """Follow the files that the arguments name, and name the model."""
    for old, new in _RENAMED.items():
        if old in draft and new not in draft:
            draft.leave_open(new)
    model = draft.get(_MODEL)
    if model is not None and isinstance(model.value, str):
        draft.model_name = model.value
    section.follow_or_settle(draft, DEEPSPEED, folders)
    section.take_accumulation(draft)
    named = draft.get(FSDP_CONFIG)
    if named is not None and isinstance(named.value, str) and named.value:
        _follow_fsdp_config(draft, named, folders)


@lru_cache(maxsize=1024)
def misspelt(name: str) -> tuple[str, ...]:
    """Return the arguments like the unknown `name`; a script may have arguments of its own."""
    if len(name) < _LEAST_LETTERS or _words().issuperset(name.split("_")):
        return ()
    alike = _alike(name, load_vocabulary(TRANSFORMERS).names)
    return tuple(sorted((known for known in alike if known.rstrip("s") != name.rstrip("s")), key=len))


@lru_cache(maxsize=1)
def _words() -> frozenset[str]:
    """Return the words in names of arguments; a name made of them is another one: `dataset_args`, `_kwargs`."""
    return frozenset(word for known in load_vocabulary(TRANSFORMERS).names for word in known.split("_"))


def _alike(name: str, names: frozenset[str]) -> Iterator[str]:
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=name)
    for known in names:
        if known[:1] == name[:1] and abs(len(known) - len(name)) <= _MOST_ALIKE:
            matcher.set_seq1(known)
            if matcher.quick_ratio() >= _LIKENESS and matcher.ratio() >= _LIKENESS:
                yield known


def _write_kwargs(draft: Draft, name: str, node: Node, file: str) -> None:
    """Write the arguments of checkpointing: nobody converts them, so that any text is true and none is a number."""
    for field, child in entries_of(node).items():
        place, key = Place(file, child.line, child.column), f"{name}.{field}"
        value = plain(child)
        if field not in _OF_CHECKPOINT:
            from difflib import get_close_matches

            draft.note_unknown(key, place, nearest=tuple(get_close_matches(field, _OF_CHECKPOINT, n=1)))
            continue
        draft.set(key, bool(value) if field in _TRUTHS and value is not UNREADABLE else value, place)
        if field == _EVERY and value is not UNREADABLE and not (isinstance(value, int | float) and value):
            draft.refuse_type(draft.canonical(key), "a whole number from 1 on, without quotes")


def _from_json(node: Node, file: str) -> Node:
    """Return the mapping that a text such as `{"use_reentrant": false}` holds; any other node as it is."""
    text = node.value
    if not isinstance(text, str) or not text.startswith("{"):
        return node
    inside = Source(file, text)
    return with_place(plain(single_document(inside)), Place(file, node.line, node.column))


def _open_section(draft: Draft, name: str) -> None:
    if name == DEEPSPEED:
        draft.section_may_be_set(DEEPSPEED)
    else:
        draft.may_be_set(f"{name}.")


def _follow_fsdp_config(draft: Draft, named: Setting, folders: Sequence[Path]) -> None:
    found = find(str(named.value), folders)
    if found is None:
        draft.missing_files.append(named)
        draft.may_be_set(f"{FSDP_CONFIG}.")
        return
    draft.take(found)
    root = single_document(found, draft=draft)
    write_tree(draft, root, found.name, spell=lambda path: without_prefix(f"{FSDP_CONFIG}.{path}"), prefix="")
