# SPDX-License-Identifier: Apache-2.0
"""One block's weights: their bytes on the host, and a device storage, filled and freed in turn.

All streamed tensors of a block are views of one flat device storage. Freeing it resizes it to nothing under them.
Filling it allocates it again and copies from the host: views that autograd saved for backward are valid whenever the
block is loaded. Only an optimizer with the block's homes may change a weight, through views of its own (`at`), and
copies it back to the host; a change to any other tensor is an error. Outside its block's forward and backward a weight
still on the device is sealed. Fused kernels, `.data` and storages write past autograd's version counter, so behind a
broken seal the bytes are compared with the host's before their memory is freed.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.absent import (
    is_absent,
    is_sealed,
    is_unread,
    mark_absent,
    mark_present,
    read_now,
    seal,
    storage_of,
    unanswered,
)
from reference_impl.memory.host import host_storages
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.memory.ledger import note_on_host, resize_storage, unseen
from reference_impl.weights.host_copies import HostCopy
from reference_impl.weights.host_memory import Host
from reference_impl.weights.storages import BlockStorage, bytes_of, layout, placed, unpacked
from reference_impl.weights.visiting import VisitingBlock

_BROUGHT_BY_ITS_BLOCK = (
    "expected its use inside the forward or backward of its own block, for which it is brought; "
    "try `with streamer.gathered():` around this"
)


@dataclass(frozen=True)
class Place:
    """A storage's number in its block, its offset there, its bytes, and its original device.

    `is_from_host`: the CPU twin counts its original memory as the host's.
    """

    index: int
    offset: int
    size_bytes: int
    origin: torch.device
    is_from_host: bool
    storage: BlockStorage

    def has(self, offset: int) -> bool:
        """Whether the byte at `offset` of the block is one of this storage."""
        return self.offset <= offset < self.offset + self.size_bytes


@dataclass(frozen=True)
class Watched:
    """The taken-over state of a tensor that must not change."""

    name: str
    tensor: torch.Tensor
    version: int
    requires_grad: bool
    offset: int

    def has_changed(self, base_address: int) -> bool:
        """Whether it was written, frozen or unfrozen, or given other memory than at `base_address`."""
        return (
            self.is_written
            or self.tensor.requires_grad != self.requires_grad
            or self.tensor.data_ptr() - base_address != self.offset
        )

    @property
    def is_written(self) -> bool:
        """Whether it was written in place."""
        return self.tensor._version != self.version

    def let_it_be_set_to_itself(self) -> None:
        """Have `set_` to the tensor itself do nothing: torch would count it as a change.

        Parametrizations begin so, and peft's adapters put one on the weights of experts in every forward.
        """
        self.tensor.set_ = _SetToItself(self.name, self.tensor)  # type: ignore[method-assign]

    def let_go(self) -> None:
        """Undo `let_it_be_set_to_itself`."""
        self.tensor.__dict__.pop("set_", None)


class _SetToItself:
    """`set_` of a streamed tensor, see `Watched`; it is in the tensor's `__dict__`, and pickling reads it."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self._tensor = weakref.ref(tensor)

    def __call__(self, *source: Any, **others: Any) -> torch.Tensor:
        """Set the tensor, unless it is that already."""
        tensor = self._tensor()
        assert tensor is not None
        if len(source) == 1 and isinstance(source[0], torch.Tensor) and tensor.is_set_to(source[0]):
            return tensor
        return torch.Tensor.set_(tensor, *source, **others)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled with the tensor, as an absent tensor does."""
        raise RuntimeError(f"{self._name} is not on the device to stay; {_BROUGHT_BY_ITS_BLOCK}")


class StreamedBlock(VisitingBlock):
    """The weights of `module`, streamed from `take` to `restore`."""

    def __init__(self, device: Device, host_memory: Host, module: nn.Module, index: int) -> None:
        super().__init__(device, index)
        self.module = module
        self._host_memory = host_memory
        self._places: list[Place] = []
        self._watched: list[Watched] = []
        self._host: HostCopy | None = None
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._stream_id = 0
        # Whether the weights are sealed; whether a seal was found broken; and the weights then found written.
        self._rests = self._is_suspect = False
        self._written: list[Place] = []
        # Where weights begin that are old on the device.
        self._withheld: set[int] = set()

    @property
    def is_streamed(self) -> bool:
        """Whether the weights come and go; if not, they are ordinary device tensors."""
        return self._host is not None

    @property
    def copied_bytes(self) -> int:
        """See `VisitingBlock`."""
        return 0 if self._host is None else self._host.copied_bytes

    def take(self, storages: Sequence[BlockStorage], slot_bytes: int) -> None:
        """Have the host keep `storages`, and give their tensors a device storage, freed at first.

        Every block's device storage is at least `slot_bytes` long, so that the allocator swaps equals. Raises
        HostMemoryError, and leaves the tensors as they were.
        """
        # Memory moves here. A weight yet to be made would be made in between, in memory that then goes.
        unanswered(self._take, storages, slot_bytes)

    def _take(self, storages: Sequence[BlockStorage], slot_bytes: int) -> None:
        offsets, size_bytes = layout(storages)
        flat = torch.empty(max(slot_bytes, size_bytes), dtype=torch.uint8, device=self._device.torch_device)
        sources = [bytes_of(storage.tensors[0]) for storage in storages]
        copy = self._host_memory.keep(self.index, sources, offsets, size_bytes)
        with deferred_interrupts():
            self._host, self._flat, self.size_bytes = copy, flat, size_bytes
            for index, (storage, offset) in enumerate(zip(storages, offsets, strict=True)):
                is_from_host = storage.tensors[0].untyped_storage().data_ptr() in host_storages
                size_bytes = storage.size_bytes
                self._places.append(Place(index, offset, size_bytes, storage.device, is_from_host, storage))
                for name, tensor in zip(storage.names, storage.tensors, strict=True):
                    tensor.data = placed(flat, tensor, offset)
                    self._watched.append(
                        Watched(
                            name,
                            tensor,
                            tensor._version,
                            tensor.requires_grad,
                            tensor.data_ptr() - flat.data_ptr(),
                        )
                    )
                    self._watched[-1].let_it_be_set_to_itself()
            self._free()

    def load(self) -> None:
        """Allocate on the live current stream and start the H2D copy behind it.

        Raises RuntimeError while a CUDA graph is being captured.
        """
        assert self._host is not None
        self._device.refuse_capture("layer streaming")
        resize_storage(self._flat.untyped_storage(), self._flat.numel())
        self._stream_id = self._device.current_stream_id()
        self._started = self._host.load(self._flat[: self.size_bytes], after=self._stored)
        self._memory = self._flat

    def hold(self) -> Event:
        """See `VisitingBlock`. Raises RuntimeError when a tensor has changed: an update would be of something else."""
        self._refuse_changes()
        return super().hold()

    def wait(self) -> None:
        """Make the live current stream wait for the copy, and let the weights be used.

        Raises the error of reading them from the host, and names the way back if their memory is parked.
        """
        if is_absent(self._flat):
            # It answers any operation so; views of it would meet torch's error about a storage of size 0.
            self._flat.view(-1)
        try:
            self._device.wait(self._started())
        except BaseException:
            self._free()
            raise
        self._look_at_seals()
        self._rests = False
        self._withheld.clear()
        for watched in self._watched:
            mark_present(watched.tensor)

    def rest(self) -> None:
        """Hear of possible writes to the unused weights on the device."""
        if self.is_streamed and self.is_loaded:
            self._rests = True
            for watched in self._watched:
                if watched.offset in self._withheld:
                    mark_absent(watched.tensor, watched.name, _BROUGHT_BY_ITS_BLOCK)
                else:
                    seal(watched.tensor)

    def withhold(self, offset: int) -> None:
        """See `VisitingBlock`."""
        self._look_at_seals()
        self._withheld.add(offset)
        for watched in self._watched:
            if self._rests and watched.offset == offset:
                mark_absent(watched.tensor, watched.name, _BROUGHT_BY_ITS_BLOCK)

    def brought(self, offset: int, event: Event) -> None:
        """See `VisitingBlock`; the live current stream is to wait for `event` before anybody uses the weight."""
        super().brought(offset, event)
        self._withheld.discard(offset)
        for watched in self._watched:
            if self._rests and watched.offset == offset:
                mark_present(watched.tensor)
                seal(watched.tensor)

    def evict(self) -> None:
        """Free the device memory behind everything that the live current stream has been given.

        Raises RuntimeError when a tensor has changed: its new value would be lost.
        """
        self._refuse_changes()
        # A copy that nobody waited for may still be writing, or new weights may be on their way home.
        self.wait()
        self._device.wait(self._stored)
        self._device.wait(self._brought)
        if self._stream_id != self._device.current_stream_id():
            # The memory belongs to another stream, unaware of this one's kernels.
            self._device.synchronize()
        self._free()

    def restore(self, *, to_origin: bool) -> None:
        """Give every storage its own memory again, on the device or where it came from, with all writes to it.

        Live graphs keep the flat storage; it is loaded from here on.
        """
        if self._host is None:
            return
        if self.is_loaded:
            # A read that failed earlier is tried again below.
            with suppress(OSError):
                self.wait()
        if not self.is_loaded:
            self.load()
            self.wait()
        self.wait_stored()
        # All memory first: running out of it half way would leave some tensors here and some there.
        own = [self._own_bytes(self._host, place, to_origin) for place in self._places]
        empty = torch.empty(0, dtype=torch.uint8)
        with deferred_interrupts():
            for place, bytes_ in zip(self._places, own, strict=True):
                for tensor in place.storage.tensors:
                    # A tensor that somebody gave other memory keeps it.
                    if self.owns(tensor):
                        tensor.data = placed(bytes_, tensor, -place.offset)
            for watched in self._watched:
                watched.let_go()
            self._host.release(after=self._started())
            self._stored = REACHED
            self._host, self._places, self._watched = None, [], []
            self._flat, self._memory, self.size_bytes = empty, None, 0

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, or a part of it where it is packed, is a view of this block's device storage."""
        flat = self._flat.untyped_storage()._cdata
        return self.is_streamed and any(storage_of(part)._cdata == flat for _, part in unpacked("", tensor))

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of `tensor`, in host memory: those of the host copy, unless it was written since."""
        if is_traceable_wrapper_subclass(tensor):
            parts, context = tensor.__tensor_flatten__()
            inner = {part: self.on_host(getattr(tensor, part)) for part in parts}
            # The wrapper's own code reads them where no class of tensors answers.
            for part in filter(is_unread, inner.values()):
                read_now(part)
            packed: torch.Tensor = tensor.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
            return packed
        if not self.owns(tensor):
            return tensor.cpu()
        start = tensor.storage_offset() * tensor.itemsize
        place = next(place for place in self._places if place.has(int(start)))
        if self._is_written(place):
            return placed(self._on_device(place).to("cpu", copy=True), tensor, -place.offset)
        assert self._host is not None
        return self._host.lend(place.index, tensor, -place.offset)

    def _own_bytes(self, host: HostCopy, place: Place, to_origin: bool) -> torch.Tensor:
        if to_origin and place.origin.type == "cpu":
            if not place.is_from_host:
                return self._own_on_host(host, place)
            with unseen():
                own = self._own_on_host(host, place)
            note_on_host(own)
            return own
        return self._on_device(place).clone()

    def _own_on_host(self, host: HostCopy, place: Place) -> torch.Tensor:
        if self._is_written(place):
            return self._on_device(place).to("cpu", copy=True)
        return host.own(place.index)

    def _on_device(self, place: Place) -> torch.Tensor:
        return self._flat[place.offset : place.offset + place.size_bytes]

    def _is_written(self, place: Place) -> bool:
        """Whether the storage on the device was written, so that its host copy is old."""
        return self.is_loaded and (
            place in self._found_written()
            or any(watched.is_written for watched in self._watched if place.has(watched.offset))
        )

    def _free(self) -> None:
        resize_storage(self._flat.untyped_storage(), 0)
        self._memory = None
        self._rests = self._is_suspect = False
        self._written.clear()
        for watched in self._watched:
            mark_absent(watched.tensor, watched.name, _BROUGHT_BY_ITS_BLOCK)

    def _changed_name(self, base_address: int) -> str | None:
        return next((w.name for w in self._watched if w.has_changed(base_address)), None)

    def _refuse_changes(self) -> None:
        # Sealed tensors answer in Python otherwise.
        changed = unanswered(self._changed_name, self._flat.data_ptr())
        if changed is None:
            changed = next((place.storage.names[0] for place in self._found_written()), None)
        if changed is not None:
            raise RuntimeError(
                f"{changed} has changed, or been frozen or unfrozen, since it was taken over; expected streamed "
                "weights to be as they were; try changing them inside streamer.gathered()"
            )

    def _look_at_seals(self) -> None:
        """Suspect a write where a seal is broken."""
        if self._rests:
            self._is_suspect |= not all(
                is_sealed(watched.tensor) or watched.offset in self._withheld for watched in self._watched
            )

    def _found_written(self) -> list[Place]:
        """Return the places with other bytes than the host's, if anybody may have written them unseen."""
        self._look_at_seals()
        if self._is_suspect:
            self.wait_stored()
            for arriving in (self._started(), self._brought):
                self._device.wait(arriving)
            assert self._host is not None
            differing = [
                place
                for place in self._places
                if not torch.equal(self._on_device(place).cpu(), self._host.part(place.index))
            ]
            self._written = [
                place for place in differing if not any(map(place.has, tuple(self.newer_at_home)))
            ]
            self._is_suspect = False
            if self._rests:
                self.rest()
        return self._written
