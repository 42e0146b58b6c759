# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a plan have its model: FSDP2's shards of it, or a replica each, as `offload plan` says to launch it.

Explained in docs/distributed.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from reference_impl.activations.attach import find_blocks
from reference_impl.device import Device
from reference_impl.distributed.mesh import local_of
from reference_impl.memory.ledger import unseen

_STD = 0.02  # of matrices; vectors are 1
# Their new names since torch 2.13, where the old ones warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The number of ranks, and the dtype of trained weights in their shards; None where each has all of the model."""

    ranks: int
    shards: torch.dtype | None

    def describe(self) -> dict[str, Any]:
        """Return all as plain data."""
        if self.shards is None:
            return {"ranks": self.ranks, "sharding": "replicas"}
        dtype = str(self.shards).removeprefix("torch.")
        return {"ranks": self.ranks, "sharding": "fsdp2", "shard_dtype": dtype}

    def model(self, make: Callable[[], nn.Module], device: Device) -> nn.Module:
        """Return this rank's part of the result of `make`, the same at every call; every rank has to call it.

        Shards are computed in bf16. No rank ever has the whole of a model that is sharded.
        """
        if self.shards is not None:
            return _sharded(make, self.shards, device)
        with device.torch_device:
            return DistributedDataParallel(make(), gradient_as_bucket_view=True)


def _sharded(make: Callable[[], nn.Module], trained: torch.dtype, device: Device) -> nn.Module:
    with _parameters_on_meta():
        model = make()
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(trained)
    mesh = init_device_mesh(device.torch_device.type, (dist.get_world_size(),))
    gathers: Any = UnseenAllGather()
    reduces: Any = UnseenReduceScatter()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*find_blocks(model).values(), *_ends(model), model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        if not device.is_accelerator:
            sharded.set_custom_all_gather(gathers)
            sharded.set_custom_reduce_scatter(reduces)
    # Buffers are tables that the model has computed, not only sizes.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device.torch_device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for param in model.parameters():
            local = local_of(param)
            local.normal_(std=_STD) if param.ndim > 1 else local.fill_(1)
    return model


class _Unseen:
    """A collective of FSDP2 that the ledger does not see.

    Gloo's, unlike NCCL's, works on copies, and its threads let go of tensors some time after it is over: it is given
    others than FSDP2's.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for exchanged tensors, or for their targets."""
        return torch.empty(size, dtype=dtype, device=device)


class UnseenAllGather(_Unseen):
    """FSDP2's own, but for the ledger."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather `input_tensor`; it is over on return."""
        with unseen():
            gathered = torch.empty_like(output_tensor)
            _all_gather(gathered, input_tensor.clone(), group=group)
            output_tensor.copy_(gathered)


class UnseenReduceScatter(_Unseen):
    """FSDP2's own, but for the ledger."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce and scatter `input_tensor`; it is over on return."""
        with unseen():
            reduced = torch.empty_like(output_tensor)
            _reduce_scatter(reduced, input_tensor.clone(), op=op, group=group)
            output_tensor.copy_(reduced)


def _ends(model: nn.Module) -> Iterator[nn.Module]:
    """Yield embedding and head: FSDP2's modules of their own unless they share their weight."""
    inside = {module for block in find_blocks(model).values() for module in block.modules()}
    ends = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.Linear) and module not in inside
    ]
    uses = Counter(module.weight for module in ends)
    return (module for module in ends if uses[module.weight] == 1)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let parameters of new modules have sizes alone; buffers have their values."""

    def on_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        # An existing one may be shared.
        if param.is_meta:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    registration = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        registration.remove()
