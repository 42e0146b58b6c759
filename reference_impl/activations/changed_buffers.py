# SPDX-License-Identifier: Apache-2.0
"""The buffers that a layer's forward changes: running statistics of BatchNorm, the vectors of `spectral_norm`.

A second call would change them once more, and with the changed ones it would compute something else. So the second call
has copies of what they held before the first one, and its changes to these are lost.

Which buffers change is learnt from a layer's first call in training or evaluation, by their values: batch norm tells of
no write to its statistics. Later calls ask for versions alone, which costs no wait for the device. A layer that begins
to change another module's buffers is learnt anew at its next call. So is one that changes large buffers: most of these
are quantized weights, of which a first call makes no copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

_LARGE_BYTES = 2**20


class _Buffer(NamedTuple):
    """A buffer of `owner` before a call."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int


class _Learnt(NamedTuple):
    """The places of buffers that a layer changes, among all, and of each whether its module was in training then."""

    changing: frozenset[int]
    training: tuple[bool, ...]


_learnt: WeakKeyDictionary[nn.Module, _Learnt] = WeakKeyDictionary()


class ChangedBuffers:
    """The buffers of `layer` before a call, as far as the call changes them."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._buffers = [
            _Buffer(owner, name, tensor, _version(tensor))
            for owner in layer.modules()
            for name, tensor in owner._buffers.items()
            if type(tensor) is torch.Tensor
        ]
        training = tuple(each.owner.training for each in self._buffers)
        learnt = _learnt.get(layer)
        self._is_first = learnt is None or learnt.training != training
        if learnt is None or self._is_first:
            learnt = _Learnt(frozenset(), training)
        self._learnt = learnt
        # By their places.
        self._before = {
            place: each.tensor.detach().clone()
            for place, each in enumerate(self._buffers)
            if place in learnt.changing or (self._is_first and each.tensor.nbytes < _LARGE_BYTES)
        }

    def end(self) -> None:
        """Note that the call has returned, and keep what it has changed."""
        written = {place for place, each in enumerate(self._buffers) if _is_written(each)}
        if self._is_first:
            differing = (
                place
                for place, before in self._before.items()
                if not torch.equal(self._buffers[place].tensor, before)
            )
            owners = {self._buffers[place].owner for place in (*written, *differing)}
            changing = frozenset(place for place, each in enumerate(self._buffers) if each.owner in owners)
            self._before = {place: each for place, each in self._before.items() if place in changing}
            _learnt[self._layer] = self._learnt._replace(changing=changing)
        elif not written <= self._learnt.changing:
            _learnt.pop(self._layer, None)
        if not self._before:
            # Of most layers: the graph need not hold them until backward.
            self._buffers = []

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have the layer's buffers inside the context as they were before the call; changes to them are lost."""
        places = [(self._buffers[place], before) for place, before in self._before.items()]
        now = [each.owner._buffers.get(each.name) for each, _ in places]
        try:
            for each, before in places:
                each.owner._buffers[each.name] = before.clone()
            yield
        finally:
            for (each, _), tensor in zip(places, now, strict=True):
                each.owner._buffers[each.name] = tensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_written(buffer: _Buffer) -> bool:
    now = buffer.owner._buffers.get(buffer.name)
    return now is not buffer.tensor or _version(buffer.tensor) != buffer.version
