# SPDX-License-Identifier: Apache-2.0
"""What a layer's forward changes beside its results: running statistics, a codebook's means, counts of its calls.

A second call would change them once more, and with the changed ones it would compute something else. So the second call
has copies of what they held before the first one, and its changes to these are lost.

Tensors are buffers and frozen parameters. Attributes are numbers, tensors without a graph, containers and generators of
random numbers; Python's and numpy's global generators belong to them too.

What changes is learnt from a layer's first call in training or evaluation, by values: batch norm tells of no write to
its statistics. Later calls ask tensors for versions alone, which costs no wait for the device. A layer that begins to
change another module's tensors is learnt anew at its next call. So is one that changes large tensors: most of these are
quantized weights, of which a first call makes no copies. Until then a second call has what the first one has left.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

_LARGE_BYTES = 2**20
_CONTAINERS = (list, dict, set, deque)
# Of every module, torch's own.
_OF_TORCH = frozenset(vars(nn.Module()))


class _Place(NamedTuple):
    """A buffer or frozen parameter of `owner` before a call; `held_in` is the module's own dictionary of such."""

    owner: nn.Module
    held_in: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor
    version: int

    @property
    def is_buffer(self) -> bool:
        return self.held_in is self.owner._buffers

    def like_it(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as the module holds it: it may assign what it has written."""
        return tensor if self.is_buffer else nn.Parameter(tensor, requires_grad=False)


class _Learnt(NamedTuple):
    """The numbers of the tensors and modules that a layer changes, and whether each module was in training then."""

    tensors: frozenset[int]
    modules: frozenset[int]
    takes_random_numbers: bool
    training: tuple[bool, ...]


_learnt: WeakKeyDictionary[nn.Module, _Learnt] = WeakKeyDictionary()


class ChangedState:
    """The state of `layer` before a call, as far as the call changes it."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._modules = list(layer.modules())
        self._places = list(_places(self._modules))
        training = tuple(each.training for each in self._modules)
        learnt = _learnt.get(layer)
        self._is_first = learnt is None or learnt.training != training
        if learnt is None or self._is_first:
            learnt = _Learnt(frozenset(), frozenset(), False, training)
        self._learnt = learnt
        # By their numbers. None for a tensor that the call has written unexpectedly.
        self._tensors: dict[int, torch.Tensor | None] = {
            number: each.tensor.detach().clone()
            for number, each in enumerate(self._places)
            if number in learnt.tensors or (self._is_first and each.tensor.nbytes < _LARGE_BYTES)
        }
        self._attributes = {
            number: _copies(module)
            for number, module in enumerate(self._modules)
            if number in learnt.modules or self._is_first
        }
        self._random = _random_states() if learnt.takes_random_numbers or self._is_first else []
        # Held for the first call alone, so that no other attribute gets the identity of one.
        self._all_attributes = (
            [{**vars(each), "_parameters": dict(each._parameters)} for each in self._modules]
            if self._is_first
            else []
        )

    def end(self) -> None:
        """Note that the call has returned, and keep what it has changed."""
        written = {number for number, each in enumerate(self._places) if _is_written(each)}
        if self._is_first:
            self._learn(written)
        elif not written <= self._learnt.tensors:
            _learnt.pop(self._layer, None)
        self._tensors |= dict.fromkeys(written - self._tensors.keys())
        # Of most layers nothing: the graph need not hold them until backward.
        if not self._tensors:
            self._places = []
        if not self._attributes:
            self._modules = []

    def _learn(self, written: set[int]) -> None:
        changed = written | {
            number
            for number, before in self._tensors.items()
            if before is not None and not torch.equal(self._places[number].tensor, before)
        }
        # A module that changes one of its buffers may change the others later.
        owners = {self._places[number].owner for number in changed if self._places[number].is_buffer}
        changed |= {
            number for number, each in enumerate(self._places) if each.is_buffer and each.owner in owners
        }
        moved = frozenset(
            number
            for number, (module, before) in enumerate(zip(self._modules, self._all_attributes, strict=True))
            if _has_moved(module, before, self._attributes[number])
        )
        self._tensors = {number: each for number, each in self._tensors.items() if number in changed}
        self._attributes = {number: each for number, each in self._attributes.items() if number in moved}
        self._all_attributes = []
        takes_random_numbers = _pickled(self._random) != _pickled(_random_states())
        if not takes_random_numbers:
            self._random = []
        _learnt[self._layer] = self._learnt._replace(
            tensors=frozenset(changed), modules=moved, takes_random_numbers=takes_random_numbers
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have the layer's state inside the context as it was before the call; changes to it are lost.

        A tensor without a copy from before the call is as it is now.
        """
        places = [(self._places[number], before) for number, before in self._tensors.items()]
        tensors_now = [each.held_in.get(each.name) for each, _ in places]
        modules = [(self._modules[number], before) for number, before in self._attributes.items()]
        attributes_now = [dict(vars(module)) for module, _ in modules]
        random_now = _random_states() if self._random else []
        try:
            for (each, before), now in zip(places, tensors_now, strict=True):
                source = now if before is None else before
                each.held_in[each.name] = None if source is None else each.like_it(source.detach().clone())
            for module, attributes in modules:
                _replace(module, {name: copied(value) for name, value in attributes.items()})
            _set_random(self._random)
            yield
        finally:
            _set_random(random_now)
            for (each, _), tensor in zip(places, tensors_now, strict=True):
                each.held_in[each.name] = tensor
            for (module, _), attributes in zip(modules, attributes_now, strict=True):
                vars(module).clear()
                vars(module).update(attributes)


class KeptAttributes:
    """The attributes of `modules` and what those that can change hold, which stay the same objects: others know them.

    Of tensors those of less than 1 MiB; of buffers it knows which they are.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._attributes = [(each, dict(vars(each))) for each in modules]
        self._held = [
            (value, copied(value))
            for each in modules
            for name, value in vars(each).items()
            if isinstance(value, (torch.Tensor, torch.Generator, *_CONTAINERS))
            and (name == "_buffers" or (name not in _OF_TORCH and _is_state(value)))
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give everything back."""
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for value, before in self._held:
            if isinstance(value, torch.Generator):
                value.set_state(before.get_state())
            elif isinstance(value, torch.Tensor):
                if not torch.equal(value, before):
                    value.copy_(before)
            else:
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(before)


class KeptState:
    """Gives the state of `module` back at the end as it was, so that trials of a call leave nothing; a context manager.

    Of frozen parameters and attributes those of less than 1 MiB.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())

    def __enter__(self) -> KeptState:
        """Return this object."""
        self._tensors = [
            (each, each.tensor.clone())
            for each in _places(self._modules)
            if each.is_buffer or each.tensor.nbytes < _LARGE_BYTES
        ]
        self._random = _random_states()
        self._attributes = KeptAttributes(self._modules)
        self._before = [{**vars(each), "_parameters": dict(each._parameters)} for each in self._modules]
        self._copies = [_copies(each) for each in self._modules]
        return self

    def has_moved(self) -> bool:
        """Whether the calls so far have changed any of it."""
        return (
            any(not torch.equal(each.tensor, before) for each, before in self._tensors)
            or _pickled(self._random) != _pickled(_random_states())
            or any(map(_has_moved, self._modules, self._before, self._copies))
        )

    def __exit__(self, *_: object) -> None:
        """Give everything back."""
        _set_random(self._random)
        self._attributes.restore()
        with torch.no_grad():
            for each, before in self._tensors:
                if not torch.equal(each.tensor, before):
                    each.tensor.copy_(before)
                each.held_in[each.name] = each.tensor


def copied(value: Any) -> Any:
    """Return a copy of `value` that later changes of it do not reach, nor of the containers and objects it holds."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    result = copy(value)
    for name, held in getattr(result, "__dict__", {}).items():
        if type(held) is list:
            # Transformers' cache of keys and values has an object a layer.
            setattr(result, name, [each if isinstance(each, torch.Tensor) else copy(each) for each in held])
        elif isinstance(held, _CONTAINERS):
            setattr(result, name, copy(held))
    return result


def _places(modules: list[nn.Module]) -> Iterator[_Place]:
    for owner in modules:
        for name, tensor in owner._buffers.items():
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                yield _Place(owner, owner._buffers, name, tensor, _version(tensor))
        # A trained one is a leaf of the graph, and has its own place in it.
        for name, tensor in owner._parameters.items():
            if type(tensor) is nn.Parameter and not (tensor.requires_grad or tensor.is_meta):
                yield _Place(owner, owner._parameters, name, tensor, _version(tensor))  # type: ignore[arg-type]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_written(place: _Place) -> bool:
    now = place.held_in.get(place.name)
    return now is not place.tensor or _version(place.tensor) != place.version


def _is_state(value: Any) -> bool:
    """Whether a call may depend on what an earlier one has left in `value`, and copies of it are cheap.

    A tensor with a graph is a result, such as a loss beside the model's: it would hold the graph of an earlier step.
    """
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and not value.requires_grad and value.nbytes < _LARGE_BYTES
    return value is None or isinstance(
        value, (bool, int, float, complex, str, tuple, torch.Generator, *_CONTAINERS)
    )


def _copies(module: nn.Module) -> dict[str, Any]:
    return {
        name: copied(value)
        for name, value in vars(module).items()
        if name not in _OF_TORCH and _is_state(value)
    }


def _has_moved(module: nn.Module, before: dict[str, Any], copies: dict[str, Any]) -> bool:
    """Whether a call has changed attributes of `module` from those of `before`, whose values were `copies`.

    Where it has made other parameters too it has initialised the module, which is done once.
    """
    now = vars(module)
    if _identities(now["_parameters"]) != _identities(before["_parameters"]):
        return False
    return now.keys() != before.keys() or any(
        value is not before[name] or (name in copies and _differs(value, copies[name]))
        for name, value in now.items()
        if name not in _OF_TORCH
    )


def _differs(value: Any, before: Any) -> bool:
    """Whether `value`, the same object as ever, has changed since its copy `before` was made."""
    if isinstance(value, torch.Tensor):
        return value.shape != before.shape or not torch.equal(value, before)
    if isinstance(value, torch.Generator):
        return not torch.equal(value.get_state(), before.get_state())
    if isinstance(value, _CONTAINERS):
        return _identities(value) != _identities(before)
    return False


def _identities(container: Any) -> list[int]:
    """Return which objects a container holds, in its order: a comparison of tensors would be one of values."""
    values = [*container, *container.values()] if isinstance(container, dict) else container
    return [id(each) for each in values]


def _replace(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Have `attributes` in place of all state among those of `module`."""
    now = vars(module)
    for name in [each for each, value in now.items() if each not in _OF_TORCH and _is_state(value)]:
        del now[name]
    now.update(attributes)


def _random_states() -> list[tuple[Callable[[Any], None], Any]]:
    """Return the state of each global generator that is not torch's, behind the function that sets it."""
    numpy = sys.modules.get("numpy.random")
    of_numpy = [] if numpy is None else [(numpy.set_state, numpy.get_state())]
    return [(random.setstate, random.getstate()), *of_numpy]


def _set_random(states: Iterable[tuple[Callable[[Any], None], Any]]) -> None:
    for set_state, state in states:
        set_state(state)


def _pickled(states: Iterable[tuple[Callable[[Any], None], Any]]) -> list[bytes]:
    return [pickle.dumps(state) for _, state in states]
