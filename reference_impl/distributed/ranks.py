"""The ranks that train one model together, and those that share this host's cores and memory.

Explained in docs/distributed.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_ranks() -> int:
    """Return how many ranks run on this host: `LOCAL_WORLD_SIZE`, which torchrun sets; 1 without it."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def own_cores() -> int:
    """Return this rank's share of the cores that it may run on.

    Ranks that nobody has bound share all cores of the process that has launched them. Of those that are bound to fewer
    cores, so many share a set as its part of all cores says.
    """
    ours = os.sched_getaffinity(0)
    try:
        launchers = os.sched_getaffinity(os.getppid())
    except OSError:
        launchers = ours
    part = len(ours) / len(launchers) if ours < launchers else 1.0
    sharing = max(round(local_ranks() * part), 1)
    return max(len(ours) // sharing, 1)


class Together:
    """The ranks of a mesh, which do the same things in the same order; `mesh` has more than one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    @staticmethod
    def of(params: Iterable[torch.Tensor]) -> Together | None:
        """Return the ranks that hold the shards of `params`; None where it is one, or not one mesh."""
        meshes = {param.device_mesh if isinstance(param, DTensor) else None for param in params}
        if len(meshes) != 1:
            return None
        (mesh,) = meshes
        return None if mesh is None or mesh.size() == 1 else Together(mesh)

    def least(self, numbers: Sequence[float]) -> list[float]:
        """Return the least that any rank has of each number. Every rank has to call it, and the host waits."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self._mesh.device_type)
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._mesh.get_group(dimension))
        return [float(number) for number in found]

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.least([0.0])

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank where any has met an error: its own, or a RuntimeError that quotes the first other one.

        Every rank has to call it, and the host waits.
        """
        said: list[str | None] = [None if error is None else f"rank {dist.get_rank()}: {error}"]
        for dimension in range(self._mesh.ndim):
            found: list[list[str | None]] = [[]] * self._mesh.size(dimension)
            dist.all_gather_object(found, said, group=self._mesh.get_group(dimension))
            said = [each for part in found for each in part]
        if error is not None:
            error.add_note(f"on rank {dist.get_rank()}")
            raise error
        for each in said:
            if each is not None:
                raise RuntimeError(f"another rank has failed, so this one ends too: {each}")
