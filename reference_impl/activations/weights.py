"""Telling weights from activations: by storage, because autograd saves views of weights, not the weights."""

from __future__ import annotations

import torch
from torch import nn

_CASTS_AND_VIEWS = {
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
}


class Weights:
    """The storages of all parameters and buffers of a model, as of its last forward."""

    def __init__(self) -> None:
        """Know none."""
        self._storages: set[int] = set()

    def refresh(self, model: nn.Module) -> None:
        """Forget what was known and look at `model`."""
        self._storages = _storages_of(model)

    def add(self, module: nn.Module) -> None:
        """Look at `module` too."""
        self._storages |= _storages_of(module)

    def __contains__(self, storage_id: int) -> bool:
        """Whether a storage, by its identity, is a weight's."""
        return storage_id in self._storages

    def own(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a weight, a view of one, or what autocast has cast from one."""
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
    tensors = (*module.parameters(), *module.buffers())
    # A sharded parameter keeps its bytes in a local tensor.
    return {getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata for tensor in tensors}
