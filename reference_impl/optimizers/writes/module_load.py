# SPDX-License-Identifier: Apache-2.0
"""Writes to weights by others than the optimizer, and the masters that follow: a load of a module, or any write.

There are hooks around a load of a module, and one on each parent module in front of it: a forbidden load is refused
before any module is written. Masters loaded before stay: torch's `set_state_dict` loads the optimizer and then the
model, and a master may hold more than its rounded weight. Any other write is found in the next step, by autograd's
counter; writes of the optimizer move it only by `count_own`. Writes without a sign in counter or address `writes` finds
by comparing weights. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from reference_impl.distributed.mesh import local_of
from reference_impl.memory.absent import is_absent, unanswered
from reference_impl.memory.closing import register_first, register_undoably
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.model_hooks import ModelHook

_Call = Callable[[Sequence[Member]], None]
# Raises if a load is forbidden now. Its arguments are the members of the visited modules, and the ones among them with
# new masters and offloaded gradients.
CheckLoad = Callable[[Sequence[Member], Sequence[Member]], None]


def hook_loads(
    model: nn.Module,
    members: Mapping[torch.Tensor, Member],
    *,
    check: CheckLoad,
    wait: _Call,
    refresh: _Call,
    undo: list[Callable[[], None]],
) -> None:
    """Hook each load of `model` or a module of it, see `ModuleLoad`; `undo` gets the calls that take the hooks off."""
    for module in model.modules():
        inside = _named(module.named_parameters(remove_duplicate=False), members)
        if inside:
            refuse = ModelHook(partial(_check_inside, check, inside))
            # In front of hooks that bring weights for the load: they would not hear of its refusal.
            register_first(
                module.register_load_state_dict_pre_hook, module._load_state_dict_pre_hooks, refuse, undo
            )
        own = owned(module, members)
        if own:
            load = ModuleLoad(own, wait, refresh)
            before, after = ModelHook(load.before), ModelHook(load.after)
            register_undoably(module.register_load_state_dict_pre_hook, before, undo)
            register_undoably(module.register_load_state_dict_post_hook, after, undo)


def owned(module: nn.Module, members: Mapping[torch.Tensor, Member]) -> list[Member]:
    """Return the members that `module` owns itself, without its children's."""
    return list(_named(module._parameters.items(), members).values())


def _named(
    params: Iterable[tuple[str, torch.Tensor | None]], members: Mapping[torch.Tensor, Member]
) -> dict[str, Member]:
    return {name: members[param] for name, param in params if param is not None and param in members}


def _check_inside(
    check: CheckLoad,
    inside: Mapping[str, Member],
    _module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Check a load of a module with the members `inside`, before anything of it is written."""
    values = {member: state_dict.get(prefix + name) for name, member in inside.items()}
    remade = [
        member
        for member, value in values.items()
        if member.arrival is not None and value is not None and not _is_kept(member, value)
    ]
    check(list(values), remade)


class ModuleLoad:
    """A load of one module's own weights: the members `own`, for which `wait` waits and `refresh` makes masters."""

    def __init__(self, own: Sequence[Member], wait: _Call, refresh: _Call) -> None:
        self._own, self._wait, self._refresh = own, wait, refresh
        self._named: list[Member] = []
        self._kept: list[Member] = []
        self._versions: dict[Member, int] = {}

    def before(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Wait for the weights; find the ones in `state_dict`, and the ones among them with a loaded master."""
        self._wait(self._own)
        names = {id(param): name for name, param in module._parameters.items()}
        values = {member: state_dict.get(prefix + names.get(id(member.param), "")) for member in self._own}
        self._versions = {member: _version(member) for member in self._own}
        self._named = [member for member, value in values.items() if value is not None]
        self._kept = [member for member in self._named if _is_kept(member, values[member])]

    def after(self, *_: Any) -> None:
        """Make masters of the written weights, but for kept ones."""
        # Somebody else's hook may have renamed keys.
        own = [
            member
            for member in self._own
            if member not in self._kept
            and (member in self._named or _version(member) != self._versions[member])
        ]
        for member in self._kept:
            member.loaded_version = _version(member)
        if own:
            self._refresh(own)
        for member in own:
            member.note_weight()


def written(members: Iterable[Member]) -> list[Member]:
    """Return the `members` with weights written by other code since their masters were the same."""
    # A weight on its way would be asked about its arrival: each forward asks every weight.
    return unanswered(_written, members)


def _written(members: Iterable[Member]) -> list[Member]:
    return [
        member
        for member in members
        if (weight := member.watched) is not None
        # Where its bytes are elsewhere nobody writes them, and a parked one has another version meanwhile.
        and not is_absent(weight)
        and (weight._version != member.version or weight.data_ptr() not in (member.address, 0))
    ]


def count_own(members: Iterable[Member], all_members: Iterable[Member]) -> None:
    """Let autograd count that an update has begun to write the weights of `members`: no older graph may use them.

    Weights that torch's fused kernel writes in place are not counted, as with torch's fused optimizers. Slices of one
    buffer have one counter: it moves for those of `all_members` that are not updated too.
    """
    unwritten = set(all_members).difference(written(all_members))
    counted = [
        (member, member.watched)
        for member in members
        if member.watched is not None and (member.pieces or member.dtype != torch.float32)
    ]
    torch.autograd.graph.increment_version([weight for _, weight in counted])
    unanswered(_note_versions, unwritten.union(member for member, _ in counted))


def _note_versions(members: Iterable[Member]) -> None:
    for member in members:
        if member.watched is not None:
            member.version = member.watched._version


def written_on_its_way(member: Member) -> RuntimeError:
    """Return the error for a weight written between `step()` and the forward that waits for its new value."""
    return RuntimeError(
        f"a weight of shape {tuple(member.param.shape)} was written after step(), while its new value was on the way; "
        "expected it to stay until the next forward, or until the optimizer has finished; try optimizer.synchronize() "
        "before writing it"
    )


def set_weight(member: Member, master: torch.Tensor) -> bool:
    """Set the weight to a loaded `master`, rounded; False for one that is parked, which follows in the next step."""
    if not _is_settable(member):
        return False
    if not _rounds_to_weight(master, member):
        member.weight.copy_(local_of(master))
        if member.home is None:
            # No graph of before may use it.
            torch.autograd.graph.increment_version([member.param_local])
    return True


def note_loaded(member: Member, master: Any, *, is_set: bool) -> None:
    """Note that a state was loaded, with a `master` or None, and whether the weight `is_set` to it; else it follows."""
    member.note_weight()
    has_own = master is not None and member.dtype != torch.float32
    belongs = has_own and (is_set or (_is_settable(member) and _rounds_to_weight(master, member)))
    member.is_apart = has_own and not belongs
    member.loaded_version = _version(member) if belongs else None


def _is_settable(member: Member) -> bool:
    return member.home is not None or not (is_absent(member.param_local) or member.param_local.is_inference())


def _is_kept(member: Member, value: Any) -> bool:
    """Return whether the loaded master of `member` stays when `value` is loaded as its weight."""
    return member.loaded_version == _version(member) and _rounds_to_weight(value, member)


def _rounds_to_weight(value: Any, member: Member) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    value, weight = value.to_local() if isinstance(value, DTensor) else value, member.weight
    # Where the value is: the device may be full.
    return value.shape == weight.shape and torch.equal(value.to(weight.dtype), weight.to(value.device))


def _version(member: Member) -> int:
    """Return a number that changes when the weight is written; -1 for an uncounted weight."""
    weight = member.param_local if member.home is None else member.weight
    return -1 if weight.is_inference() else weight._version
