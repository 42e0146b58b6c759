# SPDX-License-Identifier: Apache-2.0
"""Reads a Python script that shards by FSDP2: its policy, the backends of its process group, clipping, and threads.

Several models may be sharded in one script, each with a policy of its own; a policy counts if all models with a policy
share it. A process group that is made elsewhere, or of a computed backend, may have any.
"""

import ast
from collections.abc import Sequence

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.python.syntax import dotted_name, last_name
from skill_tools.configs.python.values import Section, plain
from skill_tools.configs.source import Source, only_script
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.fsdp2 import FSDP2, POLICY, SHARDS

_GROUP, _CLIP = "init_process_group", "clip_grad_norm_"
_HOOK = "register_post_accumulate_grad_hook"
_OURS = ("HybridDeviceOptimizer", "OptimizerStateOffloader", "ShardStreamer")
_BACKEND = "fsdp2.backend"
_THREADS = ("OMP_NUM_THREADS", "set_num_threads")


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read the one script; raises `UnusableInput` for anything else."""
    source = only_script(sources, overrides, "FSDP2", "that calls fully_shard")
    draft = Draft(FSDP2)
    draft.complete = True
    draft.take(source)
    made = constructions(source, {SHARDS, POLICY, _GROUP, _CLIP, _HOOK, *_OURS})
    _write_policy(draft, [each for each in made if each.kind == SHARDS])
    _write_backend(draft, [each for each in made if each.kind == _GROUP])
    for key, call in (("fsdp2.clips", _CLIP), ("fsdp2.grad_hooks", _HOOK)):
        for each in [each for each in made if each.kind == call][:1]:
            draft.set_key(key, True, call, each.place)
    _write_mixed(draft, source)
    draft.set_key(
        "fsdp2.threads", any(name in source.text for name in _THREADS), _THREADS[0], Place(source.name, 1, 1)
    )
    if any(name in source.text for name in ("cpu_offloading", "reference_impl")):
        for each in [each for each in made if each.kind in _OURS][:1]:
            draft.set_key("fsdp2.beside", each.kind, each.kind, each.place)
    return draft.finish()


def _write_policy(draft: Draft, calls: Sequence[Construction]) -> None:
    """Write whether the calls offload; left open if computed, or if calls differ."""
    given = [
        each.section.fields["offload_policy"][-1] for each in calls if "offload_policy" in each.section.fields
    ]
    is_open = any(each.is_open for each in calls)
    policies = {value.made_by if isinstance(value, Section) else value for value, _ in given}
    if is_open or len(policies) > 1 or UNREADABLE in policies:
        draft.leave_open("fsdp2.offload_policy")
    elif policies == {POLICY}:
        draft.set_key("fsdp2.offload_policy", True, "offload_policy", given[0][1])
        for value, place in given:
            if isinstance(value, Section) and "pin_memory" in value.fields:
                draft.set_key("fsdp2.pins", plain(value.fields["pin_memory"][-1][0]), "pin_memory", place)


def _write_mixed(draft: Draft, source: Source) -> None:
    """Write whether one call clips all parameters of a module that `fully_shard` is to leave some of.

    It is open if those are computed elsewhere, or if the script freezes parameters: they have no gradient.
    """
    calls = [node for node in ast.walk(source.module) if isinstance(node, ast.Call) and node.args]
    ignored = {
        dotted_name(call.args[0]): option.value
        for call in calls
        if last_name(call.func) == SHARDS
        for option in call.keywords
        if option.arg == "ignored_params" and not isinstance(option.value, ast.Constant)
    }
    for call in calls:
        if last_name(call.func) != _CLIP or not isinstance(call.args[0], ast.Call):
            continue
        module, _, method = dotted_name(call.args[0].func).rpartition(".")
        if method != "parameters" or module not in ignored:
            continue
        if (
            isinstance(ignored[module], ast.Call | ast.Set | ast.SetComp)
            and "requires_grad" not in source.text
        ):
            place = Place(source.name, call.lineno, call.col_offset + 1)
            draft.set_key("fsdp2.clips_mixed", True, _CLIP, place)
        else:
            draft.leave_open("fsdp2.clips_mixed")


def _write_backend(draft: Draft, calls: Sequence[Construction]) -> None:
    """Write the backend of the one process group; without one it is torch's choice."""
    named = [
        next((value for name, value, _ in each.values() if name == "backend"), None)
        or next(iter(each.positional), UNREADABLE)
        for each in calls
    ]
    if len(calls) == 1 and isinstance(named[0], str):
        draft.set_key(_BACKEND, named[0], "backend", calls[0].place)
    else:
        draft.leave_open(_BACKEND)
