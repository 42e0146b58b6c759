# SPDX-License-Identifier: Apache-2.0
"""The ranks that train one model together.

Explained in docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class RankGroup:
    """More than one rank, which do the same things in the same order.

    They are those of `groups`, one after the other; `device` is where collectives take tensors.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device | str) -> None:
        self._groups, self._device = groups, device

    @staticmethod
    def of(params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> RankGroup | None:
        """Return the ranks of `group`, or else the ranks with the shards of `params`.

        None where it is one rank, or not one mesh.
        """
        listed = list(params)
        if group is not None:
            return None if group.size() == 1 else RankGroup([group], listed[0].device)
        meshes = {param.device_mesh if isinstance(param, DTensor) else None for param in listed}
        if len(meshes) != 1:
            return None
        (mesh,) = meshes
        return (
            None if mesh is None or mesh.size() == 1 else RankGroup(mesh.get_all_groups(), mesh.device_type)
        )

    def least(self, numbers: Sequence[float]) -> list[float]:
        """Return the least that any rank has of each number. Every rank has to call it, and the host waits."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        for group in self._groups:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        return [float(number) for number in found]

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.least([0.0])

    def everyones(self, value: object) -> list[Any]:
        """Return the `value` of every rank, the same list on all of them; it is pickled.

        Every rank has to call it, and the host waits.
        """
        values = [value]
        for group in self._groups:
            found: list[list[object]] = [[]] * group.size()
            dist.all_gather_object(found, values, group=group)
            values = [each for part in found for each in part]
        return values

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank after an error on any: its own error, or a RuntimeError that quotes the first one.

        Every rank has to call it, and the host waits.
        """
        said = self.everyones(None if error is None else f"rank {dist.get_rank()}: {error}")
        if error is not None:
            error.add_note(f"on rank {dist.get_rank()}")
            raise error
        for each in said:
            if each is not None:
                raise RuntimeError(f"another rank has failed, so this one ends too: {each}")


@contextmanager
def alike(ranks: RankGroup | None) -> Iterator[None]:
    """Let a block end on all of `ranks` as it ends on any: with an error where one has met an error, see `agree`."""
    error: Exception | None = None
    try:
        yield
    except Exception as met:
        if ranks is None:
            raise
        error = met
    if ranks is not None:
        ranks.agree(error)
