"""`optimizer.state`: each parameter's state by name, read and written where it lives.

A parameter's state may stand in several buckets and partly on the device. Here it looks like the entries of any
`torch.optim.Optimizer.state`, so that code which knows nothing of offloading (distributed checkpoints, Megatron's
distributed optimizer) finds what it expects. Nothing is stored here. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from reference_impl.optimizers.layout import MASTER, STEP, Member


class StateParts(Protocol):
    """Where the states of members are. `name` is a moment or `master_param`."""

    def steps(self, member: Member) -> Sequence[torch.Tensor]:
        """Return a member's step counters (fp32, 0-dim), all equal, the CPU's first."""

    def views(self, member: Member, name: str) -> Iterable[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of each part that can be written in place."""

    def copies(self, member: Member, name: str) -> Iterable[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part that streams."""

    def write_streamed(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace the parts that stream by those of `value` (fp32, of the member's shape)."""


# Waits until no update of the given members runs, and returns where their states are; RuntimeError when closed.
FinishedParts = Callable[[Iterable[Member]], StateParts]


class ParameterState(Mapping[str, torch.Tensor]):
    """One parameter's `step`, moments and, where it has one of its own, `master_param`.

    A state that stands in one place is returned as a view of it, in the parameter's shape; of one that stands in
    several (a parameter split between buckets or tiers) or streams a copy is returned. Assigning writes to all places.

    Args:
        member: the parameter.
        names: what it shows, in order; `master_param` may be written even if it is not among them.
        finished: see `FinishedParts`.
    """

    def __init__(self, member: Member, names: tuple[str, ...], finished: FinishedParts) -> None:
        self._member = member
        self._names = names
        self._finished = finished

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that a state_dict has."""
        return iter(self._names)

    def __len__(self) -> int:
        """Count the names."""
        return len(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a state once running updates of the parameter are done."""
        if name not in self._names:
            raise KeyError(name)
        parts = self._finished([self._member])
        if name == STEP:
            return parts.steps(self._member)[0]
        views = list(parts.views(self._member, name))
        if len(views) == 1 and not self._member.streamed:
            local = self._member.param_local
            return self._sharded(views[0][1].as_strided(local.shape, self._member.stride))
        return self.copied(name)

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Write a state, converted to fp32, to wherever it stands.

        Names that are not known are passed over: Megatron writes offsets of its buffers among the states.
        """
        if name not in (*self._names, MASTER):
            return
        parts = self._finished([self._member])
        if name == STEP:
            for step in parts.steps(self._member):
                step.fill_(float(value))
            return
        value = value.to_local() if isinstance(value, DTensor) else value
        whole = self._like(device=value.device)
        whole.copy_(value.expand(whole.shape))
        for start, part in parts.views(self._member, name):
            part.copy_(self._member.flat(whole)[start : start + part.numel()])
        if self._member.streamed:
            parts.write_streamed(self._member, name, whole)

    def copied(self, name: str) -> torch.Tensor:
        """Return a state as a tensor of its own, on the CPU where any of it is there."""
        parts = self._finished([self._member])
        if name == STEP:
            return parts.steps(self._member)[0].clone()
        on_host = self._member.pieces or self._member.streamed
        whole = self._like(device=torch.device("cpu") if on_host else self._member.param.device)
        for start, part in (*parts.views(self._member, name), *parts.copies(self._member, name)):
            self._member.flat(whole)[start : start + part.numel()].copy_(part)
        return self._sharded(whole)

    def _sharded(self, local: torch.Tensor) -> torch.Tensor:
        """Return `local` as a shard like the parameter's, so that a distributed checkpoint saves all of them."""
        param = self._member.param
        if not isinstance(param, DTensor):
            return local
        meta = TensorMeta(param.shape, param.stride(), local.dtype)
        # `DTensor.from_local` would move the state to the mesh's device.
        return DTensor(local, DTensorSpec(param.device_mesh, param.placements, meta), requires_grad=False)

    def _like(self, *, device: torch.device) -> torch.Tensor:
        return torch.empty_like(self._member.param_local, dtype=torch.float32, device=device)


class OptimizerState(Mapping[torch.Tensor, ParameterState]):
    """Parameter → `ParameterState`, for every parameter that has taken a step.

    With `lists_everyone` every trained parameter is in it, with or without a step.

    Args:
        members: the trained parameters; more may be added later.
        moments: the algorithm's states by name.
        finished: see `FinishedParts`.
        masters_of_all: fp32 parameters, which are their own masters, show a `master_param` too.
    """

    def __init__(
        self,
        members: Mapping[torch.Tensor, Member],
        moments: tuple[str, ...],
        finished: FinishedParts,
        *,
        masters_of_all: bool,
    ) -> None:
        self.members = members
        self.moments = moments
        self.lists_everyone = False
        self._finished = finished
        self._masters_of_all = masters_of_all

    def __getitem__(self, param: torch.Tensor) -> ParameterState:
        """Return a parameter's state, also before its first step."""
        member = self.members[param]
        shows_master = param.dtype != torch.float32 or self._masters_of_all
        names = (STEP, *self.moments, MASTER) if shows_master else (STEP, *self.moments)
        return ParameterState(member, names, self._finished)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over parameters with a step; the device's counters are read at once, with one wait."""
        listed = list(self.members.values())
        stepped = set(listed) if self.lists_everyone else self._stepped(listed)
        return (member.param for member in listed if member in stepped)

    def __len__(self) -> int:
        """Count them."""
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        """Return whether iterating would yield `param`; waits for no other parameter."""
        member = self.members.get(param) if isinstance(param, torch.Tensor) else None
        return member is not None and (self.lists_everyone or bool(self._stepped([member])))

    def _stepped(self, members: Sequence[Member]) -> set[Member]:
        """Return those of `members` that have taken a step."""
        parts = self._finished(members)
        counters: defaultdict[torch.device, list[tuple[Member, torch.Tensor]]] = defaultdict(list)
        for member in members:
            step = parts.steps(member)[0]
            counters[step.device].append((member, step))
        found: set[Member] = set()
        for listed in counters.values():
            counts = torch.stack([step for _, step in listed]).tolist()
            found.update(member for (member, _), count in zip(listed, counts, strict=True) if count > 0)
        return found
