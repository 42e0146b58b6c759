# SPDX-License-Identifier: Apache-2.0
"""The storages of training memory, their kinds, and the tensors on each.

Modules list their parameters and buffers. Tensors of optimizers and offloaders are found by following references
through containers, objects of this package and optimizers, never into a module or the objects of others.

Explained in docs/parking.md.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from reference_impl.device import Device
from reference_impl.memory.absent import parts_of_wrapper, storage_of
from reference_impl.memory.arena import HostArena
from reference_impl.memory.host import host_storages
from reference_impl.optimizers.cpu.update import Task

Kind = Literal["weights", "gradients", "states", "extra"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "states", "extra")

_PACKAGE = __name__.partition(".")[0]
# Frequent objects without references to follow.
_ATOMS = frozenset((int, float, bool, str, bytes, type(None), range, torch.dtype, torch.device, torch.Size))
_PLAIN = (torch.Tensor, nn.Parameter)
_EMPTY_CELL = types.CellType()
# References not followed: they lead to no training memory on the device, or to memory of the whole process. Of a CPU
# share of 1.4e9 elements there are 20,000 blocks of tasks, whose members and buckets others know, too.
_NOT_FOLLOWED = (nn.Module, Device, HostArena, Task, type, types.ModuleType)


@dataclass(eq=False, slots=True)
class FoundStorage:
    """One storage of `size_bytes` on the device, and the tensors of training that lie on it, each with its name.

    `may_change` says that training writes it: a trained weight, a gradient, a state. `wrappers` are the tensors with
    one of these for a part, such as DTensors and quantized weights: they have no memory of their own.
    """

    kind: Kind
    storage: torch.UntypedStorage
    size_bytes: int
    may_change: bool = False
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    wrappers: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the first tensor on it."""
        return self.tensors[0][0]


@dataclass(frozen=True)
class Found:
    """The parts of training memory: storages in the order of their kinds, and tensors that cannot be moved, by name."""

    device: Device
    storages: Sequence[FoundStorage]
    unmovable: Mapping[str, str]


def find(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], also: Sequence[object]
) -> Found:
    """Return the storages of `models`, of their gradients, of the states of `optimizers`, and of the tensors of `also`.

    Each storage once, under the first kind that it has. Raises ValueError where they are on several accelerators.
    """
    trained = {id(param) for each in optimizers for group in each.param_groups for param in group["params"]}
    unmovable: dict[str, str] = {}
    named = [
        (kind, name, tensor, part)
        for kind, name, tensor in _named(models, optimizers, also)
        for part in _parts(tensor)
    ]
    device = _device_of(tensor for _, _, tensor, _ in named)
    by_storage: dict[int, FoundStorage] = {}
    wrappers: list[tuple[str, torch.Tensor]] = []
    for kind, name, tensor, part in named:
        if is_traceable_wrapper_subclass(tensor):
            wrappers.append((name, tensor))
            continue
        if tensor.device != device.torch_device:
            continue
        storage = _storage_of(part)
        if isinstance(storage, str):
            unmovable.setdefault(name, storage)
            continue
        size_bytes = storage.nbytes()
        if size_bytes == 0 or (not device.is_accelerator and storage.data_ptr() in host_storages):
            continue
        found = by_storage.get(storage._cdata)
        if found is None:
            if not storage.resizable():
                unmovable.setdefault(
                    name, "its storage does not resize, as memory of numpy, DLPack or a mapped file"
                )
                continue
            found = by_storage[storage._cdata] = FoundStorage(kind, storage, size_bytes)
        found.may_change |= kind != "weights" or tensor.requires_grad or id(tensor) in trained
        for lies_on_it in (part,) if part is tensor else (part, tensor):
            if not any(each is lies_on_it for _, each in found.tensors):
                found.tensors.append((name, lies_on_it))
    for name, wrapper in wrappers:
        for found in add_wrapper(by_storage, name, wrapper):
            # Of a trained shard the part with the memory requires no gradient.
            found.may_change |= wrapper.requires_grad or id(wrapper) in trained
    ordered = sorted(by_storage.values(), key=lambda found: KINDS.index(found.kind))
    return Found(device, ordered, unmovable)


