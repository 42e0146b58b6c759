# SPDX-License-Identifier: Apache-2.0
"""The groups that FSDP2 gathers: their memory, their stream, and their state.

FSDP2 gathers each module's parameters on streams of its own, ahead of the module. An optimizer with asynchronous
writes to shards needs this stream. Code that keeps shards elsewhere has to hand them over there. torch has no public
names for either. This is the only module that uses private names of `torch.distributed.fsdp`; `missing_name` and
`missing_shard_name` name the one that a release of torch lacks. All are the same in torch 2.11, 2.12 and 2.13, except
that a state has either one group or several; the sources of 2.14.1 and 2.15.0 have them all.

Explained in docs/distributed.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_GET_STATE, _CONTEXT, _PREFETCHED = "_get_fsdp_state", "_comm_ctx", "_states_to_forward_prefetch"
_STREAM, _LAZY_INIT = "all_gather_copy_in_stream", "lazy_init"
_ONE_GROUP, _GROUPS = "_fsdp_param_group", "_fsdp_param_groups"
_IS_SHARDED, _PENDING = "is_sharded", "_all_gather_result"
_SHARDS, _PARAM, _MEMORY, _PADDED = (
    "fsdp_params",
    "sharded_param",
    "_sharded_param_data",
    "padded_sharded_param_size",
)
_TAKE_OVER, _LOOK_FOR_EXTENSIONS = "reset_sharded_param", "_init_extensions"
_SHARDED_MODULES = "_module_state_mapping"
_RESHARDS_ELSEWHERE = "_use_post_forward_mesh"

# Returns a shard, padded and flat, on the device, for a gather on the live current stream.
Read = Callable[[], torch.Tensor]


class GatheredGroup:
    """Modules whose parameters FSDP2 gathers together: one, or a list given to `fully_shard`.

    `is_outermost`: no sharded module is above them.
    """

    def __init__(self, state: Any, modules: list[nn.Module], *, is_outermost: bool) -> None:
        self._state = state
        self.modules = tuple(modules)
        self.is_outermost = is_outermost

    @property
    def params(self) -> tuple[torch.Tensor, ...]:
        """The sharded parameters (DTensors) of these modules, without those of separately sharded modules.

        Modules show them as long as nothing is gathered.
        """
        return tuple(dict.fromkeys(param for module in self.modules for param in _own_shards(module)))

    @property
    def key(self) -> object:
        """A key of this group, hashable."""
        return self._state

    @property
    def prefetched(self) -> Sequence[object]:
        """The keys of the groups that the forward of these modules gathers, too (`set_modules_to_forward_prefetch`)."""
        keys: Sequence[object] = getattr(self._state, _PREFETCHED)
        return keys

    @property
    def stream(self) -> Any | None:
        """The stream on which shards are read for a gather; None before the first forward.

        The root makes the streams then, and lets them wait for the current stream. They may be others afterwards: the
        first module that runs is the root.
        """
        return getattr(getattr(self._state, _CONTEXT), _STREAM, None)

    @property
    def is_gathered(self) -> bool:
        """Whether something else than the shards stands on the modules, or is on its way there."""
        return any(
            not getattr(group, _IS_SHARDED) or self._is_pending(group) for group in _groups(self._state)
        )

    def drop_gathered(self) -> None:
        """Go back to the shards, so that the next forward gathers them anew. A collective if a gather is pending."""
        module: Any = self.modules[0]
        if any(map(self._is_pending, _groups(self._state))):
            module.unshard()
        module.reshard()

    @staticmethod
    def _is_pending(group: Any) -> bool:
        return getattr(group, _PENDING) is not None


class Shard:
    """This rank's shard of one parameter, and the memory that gathers read it from."""

    def __init__(self, shard: Any) -> None:
        self._shard = shard
        # As FSDP2 does before its first forward: the model may have been loaded or moved since it was sharded.
        getattr(shard, _TAKE_OVER)()
        self.param: DTensor = getattr(shard, _PARAM)
        self.local: torch.Tensor = self.param._local_tensor
        # The shard with its padding: flat, in the parameter's dtype, on the mesh's device, in a storage of its own.
        self.memory: torch.Tensor = getattr(shard, _MEMORY)
        if self.memory.untyped_storage().nbytes() != self.memory.nbytes:
            self.memory = self.memory.clone()
            self.local = self.memory[: self.local.numel()].view(self.local.shape)
            self.param._local_tensor = self.local
            setattr(shard, _MEMORY, self.memory)

    @property
    def is_ours(self) -> bool:
        """Whether module and gathers still have this parameter, with this local tensor and memory."""
        shard = self._shard
        memory: torch.Tensor = getattr(shard, _MEMORY)
        same = self.param._local_tensor is self.local and getattr(shard, _PARAM) is self.param
        return same and memory.untyped_storage()._cdata == self.memory.untyped_storage()._cdata

    def serve(self, read: Read, when_read: Callable[[], None]) -> None:
        """Let every gather call `read` instead of reading the memory, until `stop_serving`.

        It calls `when_read` once all reads of the shard are in the stream of `read`.

        This is the protocol that FSDP2 has for tensors of other classes (`fsdp_pre_all_gather`), on the local tensor.
        """
        padded: torch.Size = getattr(self._shard, _PADDED)

        def before(
            mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
        ) -> tuple[tuple[torch.Tensor, ...], None]:
            shard = read()
            dtype = mp_policy.param_dtype if shard.is_floating_point() else None
            return (shard.to(dtype or shard.dtype).view(padded),), None

        def afterwards(
            gathered: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            when_read()
            return gathered[0], ()

        # FSDP2 asks for the parameters of the first in every gather, which takes 0.01 to 0.04 ms if nobody knows them.
        before.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]
        local: Any = self.local
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, afterwards
        getattr(self._shard, _LOOK_FOR_EXTENSIONS)()

    def stop_serving(self) -> None:
        """Let gathers read the memory again, if they do not."""
        own = vars(self.local)
        own.pop("fsdp_pre_all_gather", None)
        own.pop("fsdp_post_all_gather", None)


