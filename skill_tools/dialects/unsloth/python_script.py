# SPDX-License-Identifier: Apache-2.0
"""Reads Unsloth's two calls in a Python script, load and adapters, and its variables, which send optimizer states away.

A number of layers is checked here as both check it: True is no number, and neither is a text but auto.
"""

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Fault, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.python.syntax import last_name
from skill_tools.configs.source import Source, only_script
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects import fields
from skill_tools.dialects.unsloth import EMBEDDED, LOAD, PEFT, UNSLOTH

if TYPE_CHECKING:  # a lint builds no run
    from skill_tools.dialects.run import TrainingRun

_CALLS = {LOAD: "load", PEFT: "peft"}
_LAYERS, _FORMER, _AUTO = "offload_layers", "block_swap_layers", "auto"
_DEPTH = "prefetch_depth"
SWITCH = "env.UNSLOTH_OFFLOAD_OPTIMIZER_STATE"
_CHUNK_MB, _ALL_MB = 1024.0, 1 << 42
# Parts of names of optimizers outside torch, bitsandbytes and transformers, whose states come all at once.
_AT_ONCE = ("schedule_free", "galore", "apollo", "lomo", "grokadamw", "stable_adamw")
_NOT_TAKEN = ("paged_", "adamw_torch_8bit", "adamw_torch_4bit")  # us-states-paged, us-states-quantized


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read the one script; raises `UnusableInput` for anything else."""
    source = only_script(sources, overrides, "Unsloth", "that calls FastLanguageModel.from_pretrained")
    draft = Draft(UNSLOTH, embeds=EMBEDDED)
    draft.complete = True
    draft.take(source)
    write_calls(draft, source)
    return draft.finish()


def write_calls(draft: Draft, source: Source) -> None:
    """Write the arguments of each of the two calls; a call that the script makes twice, or never, says nothing."""
    _write_environment(draft, source)
    of_classes = _places(source)
    made = [each for each in constructions(source, _CALLS) if each.place in of_classes]
    for name, section in _CALLS.items():
        calls = [each for each in made if each.kind == name]
        if len(calls) == 1:
            draft.set_key(f"unsloth.{section}.called", True, name, calls[0].place)
            _write(draft, section, calls[0])
        elif calls:
            draft.may_be_set(f"unsloth.{section}.")


def remarks(config: Config) -> tuple[str, ...]:
    """Say which layers wait on the host, as neither their bytes nor their copies are in a plan."""
    given = [config.value(f"unsloth.{section}.{_LAYERS}") for section in ("load", "peft")]
    layers = next((each for each in given if each), None)
    if layers is None:
        return ()
    which = "as many layers as it takes" if layers == _AUTO else f"{layers} decoder layers"
    return (f"Unsloth keeps {which} on the host (offload_layers); this plan counts all of them on the GPU",)


def states_leave(config: Config) -> bool:
    """Whether the variable sends optimizer states to the host, but for a chunk during its update."""
    return (fields.text(config, SWITCH) or "").strip().lower() in ("1", "true", "yes", "on")


def visiting_states(config: Config, run: "TrainingRun") -> dict[str, object]:
    """Return that as fields of a mode: none but for a model that Unsloth loads and a Trainer trains whole."""
    optimizer = fields.text(config, "optimizer") or ""
    is_left = run.adapter is not None or config.value("deepspeed") or optimizer.startswith(_NOT_TAKEN)
    if is_left or not fields.flag(config, "unsloth.load.called"):
        return {}
    try:
        chunk_mb = float(fields.text(config, f"{SWITCH}_CHUNK_MB") or _CHUNK_MB)
    except ValueError:
        chunk_mb = _CHUNK_MB
    if not 0 < chunk_mb < _ALL_MB or any(
        part in optimizer for part in _AT_ONCE
    ):  # not a number is no limit either
        chunk_mb = _ALL_MB
    return {"state_offload": True, "state_chunk_bytes": round(chunk_mb * (1 << 20))}


def _write_environment(draft: Draft, source: Source) -> None:
    """Write what the script puts into `os.environ`; a constant in the outermost block is known."""
    for node in ast.walk(source.module):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=where, slice=ast.Constant(str(name)))], value=value):
                pass
            case ast.Call(
                func=ast.Attribute(value=where, attr="setdefault"), args=[ast.Constant(str(name)), value]
            ):
                pass
            case _:
                continue
        if last_name(where) == "environ" and f"env.{name}".startswith(SWITCH):
            is_known = isinstance(value, ast.Constant) and not node.col_offset
            place = Place(source.name, node.lineno, node.col_offset + 1)
            draft.set_environment(name, ast.literal_eval(value) if is_known else UNREADABLE, place)


def _places(source: Source) -> set[Place]:
    """Return where the script calls either by a class of Unsloth's: FastLanguageModel, FastModel, FastVisionModel."""
    return {
        Place(source.name, node.lineno, node.col_offset + 1)
        for node in ast.walk(source.module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.startswith("Fast")
    }


def _write(draft: Draft, section: str, call: Construction) -> None:
    if call.is_open:
        draft.may_be_set(f"unsloth.{section}.")
    given = {name: (value, place) for name, value, place in call.values()}
    former = given.pop(_FORMER, None)
    if former is not None and given.get(_LAYERS, (None, None))[0] is None:
        given[_LAYERS] = former
    for name, (value, place) in given.items():
        key = f"unsloth.{section}.{name}"
        if name == _LAYERS and value is not UNREADABLE:
            value = _layers(draft, value, place)
        elif name == _DEPTH and value is not UNREADABLE and value != _AUTO and not _counts(value, least=1):
            draft.faults.append(Fault("us-prefetch-depth", f"{name}={value!r}", place))
        if key in draft.table.by_name:
            draft.set_key(key, value, name, place)


def _layers(draft: Draft, value: object, place: Place) -> object:
    """Return a number of layers, or auto; note any other value, which ends the run. None and False are 0."""
    if value is None or value is False:
        return 0
    if value != _AUTO and not _counts(value, least=0):
        draft.faults.append(Fault("us-layers-value", f"{_LAYERS}={value!r}", place))
        return 0
    return value


def _counts(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
