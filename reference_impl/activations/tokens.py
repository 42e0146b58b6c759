"""Tokens that autograd holds in place of saved tensors that stay on the device, with a check for later writes.

Autograd checks the version of a tensor that it saves, but not of an object that a hook returns for it. So every token
checks it. A tensor that was moved has a `MovedTensor` as its token, in `run`.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class VersionProbe:
    """Follows a tensor's in-place version without keeping its memory alive.

    Autograd cannot check versions through hooks, and a copy on its way to the host would miss or tear a write
    that comes after the save: without this check the gradient would be wrong in silence.
    """

    __slots__ = ("_alias", "_saved_version", "_what")

    def __init__(self, tensor: torch.Tensor) -> None:
        alias = tensor.detach()
        # A detached alias shares the version counter; with its data swapped it holds no memory of the tensor.
        alias.data = _empty(tensor.device)
        self._alias = alias
        self._saved_version = tensor._version
        self._what = (tensor.dtype, tuple(tensor.shape))

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
        check_version(self._alias._version, self._saved_version, self._what)


@cache
def _empty(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


def check_version(now: int, saved: int, what: tuple[torch.dtype, tuple[int, ...]]) -> None:
    """Raise RuntimeError when `now` is not the `saved` version of the tensor described by `what`."""
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a {what[0]} tensor of shape {what[1]} is at version {now}; expected version {saved}; "
            "try the out-of-place form of the operation that wrote it"
        )


class KeptTensor:
    """A saved tensor that stays where it is."""

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
    """The token that an outer pair of saved-tensor hooks made of a tensor that the engine leaves alone."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, hooks: Hooks, tensor: torch.Tensor) -> None:
        pack, self._unpack = hooks
        self._packed = pack(tensor)

    def restore(self) -> torch.Tensor:
        """Unpack with the outer hooks."""
        return self._unpack(self._packed)
