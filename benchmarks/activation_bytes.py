# SPDX-License-Identifier: Apache-2.0
"""Counts, without the engine's help, the bytes saved by layers and the bytes on the link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reference_impl.activations import ActivationOffloader
from reference_impl.activations.attach import find_blocks, wrap_forward
from reference_impl.device import Event
from reference_impl.memory.tiers import StoredBytes, Tier


def unique_bytes(model: nn.Module, step: Callable[[], object], *, min_bytes: int) -> int:
    """Return the bytes of all storages that the layers save in a step, each once, weights and small ones left out."""
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    seen: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Holding the storage keeps its address from being used again.
        if storage.data_ptr() not in weights and min(storage.nbytes(), tensor.nbytes) >= min_bytes:
            seen[storage.data_ptr()] = storage
        return tensor.detach()

    def around(forward: Any, _: nn.Module, args: Any, kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(*args, **kwargs)

    undo = [wrap_forward(block, around) for block in find_blocks(model).values()]
    step()
    for each in undo:
        each()
    return sum(storage.nbytes() for storage in seen.values())


class Watched:
    """A tier that notes its storages."""

    def __init__(self, tier: Tier, model: nn.Module) -> None:
        """Pass everything on to `tier`."""
        self._tier = tier
        self._weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
        self.copied_bytes = 0
        self.weight_bytes = 0

    def store(self, source: torch.Tensor, *, after: Event) -> StoredBytes:
        """Count and store."""
        self.copied_bytes += source.numel()
        if source.untyped_storage().data_ptr() in self._weights:
            self.weight_bytes += source.numel()
        return self._tier.store(source, after=after)

    def close(self) -> None:
        """Close the tier."""
        self._tier.close()


def count_bytes(model: nn.Module, step: Callable[[], object], *, min_bytes: int) -> dict[str, float | bool]:
    """Return GB that a step's layers save, each storage once, and of them the GB copied and the GB of weights."""
    unique = unique_bytes(model, step, min_bytes=min_bytes)
    with ActivationOffloader(model, min_bytes=min_bytes) as offloader:
        watched = offloader.engine.tier = Watched(offloader.engine.tier, model)
        step()
    return {
        "unique_gb": unique / 1e9,
        "copied_gb": watched.copied_bytes / 1e9,
        "weights_gb": watched.weight_bytes / 1e9,
        "copied_is_unique": watched.copied_bytes == unique,
    }