def shards_by_gather(model: nn.Module) -> list[list[Shard]]:
    """Return the shards that each gather reads, in the order of `model.modules()`; nothing may be gathered.

    Raises ValueError for modules resharded to a smaller mesh after forward: backward would gather the copies kept
    there.
    """
    found = []
    for state in dict.fromkeys(
        getattr(module, _GET_STATE)() for module in model.modules() if isinstance(module, FSDPModule)
    ):
        for group in _groups(state):
            if getattr(group, _RESHARDS_ELSEWHERE):
                raise ValueError(
                    "reshard_after_forward is a number of ranks, which keep copies of the shards on the device; "
                    "expected True or False; try reshard_after_forward=True"
                )
            found.append([Shard(shard) for shard in getattr(group, _SHARDS)])
    return [shards for shards in found if shards]


def reductions() -> dict[torch.Tensor, object]:
    """Return for each sharded parameter of this process a key of its reduction, hashable.

    One reduction makes the gradients of all its parameters in one buffer, freed with the last of them. Where this torch
    has other private names, nothing is known of any parameter.
    """
    known: list[nn.Module] = list(getattr(_composable_state, _SHARDED_MODULES, ()))
    if any(missing_shard_name(module) is not None for module in known):
        return {}
    return {
        getattr(shard, _PARAM): group
        for module in known
        if isinstance(module, FSDPModule)
        for group in _groups(getattr(module, _GET_STATE)())
        for shard in getattr(group, _SHARDS)
    }


def gathered_groups(model: nn.Module) -> list[GatheredGroup]:
    """Return the groups that are gathered together, in the order of `model.modules()`.

    Gathered groups are dropped first: modules would not show their shards.
    """
    modules: dict[Any, list[nn.Module]] = {}
    nested: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            modules.setdefault(getattr(module, _GET_STATE)(), []).append(module)
            nested.update(each for each in module.modules() if each is not module)
    groups = [
        GatheredGroup(state, its, is_outermost=not any(module in nested for module in its))
        for state, its in modules.items()
    ]
    for group in groups:
        if group.is_gathered:
            group.drop_gathered()
    return groups


def missing_name(model: nn.Module) -> str | None:
    """Return a private name of this module that torch lacks here; None if it has all."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if not hasattr(module, _GET_STATE):
            return _GET_STATE
        state = getattr(module, _GET_STATE)()
        for name in (_CONTEXT, _PREFETCHED):
            if not hasattr(state, name):
                return name
        # The stream does not exist before the first forward, but who makes it names it.
        made = getattr(getattr(type(getattr(state, _CONTEXT)), _LAZY_INIT, None), "__code__", None)
        if made is None or _STREAM not in made.co_names:
            return _STREAM
        if not hasattr(state, _GROUPS) and not hasattr(state, _ONE_GROUP):
            return _GROUPS
        for group in _groups(state):
            for name in (_IS_SHARDED, _PENDING):
                if not hasattr(group, name):
                    return name
    return None


def missing_shard_name(model: nn.Module) -> str | None:
    """Return a private name of `Shard` that torch lacks here; None if it has all."""
    missing = missing_name(model)
    if missing is not None:
        return missing
    for module in model.modules():
        for group in _groups(getattr(module, _GET_STATE)()) if isinstance(module, FSDPModule) else ():
            for name in (_SHARDS, _RESHARDS_ELSEWHERE):
                if not hasattr(group, name):
                    return name
            for shard in getattr(group, _SHARDS):
                for name in (_PARAM, _MEMORY, _PADDED, _TAKE_OVER, _LOOK_FOR_EXTENSIONS):
                    if not hasattr(shard, name):
                        return name
    return None


def _groups(state: Any) -> list[Any]:
    """Return the groups that a state gathers: nothing, one group, or since torch 2.12 one for each mesh."""
    if hasattr(state, _GROUPS):
        return list(getattr(state, _GROUPS))
    group = getattr(state, _ONE_GROUP)
    return [] if group is None else [group]


def _own_shards(module: nn.Module) -> Iterator[torch.Tensor]:
    for param in module._parameters.values():
        if isinstance(param, DTensor):
            yield param
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_shards(child)
