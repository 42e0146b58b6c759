# SPDX-License-Identifier: Apache-2.0
"""One storage's way to the host and back, under the tensors that lie on it.

The bytes are copied out first. Only then is the storage emptied, and its tensors refuse to be computed with. On the
way back the storage gets memory again and the bytes are copied in; tensors, views, version counters and autograd's
leaves never learn of it.

A frozen weight with the bytes of the last parking is not copied again. A fingerprint says so that the device computes,
because no version counter sees fused kernels, `.data` and writes to the storage itself.

Explained in docs/parking.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from reference_impl.device import Device
from reference_impl.device.base import device_is_full
from reference_impl.memory.absent import (
    detached_meanwhile,
    is_absent,
    mark_absent,
    mark_present,
    parts_of_wrapper,
    storage_of,
)
from reference_impl.memory.arena import HostArena, HostBlock
from reference_impl.memory.ledger import resize_storage
from reference_impl.parking.tensors import FoundStorage, Kind
from reference_impl.weights.storages import placed

REMEDY = "training is parked: try restore() first"
# Two kernels a chunk; both buffers stay in the GPU's cache.
_CHUNK_WORDS = 2**20
_WORD_BYTES = 8
# More writes than training does between a forward and its backward.
_AWAY = 2**24


class ParkedStorage:
    """A storage of training memory that can be parked: on the device, or `is_parked` in its block of `arena`.

    Between parkings it keeps its block but none of its tensors alive.
    """

    def __init__(self, device: Device, found: FoundStorage) -> None:
        self.kind: Kind = found.kind
        self.size_bytes = found.size_bytes
        self.is_parked = False
        self._device = device
        self._block: HostBlock | None = None
        self._fingerprint: int | None = None
        # The copy out has begun before anybody has looked whether this is still training memory.
        self._is_under_way = False
        # While the tensors are absent: where autograd's counters stood.
        self.versions: list[tuple[torch.Tensor, int]] = []
        self._take(found)

    def finds(self, found: FoundStorage) -> bool:
        """Take over `found` and return True if it is this same storage, at another parking."""
        tensor = self._seen()
        if tensor is None or storage_of(tensor)._cdata != found.storage._cdata:
            return False
        if found.size_bytes != self.size_bytes or found.kind != self.kind:
            return False
        self._take(found)
        return True

    def _take(self, found: FoundStorage) -> None:
        self.found: FoundStorage | None = found
        self.storage_key, self._may_change = int(found.storage._cdata), found.may_change
        # Not the parking keeps tensors alive whose bytes are on the device.
        self._seen: Callable[[], torch.Tensor | None] = weakref.ref(found.tensors[0][1])

    def take_block(self, arena: HostArena) -> None:
        """Have host memory. Raises HostMemoryError."""
        if self._block is None:
            self._block = arena.allocate(self.size_bytes)

    def give_block(self, arena: HostArena) -> None:
        """Give the host memory back."""
        block, self._block, self._fingerprint = self._block, None, None
        if block is not None:
            arena.free(block)

    def start_early(self) -> None:
        """Start the D2H copy of a storage that the last parking had, if it is still there and training writes it."""
        tensor = self._seen()
        if tensor is None or self._block is None or not self._may_change:
            return
        storage = storage_of(tensor)
        is_same = storage._cdata == self.storage_key and storage.nbytes() == self.size_bytes
        if is_same and not self._device.is_pageable(self.host):
            self._is_under_way = True
            self._device.copy(self.host, _flat(storage))

    def start_copy_out(self, fingerprints: Fingerprints) -> int:
        """Start the D2H copy and return its bytes: 0 where the host has the same bytes already. The host may wait."""
        assert self.found is not None
        under_way, self._is_under_way = self._is_under_way, False
        if not self.found.may_change:
            before, self._fingerprint = self._fingerprint, fingerprints.of(_flat(self.found.storage))
            if before is not None and before == self._fingerprint:
                return 0
        if not under_way:
            self._device.copy(self.host, _flat(self.found.storage))
        return self.size_bytes

    def be_absent(self) -> None:
        """Have the tensors refuse to be computed with. While copies run there is time for it.

        To a graph that has saved one of them it looks written, so that a backward raises before it reads the memory.
        """
        assert self.found is not None
        wrappers = [each for each in self.found.wrappers if not is_absent(each[1])]
        counted = [tensor for _, tensor in (*self.found.tensors, *wrappers) if not tensor.is_inference()]
        self.versions = [(tensor, tensor._version) for tensor in counted]
        set_versions([(tensor, version + _AWAY) for tensor, version in self.versions])
        for name, tensor in (*self.found.tensors, *wrappers):
            mark_absent(tensor, name, REMEDY)

    def abandon(self) -> None:
        """Forget the parking that is not to be; no copy runs. The host's bytes are of no parking any more."""
        self._fingerprint, self._is_under_way = None, False
        set_versions(self.versions)
        self.be_present()

    def free_device(self) -> None:
        """Take the memory from under the tensors: they are absent, with their bytes on the host."""
        assert self.found is not None
        # First: from here on the host's bytes count.
        self.is_parked = True
        resize_storage(self.found.storage, 0)

    def take_memory(self) -> None:
        """Have memory on the device again. Raises OutOfMemoryError."""
        assert self.found is not None
        resize_storage(self.found.storage, self.size_bytes)

    def start_copy_in(self) -> None:
        """Start the H2D copy to the memory that was taken."""
        assert self.found is not None
        self._device.copy(_flat(self.found.storage), self.host)

    def free_again(self) -> None:
        """Undo `take_memory`, once no copy runs, unless the tensors are present already."""
        if self.is_parked and self.found is not None and self.found.storage.nbytes():
            resize_storage(self.found.storage, 0)

    def be_present(self) -> None:
        """Let the tensors be computed with, whose bytes are on the device; keep none of them alive. Idempotent.

        Autograd's counters are to stand where they stood, see `set_versions`.
        """
        if self.found is not None:
            for _, tensor in self.found.tensors:
                _mark_present(tensor)
            for _, wrapper in self.found.wrappers:
                if not any(map(is_absent, parts_of_wrapper(wrapper))):
                    _mark_present(wrapper)
        self.is_parked, self.found, self.versions = False, None, []

    @property
    def name(self) -> str:
        """The name of the first tensor on it."""
        assert self.found is not None
        return self.found.name

    @property
    def address(self) -> int:
        """Where the storage is on the device."""
        assert self.found is not None
        return self.found.storage.data_ptr()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the parked `tensor` of this storage as it is on the host: a view of the slab."""
        return placed(self.host, tensor, int(self.host.storage_offset()))

    @property
    def host(self) -> torch.Tensor:
        """The bytes on the host, flat uint8."""
        assert self._block is not None
        return self._block.view(torch.uint8, (self.size_bytes,))


def _mark_present(tensor: torch.Tensor) -> None:
    for each in (*detached_meanwhile(tensor), tensor):
        mark_present(each)


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of `storage`, flat uint8: an absent tensor answers with its storage only."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def set_versions(versions: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Have autograd's counter of each tensor stand at its number."""
    if versions:
        tensors, numbers = zip(*versions, strict=True)
        torch._C._autograd._unsafe_set_version_counter(tensors, numbers)


