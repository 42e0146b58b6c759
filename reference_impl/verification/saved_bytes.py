# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that autograd saves: a prediction must not depend on the judged engine.

Hooks in one forward record every storage saved for backward, once, and the modules that saved it. A storage leaves
the device only if all its saving modules are offloaded. So a storage also saved by another module does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from reference_impl.device import Device
from reference_impl.verification.model import decoder_loss
from reference_impl.verification.workload import Workload


def saved_bytes(
    workload: Workload,
    device: Device,
    *,
    layers: int = 0,
    inputs_of: Sequence[str] = (),
    min_bytes: int,
) -> int:
    """Return the bytes that only the first `layers`, or only the modules called `inputs_of`, save.

    Of these modules only the inputs count. Storages below `min_bytes` and parameters never do.
    """
    model = workload.model(device)
    ids = next(workload.batches(device))[0]
    watched = [module for name, module in model.named_modules() if name.endswith(tuple(inputs_of))]
    storages = SavedStorages(model, watched if inputs_of else list(model.layers[:layers]))
    storages.observe(lambda: decoder_loss(model(ids), ids))
    return storages.size_bytes(min_bytes=min_bytes, inputs_only=bool(inputs_of))


class SavedStorages:
    """The storages saved in one forward, with the watched modules that saved them, and the modules' inputs."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Watch `modules` of `model`; its parameters are not counted."""
        self._modules = modules
        self._weights = {param.untyped_storage()._cdata for param in model.parameters()}
        self._inside = 0
        self._outside: set[int] = set()
        # Holding the storages keeps their identities from being used again.
        self._inputs: dict[int, torch.UntypedStorage] = {}
        self._saved: dict[int, torch.UntypedStorage] = {}

    def observe(self, forward: Callable[[], object]) -> None:
        """Run `forward` and note the tensors that it saves."""
        handles: list[Any] = []
        for module in self._modules:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
                forward()
        finally:
            for handle in handles:
                handle.remove()

    def size_bytes(self, *, min_bytes: int, inputs_only: bool) -> int:
        """Return the bytes of storages of at least `min_bytes` that the watched modules alone saved."""
        return sum(
            storage.nbytes()
            for key, storage in self._saved.items()
            if key not in self._outside
            and storage.nbytes() >= min_bytes
            and (key in self._inputs or not inputs_only)
        )

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside += 1
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._inputs[storage._cdata] = storage

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: object) -> None:
        self._inside -= 1

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._weights:
            self._saved[key] = storage
            if not self._inside:
                self._outside.add(key)
        return tensor.detach()
