# SPDX-License-Identifier: Apache-2.0
"""The owners of bytes: the storages of weights, gradients, optimizer states and offload buffers, by tier.

Storages are found through the objects that hold them. Each counts once, for the first owner in this order: weights,
gradients, optimizer states, buffers of `reference_impl`'s offloaders. Further bytes of the allocator are activations
and the rest. No property of a foreign object is read: objects are followed as the garbage collector follows them.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

WEIGHTS, FROZEN, GRADIENTS, STATES, BUFFERS, REST = OWNERS = (
    "weights",
    "frozen weights",
    "gradients",
    "optimizer states",
    "offload buffers",
    "activations and the rest",
)
_NOT_FOLLOWED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, FrameType, str, bytes)
_MOST_OBJECTS = 500_000  # that one optimizer is followed through

Bytes = dict[str, int]


class Tiers(NamedTuple):
    """Bytes by owner on the device and on the host."""

    device: Bytes
    host: Bytes


class Owners:
    """Finds the owners of this process; `scan()` looks for models and offloaders that are new, `count()` for bytes."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._offloaders: list[weakref.ref[Any]] = []
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.plan: Mapping[str, Any] | None = None

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take note of an optimizer that steps; return whether it is new."""
        is_new = optimizer not in self._optimizers
        self._optimizers.add(optimizer)
        return is_new

    def scan(self) -> None:
        """Look for modules and offloaders among all objects, and for a plan in force; takes up to a second."""
        modules, offloaders = [], []
        shown = getattr(sys.modules.get("reference_impl.memory.shown"), "Shown", ())
        for each in gc.get_objects():
            kind = type(each)
            if issubclass(kind, torch.nn.Module):
                modules.append(weakref.ref(each))
            elif shown and issubclass(kind, shown) and not issubclass(kind, torch.optim.Optimizer):
                offloaders.append(weakref.ref(each))
                self.plan = getattr(getattr(each, "watch", None), "plan", None) or self.plan
        self._modules, self._offloaders = modules, offloaders

    def count(self, *, cpu_is_device: bool) -> Tiers:
        """Return the bytes of each owner; `cpu_is_device` where the CPU's tensors stand for the device's."""
        book = _Book(cpu_is_device)
        modules = [module for each in self._modules if (module := each()) is not None]
        for module in modules:
            for param in _held(module._parameters):
                book.add(WEIGHTS if param.requires_grad else FROZEN, [param])
            book.add(FROZEN, _held(module._buffers))
        optimizers = list(self._optimizers)
        params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
        # A trainer's own masters, such as a flat fp32 copy, are the parameters of the inner optimizer.
        book.add(STATES if modules else WEIGHTS, params)
        trained = (param for module in modules for param in _held(module._parameters))
        book.add(GRADIENTS, (grad for param in (*trained, *params) if (grad := _grad(param)) is not None))
        for optimizer in optimizers:
            book.add(STATES, _reached(optimizer))
        for offloader in filter(None, (each() for each in self._offloaders)):
            book.add(BUFFERS, _reached(offloader))
        for serves, size_bytes in _arenas().items():
            book.tiers.host[serves] += size_bytes
        return Tiers(*(dict(tier) for tier in book.tiers))


class _Book:
    """Counts each storage once."""

    def __init__(self, cpu_is_device: bool) -> None:
        self.tiers = Tiers(defaultdict(int), defaultdict(int))
        self._cpu_is_device = cpu_is_device
        self._seen: set[int] = set()
        self._arenas: Container[int] = getattr(
            sys.modules.get("reference_impl.memory.host"), "host_storages", frozenset()
        )

    def add(self, owner: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` that nobody has had yet to `owner`."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._add(owner, part)

    def _add(self, owner: str, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            key, size_bytes = storage._cdata, storage.nbytes()
            if not size_bytes or key in self._seen:
                return
            self._seen.add(key)
            kind = storage.device.type
            # Of arenas it is known how much of a slab is in use.
            if kind == "meta" or (kind == "cpu" and storage.data_ptr() in self._arenas):
                return
        except (RuntimeError, NotImplementedError):  # no storage: sparse, functional, of a backend of its own
            return
        tier = self.tiers.host if kind == "cpu" and not self._cpu_is_device else self.tiers.device
        tier[owner] += size_bytes


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory inside a subclass, such as a shard or a quantized weight."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten(tensor)[0]:
        part = getattr(tensor, name, None)
        if part is not None:
            yield from _parts(part)


def _held(entries: Mapping[str, Any]) -> list[torch.Tensor]:
    return [each for each in entries.values() if isinstance(each, torch.Tensor)]


def _grad(param: torch.Tensor) -> torch.Tensor | None:
    try:
        # The slot itself: a subclass may answer `.grad` by bringing one back.
        slot: Any = torch._C.TensorBase.grad
        grad: torch.Tensor | None = slot.__get__(param)
        return grad
    except RuntimeError:
        return None


def _reached(start: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that `start` holds, however deep; models, functions and classes are not entered."""
    seen, pending = {id(start)}, [start]
    while pending and len(seen) < _MOST_OBJECTS:
        for each in gc.get_referents(pending.pop()):
            if id(each) in seen:
                continue
            seen.add(id(each))
            kind = type(each)
            if issubclass(kind, torch.Tensor):
                yield each
            elif not issubclass(kind, (*_NOT_FOLLOWED, torch.nn.Module)):
                pending.append(each)


def _arenas() -> Mapping[str, int]:
    arena = sys.modules.get("reference_impl.memory.arena")
    return arena.bytes_by_service() if arena is not None else {}
