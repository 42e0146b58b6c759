"""Looking at storages behind tensors: their bytes, and the same tensors over other bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of `tensor` as flat uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def placed(flat: torch.Tensor, tensor: torch.Tensor, shift_bytes: int) -> torch.Tensor:
    """Return `tensor`'s geometry over the storage of `flat`, `shift_bytes` further on."""
    offset = tensor.storage_offset() + shift_bytes // tensor.itemsize
    return torch.empty(0, dtype=tensor.dtype, device=flat.device).set_(
        flat.untyped_storage(), offset, tensor.size(), tensor.stride()
    )


def move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move the storages of `tensors` to `device` in place; tensors that share one still do, gradients go along."""
    by_storage: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_storage[tensor.untyped_storage()._cdata].append(tensor)
    for views in by_storage.values():
        moved = bytes_of(views[0]).to(device)
        for tensor in views:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = placed(moved, tensor, 0)
            tensor.grad = None if gradient is None else gradient.to(device)
