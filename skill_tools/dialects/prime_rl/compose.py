"""Reads prime-rl's TOML: the trainer's model and optimizer, wherever the kind of run has them.

In an RL run, which has [trainer] or [orchestrator], they are below [trainer], and [model] at the top is what trainer
and inference share. In an SFT run they are at the top. Apart because no other lint loads it.
"""

from collections.abc import Sequence

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.prime_rl import PRIME_RL
from skill_tools.errors import UnusableInput

_SHARED = "shared model"
_LISTED = ("model", "optim")
_TRAINS = frozenset({"optim", "scheduler", "data", "max_steps", "ckpt"})  # else it is the inference server's
_FULL = "trainer.model.full_offload"


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order; there is no form of overrides yet that could be read."""
    draft = Draft(PRIME_RL, converts_text=False)
    draft.complete = True
    for source in sources:
        draft.take(source)
        root = single_document(source)
        if source.kind is not Kind.TOML or overrides:
            raise UnusableInput(
                repr(overrides[0]) if overrides else f"{source.name}:1 is {source.kind.value}",
                expected="a TOML configuration of prime-rl",
                attempt="the file behind the @ of `uv run rl @ FILE`",
            )
        _write(draft, root, source.name)
    _settle(draft)
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
    """Write the listed sections of the trainer with their unknown fields, and of the others what rules read."""
    for name, node in entries_of(trainer).items():
        below = f"{path}.{name}"
        if name in _LISTED:
            _write_fields(draft, node, below, below, file)
        elif draft.key(below) is not None:
            draft.set(below, _value(node), Place(file, node.line, node.column))


def _write_fields(draft: Draft, section: Node | None, path: str, spelling: str, file: str) -> None:
    for name, node in entries_of(section).items():
        own, place = f"{spelling}.{name}", Place(file, node.line, node.column)
        if not draft.accepts(own):
            draft.note_unknown(f"{path}.{name}", place, spelling=own)
        elif draft.key(own) is not None:
            draft.set_key(draft.canonical(own), _value(node), f"{path}.{name}", place)
        else:
            _write_fields(draft, node, f"{path}.{name}", own, file)


def _value(node: Node) -> object:
    """Return a value; TOML has no null, so that prime-rl reads the text None as one."""
    return None if node.value == "None" else plain(node)


def _settle(draft: Draft) -> None:
    """Full offload is on as `true` or as a section, be it empty, and off as `false`."""
    full = draft.get(_FULL)
    if full is not None:
        is_on = full.value is not False and full.value is not None
        draft.set_key(_FULL, True if is_on else None, full.written, full.place)
