# SPDX-License-Identifier: Apache-2.0
"""Reads a Python script that wraps its model in FSDP1: its offloads, how often the loop steps, its clipping.

Facts: torch/distributed/fsdp/fully_sharded_data_parallel.py, _init_utils.py and _runtime_utils.py of torch 2.13.
"""

import ast
from collections.abc import Iterator, Sequence

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.python.syntax import dotted_name, last_name
from skill_tools.configs.source import Source, only_script
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.fsdp1 import FSDP1, OFFLOAD, WRAPPER

_POSITION_OF_OFFLOAD = 3  # among the positional arguments of the wrapper, the module first
_CLIP = "clip_grad_norm_"
_APART = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def wraps(text: str) -> bool:
    """Return whether a text calls the wrapper, under whatever name it imports it; no text of others does."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = _names(module)
    return any(isinstance(node, ast.Call) and last_name(node.func) in names for node in ast.walk(module))


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read the one script; raises `UnusableInput` for anything else."""
    source = only_script(sources, overrides, "FSDP1", f"that calls {WRAPPER}")
    draft = Draft(FSDP1)
    draft.complete = True
    draft.take(source)
    names = _names(source.module)
    every = constructions(source, {*names, OFFLOAD})
    _write_wrapping(draft, [each for each in every if each.kind in names], every)
    _write_loop(draft, source)
    return draft.finish()


def _names(module: ast.Module) -> set[str]:
    """Return the names that a module has for the wrapper."""
    imported = (node.names for node in ast.walk(module) if isinstance(node, ast.ImportFrom))
    return {WRAPPER} | {
        each.asname for names in imported for each in names if each.name == WRAPPER and each.asname
    }


def _write_wrapping(draft: Draft, calls: Sequence[Construction], every: Sequence[Construction]) -> None:
    """Write whether the calls offload, and their devices; left open if computed."""
    offloads = [(_offloads(each, every), each.place) for each in calls]
    known = [each for each in offloads if each[0] is not None]
    if any(value is UNREADABLE for value, _ in offloads):
        draft.leave_open("fsdp1.offload_params")
    elif any(value for value, _ in known):
        place = next(place for value, place in known if value)
        draft.set_key("fsdp1.offload_params", True, "offload_params", place)
    for name in ("sync_module_states", "device_id"):
        given = [(value, place) for each in calls for key, value, place in each.values() if key == name]
        for value, place in given[:1]:
            if name == "device_id":
                draft.set_key("fsdp1.device_id", value is not None, name, place)
            else:
                draft.set_key("fsdp1.sync_module_states", value, name, place)
    if any(each.is_open for each in calls):
        draft.keys_may_be_set(("fsdp1.offload_params", "fsdp1.sync_module_states", "fsdp1.device_id"))


def _offloads(call: Construction, every: Sequence[Construction]) -> object:
    """Return whether one call offloads; None where it says nothing."""
    given = call.section.fields.get("cpu_offload", ())
    value: object = given[-1][0] if given else None
    if value is None and len(call.positional) > _POSITION_OF_OFFLOAD:
        value = call.positional[_POSITION_OF_OFFLOAD]
    if value is None:
        return None
    offloads = [each for each in every if each.kind == OFFLOAD]
    made = next((each for each in offloads if each.section is value), None)
    if (
        made is None and not given and len(offloads) == 1
    ):  # an object among positional arguments is not told apart
        (made,) = offloads
    if made is None:
        return UNREADABLE
    params = [each for name, each, _ in made.values() if name == "offload_params"] or list(made.positional)
    return params[-1] if params else False


def _write_loop(draft: Draft, source: Source) -> None:
    """Write whether several backwards come before one step, and which function clips."""
    for backward in _accumulating(source.module):
        draft.set_key("fsdp1.accumulates", True, "backward", _place(source, backward))
        break
    calls = [node for node in ast.walk(source.module) if isinstance(node, ast.Call)]
    for node in calls:
        if last_name(node.func) == "no_sync":
            draft.set_key("fsdp1.no_sync", True, "no_sync", _place(source, node))
        elif _is_of_utils(node):
            draft.set_key("fsdp1.clips_by_utils", True, _CLIP, _place(source, node))
        elif last_name(node.func) in ("cuda", "to"):
            draft.set_key("fsdp1.moves_model", True, last_name(node.func), _place(source, node))
    if "fsdp1.clips_by_utils" in draft and any(
        last_name(node.func) == _CLIP and not _is_of_utils(node) for node in calls
    ):
        # The wrapper clips by its method, and another model may be meant.
        draft.leave_open("fsdp1.clips_by_utils")


def _is_of_utils(call: ast.Call) -> bool:
    """Return whether a call is that of torch.nn.utils, and not a method of the wrapper."""
    name = dotted_name(call.func)
    return last_name(call.func) == _CLIP and (name == _CLIP or "utils." in name)


def _accumulating(module: ast.Module) -> Iterator[ast.Call]:
    """Yield the backwards in a loop that does not step after each of them.

    It steps at a count, or behind the loop, which then is one over micro-batches.
    """
    for node in ast.walk(module):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            for position, loop in enumerate(block):
                if not isinstance(loop, ast.For | ast.While):
                    continue
                inside = list(_within(loop.body))
                backwards = [each for each, _ in inside if _calls(each, "backward")]
                steps = [tests for each, tests in inside if _steps(each)]
                behind = any(_steps(each) for each, _ in _within(block[position + 1 :]))
                if all(any(map(_counts, tests)) for tests in steps) if steps else behind:
                    yield from (each for each in backwards if isinstance(each, ast.Call))


def _within(
    statements: Sequence[ast.AST], tests: tuple[ast.expr, ...] = ()
) -> Iterator[tuple[ast.AST, tuple[ast.expr, ...]]]:
    """Yield the expressions of statements outside loops and functions of their own, each with the tests around it."""
    for node in statements:
        if isinstance(node, _APART):
            continue
        yield node, tests
        if isinstance(node, ast.If):
            yield from _within([node.test], tests)
            yield from _within([*node.body, *node.orelse], (*tests, node.test))
        else:
            yield from _within(list(ast.iter_child_nodes(node)), tests)


def _steps(node: ast.AST) -> bool:
    return _calls(node, "step") and not _is_scheduler(node)


def _calls(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _is_scheduler(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(
        word in dotted_name(node.func).lower() for word in ("sched", "profiler", "prof.", "bar.")
    )


def _counts(test: ast.expr) -> bool:
    """Return whether a test counts steps: by a remainder other than that of 1, or by a telling name."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return not (isinstance(node.right, ast.Constant) and node.right.value == 1)
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if any(word in name.lower() for word in ("accum", "sync_grad", "is_last", "boundary")):
            return True
    return False


def _place(source: Source, node: ast.expr) -> Place:
    return Place(source.name, node.lineno, node.col_offset + 1)