def add_wrapper(
    by_storage: Mapping[int, FoundStorage], name: str, wrapper: torch.Tensor
) -> Sequence[FoundStorage]:
    """Add `wrapper` to the storages on which its parts lie, and return these."""
    parts = [part for part in parts_of_wrapper(wrapper) if part.layout is torch.strided]
    on = [found for part in parts if (found := _under(by_storage, part)) is not None]
    for found in on:
        if not any(each is wrapper for _, each in found.wrappers):
            found.wrappers.append((name, wrapper))
    return on


def _named(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], also: Sequence[object]
) -> Iterator[tuple[Kind, str, torch.Tensor]]:
    names: dict[int, str] = {}
    for model in models:
        for prefix, module in model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                whole = f"{prefix}.{name}" if prefix else name
                names.setdefault(id(tensor), whole)
                yield from (("weights", inner, plain) for inner, plain in tensors_in(tensor, whole))
    params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
    params += [param for model in models for param in model.parameters()]
    for param in dict.fromkeys(params):
        if param.grad is not None:
            name = f"gradient of {names.get(id(param), 'a parameter')}"
            yield from (("gradients", inner, plain) for inner, plain in tensors_in(param.grad, name))
    for number, param in enumerate(dict.fromkeys(params)):
        if id(param) not in names:
            # Masters that training keeps beside the model.
            name = f"parameter {number} of an optimizer"
            yield from (("states", inner, plain) for inner, plain in tensors_in(param, name))
    known = {id(param) for param in params}
    for optimizer in optimizers:
        for param, states in () if _is_of(type(optimizer.state), _PACKAGE) else optimizer.state.items():
            of = names.get(id(param), "a parameter")
            for name, plain in tensors_in(states, "state", but=known, into_objects=True):
                yield "states", f"{name} of {of}", plain
        for name, plain in tensors_in(optimizer, type(optimizer).__name__, but=known):
            yield "states", name, plain
    for index, root in enumerate(also):
        name = f"also[{index}]"
        if isinstance(root, nn.Module):
            for inner, tensor in (*root.named_parameters(), *root.named_buffers()):
                yield from (("extra", each, plain) for each, plain in tensors_in(tensor, f"{name}.{inner}"))
        else:
            yield from (("extra", each, plain) for each, plain in tensors_in(root, name))


