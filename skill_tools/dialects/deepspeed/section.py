# SPDX-License-Identifier: Apache-2.0
"""Writes a DeepSpeed configuration, inline or from a named file, into the draft of the dialect that embeds it.

A file of its own keeps its own spelling (`zero_optimization.stage`), an inline mapping the one of the file around it.
The draft has to embed `deepspeed`. Source of the accepted types: `deepspeed/runtime/config.py` and the configuration
classes beside it, which are pydantic's in its lax mode.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from skill_tools.configs.config import Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.keys import Key
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import single_document, write_tree
from skill_tools.configs.values import as_pydantic
from skill_tools.configs.yaml_lines import Node
from skill_tools.dialects.deepspeed import DEEPSPEED

_PREFIX = f"{DEEPSPEED}."
_ZERO = f"{_PREFIX}zero_optimization"
_STRICT = tuple(f"{_PREFIX}{section}." for section in ("zero_optimization", "compile", "bf16", "fp16"))
_INTERVALS = (f"{_ZERO}.zenflow.select_interval", f"{_ZERO}.zenflow.update_interval")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")  # TRAIN_BATCH_SIZE, which a script fills in
_ACCUMULATION = "gradient_accumulation_steps"
_MAY_BE_NULL = frozenset(
    {f"{_PREFIX}bf16", f"{_PREFIX}aio", f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"}
)


def write_file(draft: Draft, source: Source) -> None:
    """Write a DeepSpeed file, and keep its text."""
    draft.take(source)
    root = single_document(source)
    write_tree(draft, root, source.name, spell=lambda path: f"{_PREFIX}{path}")
    draft.faults += _form(source, root, strict=draft.framework != DEEPSPEED)
    settle(draft)


def settle(draft: Draft) -> None:
    """Judge the section's values as DeepSpeed does; for dialects that write an inline section themselves.

    In the sections that refuse unknown names, `"auto"` is dropped before anything is checked, so it fits.
    """
    section = draft.get(_ZERO)
    if section is not None and isinstance(section.value, bool):
        draft.set_key(f"{_ZERO}.stage", int(section.value), section.written, section.place)
    tuned = draft.get(f"{_PREFIX}autotuning.enabled")
    if tuned is not None and tuned.value is True:  # a list is for the autotuner to try
        for setting in draft.below(f"{_ZERO}."):
            if isinstance(setting.value, list):
                draft.leave_open(setting.key)
    for setting in draft.below(_PREFIX):
        if isinstance(setting.value, str) and _PLACEHOLDER.fullmatch(setting.value):
            draft.leave_open(setting.key)
        elif isinstance(setting.value, str) and (key := draft.table.by_name.get(setting.key)) is not None:
            whole = as_pydantic(key.type_in(DEEPSPEED), setting.value)
            if whole is not setting.value:
                draft.set_key(setting.key, whole, setting.written, setting.place)
    draft.judge(
        _PREFIX, lambda setting, expected: _expected(draft.table.by_name.get(setting.key), setting, expected)
    )


def follow(draft: Draft, named: Setting, folders: Sequence[Path]) -> bool:
    """Write the DeepSpeed file that the value of `named` is the path of; return whether it is there.

    It is looked for in `folders` and in the working folder.
    """
    found = find(str(named.value), folders)
    if found is not None:
        write_file(draft, found)
    return found is not None


def follow_or_settle(draft: Draft, key: str, folders: Sequence[Path]) -> None:
    """Follow the file named by the canonical `key`, or judge the mapping in place of a path.

    For a Trainer's `deepspeed` argument, which takes either (`HfTrainerDeepSpeedConfig(config_file_or_dict)`).
    """
    named = draft.get(key)
    if named is not None and isinstance(named.value, str) and named.value:
        if not follow(draft, named, folders):
            leave_open(draft, named)
    elif draft.is_open(key):
        draft.section_may_be_set(DEEPSPEED)
    else:
        settle(draft)


def take_accumulation(draft: Draft) -> None:
    """Give an accumulation that the section leaves to its Trainer the value of the Trainer's argument.

    It says "auto", or cannot be read, and the Trainer refuses any other number than its own.
    Source: transformers/integrations/deepspeed.py::HfTrainerDeepSpeedConfig.trainer_config_process.
    """
    key = f"{_PREFIX}{_ACCUMULATION}"
    left, given = draft.get(key), draft.get(_ACCUMULATION)
    if not draft.is_open(key) and (left is None or left.value != "auto"):
        return
    if draft.is_open(_ACCUMULATION):
        draft.leave_open(key)
    elif given is not None:
        draft.set_key(key, given.value, given.written, given.place)


def leave_open(draft: Draft, named: Setting) -> None:
    """Note that the file named by `named` is missing and its settings unknown."""
    draft.missing_files.append(named)
    draft.section_may_be_set(DEEPSPEED)


def _expected(key: Key | None, setting: Setting, expected: str | None) -> str | None:
    """Return DeepSpeed's expected value, or None if it takes this one."""
    value, is_strict = setting.value, setting.key.startswith(_STRICT)
    if setting.key == _ZERO:
        return None if isinstance(value, dict | bool) else "a section"
    if key is None or (is_strict and value == "auto"):
        return None
    kind = key.type_in(DEEPSPEED)
    if value is None:
        is_optional = key.default.get(DEEPSPEED) is None and (is_strict or kind != "dict")
        return (
            None
            if is_optional or key.name in _MAY_BE_NULL
            else f"{'a section' if kind == 'dict' else 'a value'}, not null"
        )
    if key.name in _INTERVALS:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return None if whole else 'a whole number or "auto"'
    if kind in ("int", "float") and isinstance(value, bool):
        return None
    if kind == "int" and isinstance(value, int) and not key.choices:  # pydantic's has no largest one
        return None
    return expected


def _form(source: Source, root: Node, *, strict: bool) -> list[Fault]:
    """Return the keys repeated in one object, and the place where the text is no JSON; `strict` is the reader."""
    faults = []
    pending = [root]
    while pending:
        node = pending.pop()
        for name, child in node.value.items() if isinstance(node.value, dict) else ():
            pending.append(child)
            if child.shadowed:
                lines = ", ".join(str(each.line) for each in (*child.shadowed, child))
                place = Place(source.name, child.line, child.column)
                faults.append(Fault("ds-duplicate-key", f"{name} (lines {lines})", place))
    if source.kind is Kind.JSON and (line := not_json(source.text)):
        rule = "ds-json-strict" if strict else "ds-json-comments"
        faults.append(Fault(rule, f"line {line}", Place(source.name, line, 1)))
    return faults


def not_json(text: str) -> int:
    """Return the first line of `text` that is no JSON, 0 if all of it is."""
    import json

    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.lineno
    except (ValueError, RecursionError):  # a number or a depth beyond the parser, not a matter of form
        return 0
    return 0
