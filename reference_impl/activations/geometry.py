# SPDX-License-Identifier: Apache-2.0
"""A saved tensor without its bytes: where they were, how it looks at them, and its version.

A view moves its whole storage when it covers a good part of it, because its siblings are usually saved too (q, k and
v of one projection). A small view moves its own span, and a sparse one a compact copy of its elements. Weights are
recognised by their storages, because autograd saves views of weights, not the weights. Autograd checks the version of
a saved tensor, but not of one moved by a hook: a `VersionProbe` does.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from reference_impl.memory.absent import storage_of

# A view that spans this share of its storage moves the storage; at this density its span moves as it is.
_WHOLE_SHARE = 0.25
_DENSE_SHARE = 0.5
# Spans start at multiples of this, so that a restored view has the alignment, and the kernels, of the original.
_ALIGNMENT_BYTES = 256

_CASTS_AND_VIEWS = {
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
}


@dataclass(frozen=True, slots=True)
class Extent:
    """`size_bytes` of `storage` from byte `start`; compact means the elements of one view, closed up."""

    storage: torch.UntypedStorage
    key: tuple[int, ...]
    start: int
    size_bytes: int
    is_compact: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the storage."""
        return not self.is_compact and self.size_bytes == self.storage.nbytes()


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor looks at a storage: dtype, shape, strides, and the byte where it starts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        """Return the geometry of a strided tensor."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), start)

    def over(self, storage: torch.UntypedStorage, *, shifted_bytes: int = 0) -> torch.Tensor:
        """Return a tensor with this geometry over `storage`, whose bytes lie `shifted_bytes` later than before."""
        start = (self.start + shifted_bytes) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, start, self.shape, self.strides)

    def spread(self, compact: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with these strides and the elements of `compact`, flat uint8."""
        strided = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=compact.device)
        return strided.copy_(compact.view(self.dtype).view(self.shape))


class VersionProbe:
    """Follows a tensor's in-place version without keeping its memory alive.

    Autograd cannot check versions through hooks, and a copy on its way to the host would miss or tear a write
    that comes after the save: without this check the gradient would be wrong in silence.
    """

    __slots__ = ("_alias", "_described", "_saved_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        alias = tensor.detach()
        # A detached alias shares the version counter; with its data swapped it holds no memory of the tensor.
        alias.data = _empty(tensor.device)
        self._alias = alias
        self._saved_version = tensor._version
        self._described = (tensor.dtype, tuple(tensor.shape))

    @property
    def version(self) -> int:
        """The version that was saved."""
        return self._saved_version

    @property
    def is_current(self) -> bool:
        """Whether nothing has written the tensor since."""
        return self._alias._version == self._saved_version

    def check(self) -> None:
        """Raise RuntimeError, as eager autograd does, when the tensor was written after it was saved."""
        check_version(self._alias._version, self._saved_version, self._described)


@cache
def _empty(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


class WrittenError(RuntimeError):
    """A tensor was written after it was saved."""


def check_version(now: int, saved: int, described: tuple[torch.dtype, tuple[int, ...]]) -> None:
    """Raise WrittenError when `now` is not the `saved` version of the tensor of `described` dtype and shape."""
    if now != saved:
        raise WrittenError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a {described[0]} tensor of shape {described[1]} is at version {now}; expected version {saved}; "
            "try the out-of-place form of the operation that wrote it"
        )


def flat_bytes(storage: torch.UntypedStorage, start: int, size_bytes: int) -> torch.Tensor:
    """Return `size_bytes` of `storage` from byte `start` as a flat uint8 tensor that shares it."""
    return Geometry(torch.uint8, (size_bytes,), (1,), start).over(storage)


def is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is nothing but strided bytes on `device`: no parameter, subclass, lazy bit or quantizer."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch._is_functional_tensor(tensor)
    )


def extent_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Extent:
    """Return the bytes of `storage` that have to move for the plain, not empty `tensor`."""
    itemsize, nbytes = tensor.element_size(), int(storage.nbytes())
    start = int(tensor.storage_offset()) * itemsize
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = (reach + 1) * itemsize
    identity = storage._cdata
    if span >= _WHOLE_SHARE * nbytes:
        return Extent(storage, (identity, 0, nbytes), 0, nbytes)
    if tensor.nbytes >= _DENSE_SHARE * span:
        end = start + span
        start -= start % _ALIGNMENT_BYTES
        return Extent(storage, (identity, start, end - start), start, end - start)
    key = (identity, start, itemsize, *tensor.shape, *tensor.stride())
    return Extent(storage, key, start, tensor.nbytes, is_compact=True)


class Weights:
    """The storages of all parameters and buffers of a model, as of its last forward."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def refresh(self, model: nn.Module) -> None:
        """Know the storages of `model`, and no others."""
        self._storages = _storages_of(model)

    def add(self, module: nn.Module) -> None:
        """Know the storages of `module` too."""
        self._storages |= _storages_of(module)

    def __contains__(self, storage_id: int) -> bool:
        """Whether a storage, by its identity, is a weight's."""
        return storage_id in self._storages

    def own(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a weight, a view of one, or one that autocast has cast."""
        if tensor.untyped_storage()._cdata in self._storages:
            return True
        node = tensor.grad_fn
        while node is not None and node.name() in _CASTS_AND_VIEWS:
            node = node.next_functions[0][0]
            variable = getattr(node, "variable", None)
            if variable is not None:
                return variable.untyped_storage()._cdata in self._storages
        return False


def _storages_of(module: nn.Module) -> set[int]:
    # Without names: the host would put them together for every layer of every forward.
    listed = ((*each._parameters.values(), *each._buffers.values()) for each in module.modules())
    tensors = (tensor for each in listed for tensor in each if tensor is not None)
    # A sharded parameter keeps its bytes in a local tensor.
    return {storage_of(getattr(tensor, "_local_tensor", tensor))._cdata for tensor in tensors}
