# SPDX-License-Identifier: Apache-2.0
"""Reads the line of a Python script that has this project offload: `offload(trainer, ...)`, or `offload_callback(...)`.

Its words are kept under `offload_call`, a name that no argument of a Trainer has.
"""

import ast
from collections.abc import Iterator, Sequence

from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction
from skill_tools.configs.python.syntax import last_name
from skill_tools.configs.source import Source
from skill_tools.configs.values import UNREADABLE

_OFFLOAD = "offload"
_CALLBACK = "offload_callback"
_CALL = "offload_call"
_MODULES = ("cpu_offloading.integrations.transformers", "reference_impl.integrations.transformers")
_WORDS = ("plan", "optimizer", "activations", "weights")


def imported_calls(source: Source) -> frozenset[str]:
    """Return which of our calls a script imports, under their own names."""
    if not any(module in source.text for module in _MODULES):
        return frozenset()
    return frozenset(
        each.name
        for node in ast.walk(source.module)
        if isinstance(node, ast.ImportFrom) and node.module in _MODULES
        for each in node.names
        if each.name in (_OFFLOAD, _CALLBACK) and each.asname is None
    )


def write_line(draft: Draft, source: Source, calls: Sequence[Construction]) -> None:
    """Write the words of the script's one call of ours; of several it is not known which is for these arguments."""
    if len(calls) > 1:
        for key in (_CALL, *(f"{_CALL}.{word}" for word in _WORDS)):
            draft.leave_open(key)
        if any(_is_repeated(block) for block in _blocks(source.module)):
            draft.set_key(f"{_CALL}.again", True, _OFFLOAD, calls[-1].place)
    for call in calls if len(calls) == 1 else ():
        draft.set_key(_CALL, call.kind, call.kind, call.place)
        for name, value, place in call.values():
            draft.set_key(f"{_CALL}.{name}", value, name, place)
        for value in call.positional[call.kind == _OFFLOAD :][:1]:
            draft.set_key(f"{_CALL}.plan", value, "plan", call.place)
        if call.is_open or UNREADABLE in call.positional[call.kind == _OFFLOAD :]:
            for word in _WORDS:
                if f"{_CALL}.{word}" not in draft:
                    draft.leave_open(f"{_CALL}.{word}")


def _blocks(module: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield body


def _is_repeated(block: list[ast.stmt]) -> bool:
    """Return whether one block offloads one trainer twice, and neither closes a handle nor makes the name again."""
    offloaded: set[str] = set()
    for statement in block:
        inside = list(ast.walk(statement))
        called = {last_name(node.func) for node in inside if isinstance(node, ast.Call)}
        stored = {
            node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        if "close" in called:
            offloaded.clear()
        offloaded -= stored
        match statement:
            case ast.Expr(value=ast.Call() as call) | ast.Assign(value=ast.Call() as call):
                if last_name(call.func) == _OFFLOAD and call.args and isinstance(call.args[0], ast.Name):
                    if call.args[0].id in offloaded:
                        return True
                    offloaded.add(call.args[0].id)
    return False