def tensors_in(
    root: object, name: str, *, but: Collection[int] = (), into_objects: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors reached from `root`, each once, with names that begin with `name`.

    A wrapper of tensors has no memory: it comes first, then its parts.

    Args:
        root: a tensor, a container, an optimizer or an object of this package.
        name: the name of `root`.
        but: ids of tensors to leave out, with everything behind them.
        into_objects: follow the attributes of any other object, too, as a quantized state's.
    """
    if type(root) in _PLAIN and not vars(root):
        if id(root) not in but:
            yield name, cast("torch.Tensor", root)
        return
    # Seen objects are kept, so that no other object gets their ids.
    seen: dict[int, object] = {}
    waiting = deque([(name, root, into_objects)])
    while waiting:
        path, holder, into = waiting.popleft()
        if id(holder) in seen or id(holder) in but:
            continue
        seen[id(holder)] = holder
        if not isinstance(holder, torch.Tensor):
            for inner, each in _followed(path, holder, into_objects=into):
                if type(each) not in _ATOMS and id(each) not in seen:
                    waiting.append((inner, each, into))
            continue
        if is_traceable_wrapper_subclass(holder):
            yield path, holder
            parts, _ = holder.__tensor_flatten__()
            waiting.extend((f"{path}.{part}", getattr(holder, part), into) for part in parts)
        elif not _is_of(type(holder), _PACKAGE):
            yield path, holder
        # A quantized weight keeps its scales in an attribute, and so does our stand-in the rest of a gradient.
        waiting.extend((f"{path}.{key}", value, True) for key, value in vars(holder).items())


def is_followed(root: object) -> bool:
    """Return whether `tensors_in` looks for tensors in `root`, and a module, by its parameters and buffers, too."""
    if isinstance(root, torch.Tensor | nn.Module):
        return True
    cls: Any = type(root)
    follow, needs_leave = _way_of(cls)
    return follow is not _nothing and not needs_leave


def _followed(path: str, holder: object, *, into_objects: bool) -> Iterable[tuple[str, object]]:
    """Return the references of `holder`, as far as they are followed."""
    cls: Any = type(holder)
    follow, needs_leave = _way_of(cls)
    return follow(path, holder) if into_objects or not needs_leave else ()


@cache
def _way_of(cls: type) -> tuple[Callable[[str, Any], Iterable[tuple[str, object]]], bool]:
    """Return a function to the references of an object of `cls`, and whether it is followed only with leave."""
    if cls in _ATOMS or issubclass(cls, _NOT_FOLLOWED):
        return _nothing, False
    # Before mappings: the values of ours are views made on request.
    if _is_of(cls, _PACKAGE):
        return partial(_attributes, _slots(cls)), False
    for kind, follow in _WAYS.items():
        if issubclass(cls, kind):
            return follow, False
    if issubclass(cls, torch.optim.Optimizer):
        return partial(_attributes, _slots(cls)), False
    # Process groups, meshes and streams lead anywhere.
    return (_nothing, False) if _is_of(cls, "torch") else (partial(_attributes, _slots(cls)), True)


def _is_of(cls: type, package: str) -> bool:
    return cls.__module__.partition(".")[0] == package


def _slots(cls: type) -> list[str]:
    stated = [each.__dict__.get("__slots__", ()) for each in cls.__mro__]
    slots = [slot for each in stated for slot in ((each,) if isinstance(each, str) else each)]
    return [slot for slot in slots if slot not in ("__dict__", "__weakref__")]


def _nothing(path: str, holder: object) -> Iterable[tuple[str, object]]:
    return ()


def _attributes(slots: Sequence[str], path: str, holder: object) -> Iterator[tuple[str, object]]:
    for key, value in getattr(holder, "__dict__", {}).items():
        yield f"{path}.{key}", value
    for slot in slots:
        if hasattr(holder, slot):
            yield f"{path}.{slot}", getattr(holder, slot)


def _values(path: str, holder: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    for key, value in holder.items():
        yield (f"{path}.{key}" if isinstance(key, str) else path), value


def _elements(path: str, holder: Iterable[object]) -> Iterator[tuple[str, object]]:
    for value in holder:
        yield path, value


def _bound(path: str, holder: partial[object]) -> Iterator[tuple[str, object]]:
    yield from _elements(path, (holder.func, *holder.args, *holder.keywords.values()))


def _owner(path: str, holder: types.MethodType) -> Iterator[tuple[str, object]]:
    yield path, holder.__self__


def _closure(path: str, holder: types.FunctionType) -> Iterator[tuple[str, object]]:
    if holder.__module__.partition(".")[0] == _PACKAGE:
        for cell in holder.__closure__ or ():
            if cell != _EMPTY_CELL:
                yield path, cell.cell_contents


_WAYS: Mapping[type, Callable[[str, Any], Iterable[tuple[str, object]]]] = {
    Mapping: _values,
    list: _elements,
    tuple: _elements,
    Set: _elements,
    deque: _elements,
    partial: _bound,
    types.MethodType: _owner,
    types.FunctionType: _closure,
}


def _device_of(tensors: Iterable[torch.Tensor]) -> Device:
    devices = sorted(
        {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}, key=str
    )
    if len(devices) > 1:
        raise ValueError(
            f"training memory is on {', '.join(map(str, devices))}; expected one accelerator; try one park() for the "
            "model and optimizer of each"
        )
    return Device.of(devices[0] if devices else "cpu")


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors whose storages `tensor` has: a sparse gradient's indices and values, or itself."""
    if not is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,)


def _under(by_storage: Mapping[int, FoundStorage], part: torch.Tensor) -> FoundStorage | None:
    """Return the storage on which `part` lies, if it is there; a gradient that has left has none."""
    try:
        return by_storage.get(storage_of(part)._cdata)
    except RuntimeError:
        return None


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | str:
    """Return the storage of `tensor`, or why its memory cannot be taken from under it."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized or tensor.is_nested:
        return "its bytes are not in one storage"
    try:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() == 0:
            return "it has no memory of its own"
    except (RuntimeError, NotImplementedError):
        return "it has no storage"
    return storage
