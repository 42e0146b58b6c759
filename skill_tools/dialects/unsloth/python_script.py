# SPDX-License-Identifier: Apache-2.0
"""Reads Unsloth's two calls in a Python script: the load of the model, and the call that adds adapters.

A number of layers is checked here as both check it: True is no number, and neither is a text but auto.
"""

import ast
from collections.abc import Sequence

from skill_tools.configs.config import Config, Fault, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.python.syntax import last_name
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.unsloth import EMBEDDED, LOAD, PEFT, UNSLOTH
from skill_tools.errors import UnusableInput

_CALLS = {LOAD: "load", PEFT: "peft"}
_LAYERS, _FORMER, _AUTO = "offload_layers", "block_swap_layers", "auto"
_DEPTH = "prefetch_depth"
_VARIABLES = "UNSLOTH_"


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read the one script; raises `UnusableInput` for anything else."""
    if len(sources) != 1 or sources[0].kind is not Kind.PYTHON or overrides:
        raise UnusableInput(
            f"{', '.join(source.name for source in sources) or 'overrides'}: Unsloth is read from one Python script",
            expected="the script that calls FastLanguageModel.from_pretrained",
            attempt="that script alone, without --overrides and --compose",
        )
    draft = Draft(UNSLOTH, embeds=EMBEDDED)
    draft.complete = True
    draft.take(sources[0])
    write_calls(draft, sources[0])
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


def _write_environment(draft: Draft, source: Source) -> None:
    """Write what the script puts into `os.environ`; a value that no constant states, or under a condition, is open."""
    guarded = {
        id(inside)
        for node in ast.walk(source.module)
        if isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test)
        for inside in ast.walk(node)
    }
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
        if last_name(where) == "environ" and name.startswith(_VARIABLES):
            is_known = isinstance(value, ast.Constant) and id(node) not in guarded
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
