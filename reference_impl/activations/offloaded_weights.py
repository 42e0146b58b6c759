# SPDX-License-Identifier: Apache-2.0
"""The weights of offloaded layers are held on the host too, from the end of a layer's forward until its backward.

A layer's weights are copied out while it computes. Weights that train are copied in every forward. A frozen weight is
sealed while its layer is idle. If the seal is whole at the next forward, and nobody else holds its memory, nobody can
have written it, and the host's copy serves once more. The device storage is resized to nothing under the weights
and filled again before backward asks for it; views that autograd saved stay valid. After backward every weight is on
the device for the optimizer.

Between a forward and the end of its backward the weights of offloaded layers must not be read from outside,
except through `state_dict()`.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from reference_impl.activations.attach import change_copies
from reference_impl.activations.geometry import flat_bytes
from reference_impl.device import REACHED, Device, Event, device_is_lost
from reference_impl.memory.absent import is_sealed, mark_absent, mark_present, seal, storage_of
from reference_impl.memory.arena import HostArena, HostBlock
from reference_impl.memory.arriving import wait_for
from reference_impl.memory.closing import do_undoably, register_undoably, undo_all
from reference_impl.memory.ledger import resize_storage

_LOST = "expected a device that can take it back; try a new process and the last checkpoint"


class OffloadedStorage:
    """One weight's storage, its host copy, and where the bytes are."""

    def __init__(self, device: Device, arena: HostArena, name: str, tensor: torch.Tensor) -> None:
        self._device = device
        self._arena = arena
        self._name = name
        self._tensor = tensor
        self._block: HostBlock | None = None
        self._storage = storage_of(tensor)
        self._version = -1
        self._is_fresh = False
        self._ready: Event = REACHED
        self._size_bytes = 0
        self._is_leaving = self._is_coming = False

    @property
    def is_on_host(self) -> bool:
        """Whether the host alone has the bytes: the device has no memory for them, or they have not come yet.

        The storage itself says the first: a flag behind the freeing would be missing if Ctrl-C came between.
        """
        return self._is_coming or (self._is_leaving and self._storage.nbytes() == 0)

    def wait_for_update(self) -> None:
        """Wait for a new value on its way: compiled layers wait behind the copy out, at their own begin."""
        wait_for(self._tensor)

    def open(self) -> None:
        """Take the seal off for the layer's forward, and note whether the host's copy still has the weight's values."""
        self._is_fresh = self._is_fresh and self._is_untouched()
        mark_present(self._tensor)

    def seal(self) -> None:
        """Seal a frozen weight whose values the host's copy has: any write from here on breaks the seal."""
        if self._is_fresh and not self.is_on_host and not self._tensor.requires_grad:
            seal(self._tensor)

    def start_offload(self) -> int:
        """Start the D2H copy when the host's copy is stale; return the bytes it moves."""
        if self._is_fresh:
            return 0
        storage = self._tensor.untyped_storage()
        size_bytes = int(storage.nbytes())
        if self._block is not None and size_bytes != self._size_bytes:
            self._arena.free(self._block, after=self._ready)
            self._block = None
        if self._block is None:
            self._block = self._arena.allocate(size_bytes)
        self._storage, self._size_bytes = storage, size_bytes
        after = (self._device.record(), self._block.ready)
        self._ready = self._block.ready = self._device.copy_out(self._host(), self._flat(), after=after)
        self._version = self._tensor._version
        self._is_fresh = True
        return size_bytes

    def free_device(self) -> int:
        """Free the device storage, behind the copy; return the bytes copied again if forward has written the weight."""
        self._is_fresh = self._is_fresh and self._is_as_copied()
        moved_bytes = self.start_offload()
        self._device.wait(self._ready)
        self._is_leaving = True
        resize_storage(self._storage, 0)
        return moved_bytes

    def start_load(self) -> None:
        """Allocate on the live current stream and start the H2D copy."""
        if not self.is_on_host:
            self._is_leaving = False
            return
        assert self._block is not None
        # Before there is memory, which holds no weight until the copy is queued.
        self._is_coming = True
        # The storage of forward: backward reads it even if the weight was given other memory since.
        resize_storage(self._storage, self._size_bytes)
        after = (self._device.record(), self._ready)
        self._ready = self._block.ready = self._device.copy_in(self._flat(), self._host(), after=after)
        self._is_leaving = False
        self._is_coming = False

    def load(self) -> None:
        """Have the bytes on the device, ready for the live current stream."""
        self.start_load()
        self._device.wait(self._ready)

    def close(self) -> None:
        """Have the bytes on the device for good."""
        self.load()
        mark_present(self._tensor)
        if self._block is not None:
            self._arena.free(self._block, after=self._ready)
            self._block = None

    def give_up(self) -> None:
        """Make every use of the weight raise an error, unless it is on the device."""
        if self.is_on_host:
            mark_absent(self._tensor, self._name, _LOST)

    def _flat(self) -> torch.Tensor:
        return flat_bytes(self._storage, 0, self._size_bytes)

    def _is_untouched(self) -> bool:
        """Whether nobody can have written the weight since it was copied."""
        if not self._is_as_copied():
            return False
        # Without device memory it cannot be written.
        return self.is_on_host or (is_sealed(self._tensor) and _is_held_by_one(self._storage))

    def _is_as_copied(self) -> bool:
        """Whether the weight has the memory and the version that were copied."""
        is_same = storage_of(self._tensor)._cdata == self._storage._cdata
        return is_same and self._tensor._version == self._version

    def _host(self) -> torch.Tensor:
        assert self._block is not None
        return self._block.view(torch.uint8, (self._size_bytes,))