class Fingerprints:
    """Fingerprints of bytes on one device, whose buffers live as long as this.

    A fingerprint is the sum of the 64-bit words times fixed odd random numbers, modulo 2^64: it changes with any single
    word, and other changes keep it with a probability of 2^-63 or less.
    """

    def __init__(self, device: Device) -> None:
        self._device = device.torch_device

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        multipliers = torch.empty(_CHUNK_WORDS, dtype=torch.int64)
        multipliers.random_(generator=torch.Generator().manual_seed(0)).bitwise_or_(1)
        on_device = multipliers.to(self._device)
        return on_device, torch.empty_like(on_device)

    def of(self, flat: torch.Tensor) -> int | None:
        """Return the fingerprint of `flat` (uint8, on the device), or None without room for it; the host waits."""
        try:
            return self._computed(flat)
        except Exception as error:
            if not device_is_full(error):
                raise
            return None

    def _computed(self, flat: torch.Tensor) -> int:
        multipliers, product = self._buffers
        words = flat[: flat.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for number, chunk in enumerate(words.split(_CHUNK_WORDS)):
            part = torch.mul(chunk, multipliers[: chunk.numel()], out=product[: chunk.numel()])
            # Chunks that are exchanged change the sum, too.
            total.add_(part.sum()).mul_(2 * number + 3)
        rest = flat[words.numel() * _WORD_BYTES :].to(torch.int64)
        total.add_((rest * multipliers[: rest.numel()]).sum())
        return int(total)
