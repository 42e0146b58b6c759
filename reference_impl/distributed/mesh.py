# SPDX-License-Identifier: Apache-2.0
"""Tensors on a device mesh (FSDP2, HSDP): shards, over how many ranks they are, and the norm of their gradients.

All ranks get the same norm, so that they decide alike. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

NormReduction = Callable[[torch.Tensor], torch.Tensor]


def norm_over_mesh(params: Iterable[torch.Tensor]) -> NormReduction | None:
    """Return a function from this rank's squared norm (0-dim fp32) to that over all ranks; None if nothing is sharded.

    It is one all-reduce for each dimension of the mesh, behind the work on the current stream; every rank has to reach
    it. Elements of replicas count once: exactly where their number is a power of two, and all get the same bits.
    Raises ValueError if the parameters do not determine it: several meshes, unlike placements, or unsharded
    parameters beside sharded ones.
    """
    listed = list(params)
    sharded = [param for param in listed if isinstance(param, DTensor)]
    if not sharded:
        return None
    meshes = {param.device_mesh for param in sharded}
    replicas = {_replicas(param) for param in sharded}
    if len(meshes) > 1 or len(replicas) > 1 or len(sharded) < len(listed):
        raise ValueError(
            f"the norm over all ranks does not follow from {len(listed) - len(sharded)} whole parameters and "
            f"{len(sharded)} sharded ones on {len(meshes)} meshes with {sorted(replicas)} replicas; expected one mesh "
            "and the same placements; try reduce_norm_squared, which adds the other ranks' share"
        )
    (mesh,), (copies,) = meshes, replicas

    def over_mesh(squared: torch.Tensor) -> torch.Tensor:
        total = squared / copies
        for dimension in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dimension))
        return total

    return over_mesh


def norm_reduction(
    params: Iterable[torch.Tensor], given: NormReduction | None, *, clips: bool
) -> NormReduction | None:
    """Return the user's `given` reduction, else the mesh's.

    Without clipping, parameters that it does not follow from have none: each rank then judges its own gradients. Raises
    ValueError for them where the optimizer `clips`.
    """
    if given is not None:
        return given
    try:
        return norm_over_mesh(param for param in params if param.requires_grad)
    except ValueError:
        if clips:
            raise
        return None


def ranks_of_shards(param: torch.Tensor) -> int:
    """Return over how many ranks `param` is sharded: 1 where each of them has all of it."""
    if not isinstance(param, DTensor):
        return 1
    placed = enumerate(param.placements)
    return math.prod(param.device_mesh.size(dim) for dim, placement in placed if not placement.is_replicate())


def _replicas(param: DTensor) -> int:
    placed = enumerate(param.placements)
    return math.prod(param.device_mesh.size(dim) for dim, placement in placed if placement.is_replicate())


def any_is_sharded(params: Iterable[torch.Tensor]) -> bool:
    """Return whether any of `params` is a DTensor: then an engine shards the model, as FSDP2 does."""
    return any(isinstance(param, DTensor) for param in params)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's own tensor: itself, or a DTensor's local one, which may be off the device."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shard_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as a shard like `param`'s, so that a distributed checkpoint saves all ranks' shards.

    Where `param` is not sharded this is `local` itself.
    """
    if not isinstance(param, DTensor):
        return local
    meta = TensorMeta(param.shape, param.stride(), local.dtype)
    # `DTensor.from_local` would move it to the mesh's device.
    return DTensor(local, DTensorSpec(param.device_mesh, param.placements, meta), requires_grad=False)