class OffloadedWeights:
    """The weights of `layers` that no other module shares, on the host while their layer is inactive."""

    def __init__(
        self,
        device: Device,
        arena: HostArena,
        model: nn.Module,
        layers: Iterable[nn.Module],
        *,
        min_bytes: int,
    ) -> None:
        self.moved_bytes = 0
        self._storages = {
            layer: [
                OffloadedStorage(device, arena, name, tensor)
                for name, tensor in _own_tensors(model, layer, min_bytes).items()
            ]
            for layer in layers
        }
        self._order: list[nn.Module] = []
        self._undo: list[Callable[[], None]] = []
        try:
            register_undoably(model.register_state_dict_pre_hook, self._before_saving, self._undo)
            for module in {model, *self._storages}:
                do_undoably(partial(change_copies, module, self._make_plain), self._undo)
        except BaseException:
            undo_all(self._undo)
            raise

    def before_forward(self, layer: nn.Module) -> None:
        """Have `layer`'s weights on the device; their copies out start while it computes."""
        if layer in self._order and torch._C._current_graph_task_id() == -1:
            self._order.clear()
        leaves = _leaves_after_forward()
        for storage in self._storages[layer]:
            if leaves:
                storage.wait_for_update()
            storage.open()
            storage.load()
            if leaves:
                self.moved_bytes += storage.start_offload()

    def after_forward(self, layer: nn.Module) -> None:
        """Free the device storage of `layer`'s weights, unless this was an evaluation or a recomputation."""
        if not _leaves_after_forward():
            for storage in self._storages[layer]:
                storage.seal()
            return
        self._order.append(layer)
        for storage in self._storages[layer]:
            self.moved_bytes += storage.free_device()

    def bring(self, layer: nn.Module) -> Callable[[], None]:
        """Return a function that brings `layer`'s weights for its backward, and starts on the layer before it."""

        def bring() -> None:
            if any(storage.is_on_host for storage in self._storages[layer]):
                torch.autograd.Variable._execution_engine.queue_callback(self.gather)
            for storage in self._storages[layer]:
                storage.load()
            self._start_before(layer)

        return bring

    def gather(self) -> None:
        """Have all weights on the device."""
        for storages in self._storages.values():
            for storage in storages:
                storage.load()
                storage.seal()

    def close(self) -> None:
        """Bring everything back for good. Where the device lacks the memory, this may be called again."""
        undo_all(self._undo)
        storages = [storage for storages in self._storages.values() for storage in storages]
        try:
            for storage in storages:
                storage.close()
        except BaseException as error:
            if device_is_lost(error):
                for storage in storages:
                    storage.give_up()
            raise

    def _before_saving(self, *_: Any) -> None:
        self.gather()

    def _make_plain(self, state: dict[str, Any]) -> None:
        """Have a copy find all weights on the device, and leave them to it."""
        self.gather()
        for storages in self._storages.values():
            for storage in storages:
                storage.open()
        hooks = state.get("_state_dict_pre_hooks")
        if hooks:
            state["_state_dict_pre_hooks"] = type(hooks)(
                (number, hook) for number, hook in hooks.items() if hook != self._before_saving
            )

    def _start_before(self, layer: nn.Module) -> None:
        position = self._order.index(layer) if layer in self._order else 0
        if position > 0:
            for storage in self._storages[self._order[position - 1]]:
                storage.start_load()


def _leaves_after_forward() -> bool:
    """Whether a backward follows the running forward: it is no evaluation and no recomputation."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _is_held_by_one(storage: torch.UntypedStorage) -> bool:
    """Whether one tensor uses `storage`: a view could be written without the tensor's knowledge."""
    # One count is the Python object's.
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2


def _own_tensors(model: nn.Module, layer: nn.Module, min_bytes: int) -> dict[str, torch.Tensor]:
    """Return one parameter by its name for each storage of `layer` that is large enough and nobody else's."""
    inside = set(layer.modules())
    elsewhere = (
        each for module in model.modules() if module not in inside for each in module._parameters.values()
    )
    shared = {storage_of(p)._cdata for p in elsewhere if p is not None}
    of_layer = set(layer.parameters())
    own = {storage_of(p)._cdata: (name, p) for name, p in model.named_parameters() if p in of_layer}
    return {
        name: p for key, (name, p) in own.items() if key not in shared and storage_of(p).nbytes() >= min_bytes
    }
