# SPDX-License-Identifier: Apache-2.0
"""Tokens held by autograd in place of saved tensors that stay on the device.

Autograd checks the version of a saved tensor, but not of an object that a hook returns for it. So every token checks
it. A tensor that was moved has a `MovedTensor` as its token, in `run`.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reference_impl.activations.geometry import check_version

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class KeptTensor:
    """A saved tensor that stays in place."""

    __slots__ = ("_saved_version", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold the tensor: a leaf itself, since its data may be swapped; else an alias, which closes no cycle."""
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._saved_version = tensor._version

    def restore(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError when it was written after it was saved."""
        tensor = self._tensor
        if tensor._version != self._saved_version:
            check_version(tensor._version, self._saved_version, (tensor.dtype, tuple(tensor.shape)))
        return tensor


class AwaitedTensor(KeptTensor):
    """A weight that may have to be brought back before it is used."""

    __slots__ = ("_bring",)

    def __init__(self, tensor: torch.Tensor, bring: Callable[[], None]) -> None:
        """Hold the tensor; call `bring` before each use."""
        super().__init__(tensor)
        self._bring = bring

    def restore(self) -> torch.Tensor:
        """Bring the weight back and return it."""
        self._bring()
        return super().restore()


class OthersToken:
    """The token made by an outer pair of saved-tensor hooks of a tensor that the engine leaves alone."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, hooks: Hooks, tensor: torch.Tensor) -> None:
        pack, self._unpack = hooks
        self._packed = pack(tensor)

    def restore(self) -> torch.Tensor:
        """Unpack with the outer hooks."""
        return self._unpack(self._packed)
