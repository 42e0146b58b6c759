"""`optimizer.state`: each parameter's state by name, read and written where it lives.

A parameter's state may stand in several buckets and partly on the device. Here it looks like the entries of any
`torch.optim.Optimizer.state`, so that code which knows nothing of offloading (distributed checkpoints, Megatron's
distributed optimizer) finds what it expects. Nothing is stored here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from reference_impl.optimizers.layout import Member

if TYPE_CHECKING:
    from reference_impl.optimizers.hybrid import HybridDeviceOptimizer

MASTER = "master_param"
STEP = "step"


class MemberState(Mapping[str, torch.Tensor]):
    """One parameter's `step`, moments and, where it has one of its own, `master_param`.

    A state that stands in one place is returned as a view of it, in the parameter's shape; of one that stands in
    several (a parameter split between buckets or tiers) or streams a copy is returned. Assigning writes to all places.
    """

    def __init__(self, optimizer: HybridDeviceOptimizer, member: Member) -> None:
        """Refer to `member` of `optimizer`."""
        self._optimizer = optimizer
        self._shares = optimizer._open
        self._member = member

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that a state_dict has."""
        yield STEP
        yield from self._optimizer._algorithm.moments
        if self._member.param.dtype != torch.float32 or self._optimizer._masters_of_all:
            yield MASTER

    def __len__(self) -> int:
        """Count the names."""
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a state once running updates are done."""
        if name not in set(self):
            raise KeyError(name)
        self._optimizer.synchronize()
        if name == STEP:
            return self._steps()[0]
        parts = list(self._own_parts(name))
        local = self._member.param_local
        if len(parts) == 1 and not self._member.streamed:
            return self._sharded(parts[0][1].as_strided(local.shape, self._member.stride))
        return self.copied(name)

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Write a state, converted to fp32, to wherever it stands; `master_param` may be written always.

        Other names are passed over: Megatron writes offsets of its buffers among the states.
        """
        if name not in {*self, MASTER}:
            return
        self._optimizer.synchronize()
        if name == STEP:
            for step in self._steps():
                step.fill_(float(value))
            return
        value = value.to_local() if isinstance(value, DTensor) else value
        whole = self._like(device=value.device)
        whole.copy_(value.expand(whole.shape))
        for start, part in self._own_parts(name):
            part.copy_(self._member.flat(whole)[start : start + part.numel()])
        if self._member.streamed:
            self._shares.streamed.finish(for_writing=True)
            self._shares.streamed.write(self._member, name, whole)

    def copied(self, name: str) -> torch.Tensor:
        """Return a state as a tensor of its own, on the CPU where any of it is there."""
        if name == STEP:
            return self._steps()[0].clone()
        leaves = self._member.pieces or self._member.streamed
        whole = self._like(device=torch.device("cpu") if leaves else self._member.param.device)
        for start, part in (*self._own_parts(name), *self._streamed_parts(name)):
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

    def _steps(self) -> list[torch.Tensor]:
        """Return the step counters, the CPU's first."""
        steps = [self._member.step] if self._member.pieces else []
        resident = self._shares.resident.states.get(self._member)
        if resident is not None:
            steps.append(resident.step)
        if self._member in self._shares.streamed:
            steps.append(self._shares.streamed.steps[self._member])
        return steps

    def _streamed_parts(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part that streams."""
        if self._member.streamed:
            self._shares.streamed.finish(for_writing=False)
            yield from self._shares.streamed.parts(self._member, name)

    def _own_parts(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of each part that stays or is updated on the CPU."""

        def pick(master: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return master if name == MASTER else moments[self._optimizer._algorithm.moments.index(name)]

        resident = self._shares.resident.states.get(self._member)
        if resident is not None:
            yield 0, pick(resident.master, resident.moments)
        for piece in self._member.pieces:
            bucket = self._shares.host.homes[piece]
            yield piece.start, pick(bucket.master, bucket.moments)[piece.offset : piece.offset + piece.numel]


class LiveState(Mapping[torch.Tensor, MemberState]):
    """Parameter → `MemberState`, for every parameter that has taken a step."""

    def __init__(self, optimizer: HybridDeviceOptimizer) -> None:
        """Refer to `optimizer` without keeping it alive."""
        self._optimizer: HybridDeviceOptimizer = weakref.proxy(optimizer)
        self.lists_everyone = False

    def __getitem__(self, param: torch.Tensor) -> MemberState:
        """Return a parameter's state, also before its first step."""
        return MemberState(self._optimizer, self._optimizer._members[param])

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over parameters with a step; with `lists_everyone` over all that are trained."""
        for param in self._optimizer._members:
            if self.lists_everyone or self[param][STEP].item() > 0:
                yield param

    def __len__(self) -> int:
        """Count them."""
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        """Return whether iterating would yield `param`."""
        return any(param is each for each in self)
