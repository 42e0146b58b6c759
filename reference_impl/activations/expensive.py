"""Results that a recomputed layer keeps instead of computing again.

Inside the modules that the user names, matrix products, convolutions and attention are recorded the first time
and handed back during recomputation, in the same order. It works below autograd, so the recomputed layer saves
for backward exactly what it would have saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from reference_impl.activations.saved import KeptTensor, MovedTensor

_EXPENSIVE = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}


_Token = KeptTensor | MovedTensor


class ExpensiveResults(TorchDispatchMode):
    """The kept results of one forward of one layer: recorded in its first pass, handed back in all others."""

    def __init__(self, save: Callable[[torch.Tensor], _Token]) -> None:
        """Record with `save`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        self._results: list[Any] = []
        self._passes = 0
        self._next = 0

    def start_pass(self) -> None:
        """Begin the layer's forward, or a recomputation of it."""
        self._passes += 1
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().partition(".")[0] not in _EXPENSIVE:
            return func(*args, **(kwargs or {}))
        if self._passes == 1:
            result = func(*args, **(kwargs or {}))
            self._results.append(tree_map(self._save_leaf, result))
            return result
        self._next += 1
        return tree_map(_restore_leaf, self._results[self._next - 1])

    def _save_leaf(self, leaf: Any) -> Any:
        return self._save(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _restore_leaf(leaf: Any) -> Any:
    return leaf.restore() if isinstance(leaf, KeptTensor | MovedTensor) else leaf
