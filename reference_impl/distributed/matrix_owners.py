# SPDX-License-Identifier: Apache-2.0
"""Sharded matrices: the cut of each, the rank that has it whole for a while, and the ways there and back.

For a formula of whole matrices each rank does the elementwise part on its shard, the owner of a matrix the part that
needs the whole one, and each rank the rest on its shard again. The whole part's input crosses, and its result. For
Muon that is the direction before and after Newton and Schulz's iteration, in bf16: torch
rounds both to bf16 too, so it is exact, 2 bytes an element each way. The alternatives cost more. An owner with the
gradient would need the fp32 momentum of the whole matrix beside it: 4 bytes more to gather, or states sharded
otherwise than torch's. The momentum alone is 4 bytes. An all-gather, of whatever, brings every matrix to every rank,
which is as many times the bytes as there are ranks, and every rank would make the same products.

With N ranks each sends and receives 2 (N - 1) / N bytes for each element of its shards, twice. Matrices go round by
their FLOP, so that all ranks have about as many. One `all_to_all_single` each way carries all matrices of a chunk. It
runs on a communicator of its own: FSDP2's collectives keep their order, and wait for none of these.

Explained in docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from offload_arithmetic.division import aligned

# By the group of the mesh, which dies with all others.
_communicators: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Cut(NamedTuple):
    """How the ranks of dimension `mesh_dim` of the parameter's mesh share each of its matrices.

    `dim` is the dimension of a matrix that is cut, 0 or 1; the parameter has so many `matrices`, of `shape` each.
    """

    param: DTensor
    mesh_dim: int
    dim: int
    matrices: int
    shape: tuple[int, int]

    @property
    def ranks(self) -> int:
        """Over how many ranks a matrix is cut."""
        return self.param.device_mesh.size(self.mesh_dim)

    @property
    def longest_shard(self) -> int:
        """Elements of the parameter on the rank that has the most of them: the same number on all."""
        return self.matrices * max(map(_numel, (self.shard(rank)[1] for rank in range(self.ranks))))

    @property
    def key(self) -> str:
        """The same for parameters whose matrices may cross together, and on all ranks."""
        mesh = self.param.device_mesh
        return f"{mesh.mesh_dim_names} {tuple(mesh.shape)} {self.mesh_dim}"

    @property
    def flop(self) -> int:
        """The operations of one iteration of Newton and Schulz for one matrix, but for a factor."""
        less, more = sorted(self.shape)
        return less * less * (2 * more + less)

    def shard(self, rank: int) -> tuple[int, tuple[int, int]]:
        """Return the first row, or column, of a rank's shard of a matrix, and the shape of the shard."""
        size = self.shape[self.dim]
        longest = -(-size // self.ranks)
        first = min(rank * longest, size)
        length = min(longest, size - first)
        return first, (length, self.shape[1]) if self.dim == 0 else (self.shape[0], length)

    def parts_of(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        """Return the shard of each rank of a whole matrix."""
        shards = map(self.shard, range(self.ranks))
        return [matrix.narrow(self.dim, first, shape[self.dim]) for first, shape in shards]

    def communicator(self) -> dist.ProcessGroup:
        """Return the communicator of its ranks. The first call for a mesh is a collective of them."""
        shared = self.param.device_mesh.get_group(self.mesh_dim)
        if shared not in _communicators:
            _communicators[shared] = dist.new_group(
                dist.get_process_group_ranks(shared),
                use_local_synchronization=True,
                group_desc="whole matrices",
            )
        return _communicators[shared]


def cut_of(param: torch.Tensor) -> Cut | None:
    """Return how the matrices of a parameter of two or three dimensions are cut; None where this rank has whole ones.

    Each matrix of a stack is whole where the stack is sharded in its first dimension. Raises ValueError for shards in
    several dimensions, or in an order of their own.
    """
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    sharded = [
        (mesh_dim, placement)
        for mesh_dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and mesh.size(mesh_dim) > 1
    ]
    if not sharded:
        return None
    mesh_dim, placement = sharded[0]
    if len(sharded) > 1 or type(placement) is not Shard:
        raise ValueError(
            f"a matrix of shape {tuple(param.shape)} is sharded as {param.placements}; expected shards in one "
            "dimension, as FSDP2 makes them, with or without replicas; try AdamW for it"
        )
    dim = placement.dim % param.dim() - (param.dim() - 2)
    if dim < 0:
        return None
    matrices = param.shape[0] if param.dim() == 3 else 1
    return Cut(param, mesh_dim, dim, matrices, (param.shape[-2], param.shape[-1]))


class Exchange:
    """The matrices of a list of parameters, each with its owner, in one buffer: this rank's shards, and its wholes.

    `shards` has, for each parameter, this rank's shard of each of its matrices. `owned` has the matrices that this rank
    has whole, each with the shards of all ranks.

    Args:
        cuts: the parameters' cuts, all with one `key`.
        loads: by `key` the FLOP of each rank so far; the FLOP of these matrices are added.
    """

    def __init__(self, cuts: Sequence[Cut], loads: dict[str, list[int]]) -> None:
        self._cuts = cuts
        self._matrices = [cut for cut in cuts for _ in range(cut.matrices)]
        self.key = cuts[0].key
        self._group = cuts[0].communicator()
        self._rank, self._ranks = self._group.rank(), range(self._group.size())
        of_ranks = loads.setdefault(self.key, [0] * len(self._ranks))
        self._owners = _owners([cut.flop for cut in self._matrices], of_ranks)
        self._sent = [self._numel_between(self._rank, owner) for owner in self._ranks]
        self._received = [self._numel_between(rank, self._rank) for rank in self._ranks]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self._sent) + sum(self._received)

    def place(self, buffer: torch.Tensor) -> None:
        """Use the first `numel` elements of `buffer`, in the dtype of exchanged matrices."""
        self._here, self._whole = buffer[: self.numel].split([sum(self._sent), sum(self._received)])
        here = self._views(self._here, [(self._rank, owner) for owner in self._ranks])
        listed = iter([here[self._rank, index] for index in range(len(self._matrices))])
        self.shards = [list(islice(listed, cut.matrices)) for cut in self._cuts]
        whole = self._views(self._whole, [(rank, self._rank) for rank in self._ranks])
        self.owned = [
            (cut, [whole[rank, index] for rank in self._ranks])
            for index, (cut, owner) in enumerate(zip(self._matrices, self._owners, strict=True))
            if owner == self._rank
        ]

    def to_owners(self) -> None:
        """Bring all shards to the owners, on the live current stream. A collective."""
        dist.all_to_all_single(self._whole, self._here, self._received, self._sent, group=self._group)

    def to_ranks(self) -> None:
        """Bring all shards back. A collective."""
        dist.all_to_all_single(self._here, self._whole, self._sent, self._received, group=self._group)

    def _numel_between(self, rank: int, owner: int) -> int:
        return sum(
            aligned(_numel(cut.shard(rank)[1]))
            for cut, its in zip(self._matrices, self._owners, strict=True)
            if its == owner
        )

    def _views(
        self, buffer: torch.Tensor, order: Iterable[tuple[int, int]]
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Return the shards in `buffer` by rank and matrix: for each rank and owner of `order` one after the other."""
        found: dict[tuple[int, int], torch.Tensor] = {}
        offset = 0
        for rank, owner in order:
            for index, cut in enumerate(self._matrices):
                if self._owners[index] == owner:
                    _, shape = cut.shard(rank)
                    found[rank, index] = buffer[offset : offset + _numel(shape)].view(shape)
                    offset += aligned(_numel(shape))
        return found


def _owners(flop: Sequence[int], loads: list[int]) -> list[int]:
    """Return a rank for each matrix: the largest first, each to the rank that has the least to do; adds to `loads`."""
    owners = [0] * len(flop)
    for index in sorted(range(len(flop)), key=lambda index: -flop[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += flop[index]
    return owners


def _numel(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]
