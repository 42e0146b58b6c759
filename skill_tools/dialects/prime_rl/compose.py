# SPDX-License-Identifier: Apache-2.0
"""Reads prime-rl's TOML: the trainer's model and optimizer, wherever the kind of run has them.

In an RL run, with [trainer] or [orchestrator], they are below [trainer], and [model] at the top is the model of trainer
and inference. In an SFT run they are at the top. Apart because no other lint loads it.
"""

from collections.abc import Sequence

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.keys import Key
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.values import as_pydantic
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.prime_rl import PRIME_RL
from skill_tools.errors import UnusableInput

_SHARED = "shared model"
_LISTED = ("model", "optim")
_TRAINS = frozenset({"optim", "scheduler", "data", "max_steps", "ckpt"})  # else it is the inference server's
_FULL = "trainer.model.full_offload"  # on as `true` or as a section, be it empty, and off as `false`
_SECTIONS = frozenset({_FULL, "trainer.model.ac", "trainer.model.ac_offloading"})
_OPTIONAL = _SECTIONS | {"trainer.optim.max_norm"}
_LEAST = {
    "trainer.optim.max_norm": 0,
    "trainer.max_concurrent_runs": 1,
    "trainer.model.ac.freq": 1,
    "trainer.model.ac_offloading.max_inflight_activations": 1,
}
_EXPECTED = "a TOML configuration of prime-rl"
_ATTEMPT = "the file behind the @ of `uv run rl @ FILE`"


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order; there is no form of overrides yet that could be read."""
    draft = Draft(PRIME_RL)
    draft.complete = True
    for source in sources:
        draft.take(source)
        root = single_document(source)
        if overrides:
            raise UnusableInput(repr(overrides[0]), expected=_EXPECTED, attempt=_ATTEMPT)
        if source.kind is not Kind.TOML:
            raise source.refused(expected=_EXPECTED, attempt=_ATTEMPT)
        _write(draft, root, source.name)
    return draft.finish()


def _write(draft: Draft, root: Node, file: str) -> None:
    entries = entries_of(root)
    if entries.keys() & {"trainer", "orchestrator"}:
        _write_section(draft, entries.get("trainer"), "trainer", file)
        _write_fields(draft, entries.get("model"), "model", _SHARED, file)
    elif entries.keys() & _TRAINS:
        for name in _LISTED:
            _write_fields(draft, entries.get(name), name, name, file)


def _write_section(draft: Draft, trainer: Node | None, path: str, file: str) -> None:
    """Write the listed sections of the trainer with unknown fields, and of the others the fields that rules read."""
    for name, node in entries_of(trainer).items():
        below = f"{path}.{name}"
        if name in _LISTED:
            _write_fields(draft, node, below, below, file)
        elif draft.key(below) is not None:
            _write_value(draft, draft.canonical(below), node, below, Place(file, node.line, node.column))


def _write_fields(draft: Draft, section: Node | None, path: str, spelling: str, file: str) -> None:
    for name, node in entries_of(section).items():
        own, written, place = f"{spelling}.{name}", f"{path}.{name}", Place(file, node.line, node.column)
        if not draft.accepts(own):
            draft.note_unknown(written, place, spelling=own)
            continue
        if draft.key(own) is not None:
            _write_value(draft, draft.canonical(own), node, written, place)
        _write_fields(draft, node, written, own, file)


def _write_value(draft: Draft, name: str, node: Node, written: str, place: Place) -> None:
    """Write a value as pydantic takes it; TOML has no null, so that prime-rl reads the text None as one.

    A section adds to an earlier file's section; any other value replaces it with all that is below.
    """
    value = None if node.value == "None" else plain(node)
    if not isinstance(value, dict):
        draft.remove_section(written)
    if name == _FULL and isinstance(value, bool | dict):
        value = True if value is not False else None
    key = draft.table.by_name[name]
    draft.set_key(name, as_pydantic(key.type_in(PRIME_RL), value), written, place)
    if draft.refused(name) is None and (expected := _refused(key, draft.get(name))):
        draft.refuse_type(name, expected)


def _refused(key: Key, setting: Setting | None) -> str | None:
    """Return prime-rl's expected value in place of one of the key's type; None if it takes this one."""
    value = setting.value if setting is not None else None
    if value is None:
        return None if key.name in _OPTIONAL else "a value"
    if key.name in _SECTIONS:
        return None if isinstance(value, dict) or (key.name == _FULL and value is True) else "a section"
    least = _LEAST.get(key.name)
    return (
        None if least is None or (isinstance(value, int | float) and value >= least) else f"at least {least}"
    )
