# SPDX-License-Identifier: Apache-2.0
"""Trained weights that are copied to the device block by block, and back to the host after an update.

Each parameter of a block has a `Home`, through which its optimizer writes it while the block is on the device. The
host memory of a home stays the same from construction to `close()`, also while the weights are gathered as ordinary
tensors.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn

from reference_impl.device import REACHED, Device, Event
from reference_impl.memory.arena import HostArena
from reference_impl.memory.weight_home import refuse_update
from reference_impl.weights.block import StreamedBlock
from reference_impl.weights.host_copies import Loader, PinnedCopy
from reference_impl.weights.layers import LayerStreamer
from reference_impl.weights.storages import BlockStorage, layout
from reference_impl.weights.visiting import VisitingBlock

_SLAB_BYTES = 2**28


class Home:
    """A parameter's `memory.weight_home.WeightHome`: the elements of `weight`, at `offset` bytes of its block.

    `visit` has the block on the device, see there.
    """

    def __init__(
        self,
        homes: Homes,
        block: VisitingBlock,
        offset: int,
        weight: torch.Tensor,
        visit: Callable[[], Event],
    ) -> None:
        self._homes = homes
        self._block = block
        self._offset = offset
        self._numel = weight.numel()
        self._dtype = weight.dtype
        self.visit = visit

    @property
    def host(self) -> torch.Tensor:
        """The weight on the host, flat."""
        return self.host_part(0, self._numel)

    def host_part(self, start: int, stop: int) -> torch.Tensor:
        """Return elements on the host, flat."""
        first = self._offset + start * self._dtype.itemsize
        last = self._offset + stop * self._dtype.itemsize
        return self._homes.bytes_of(self._block.index)[first:last].view(self._dtype)

    def expect(self) -> None:
        """See `WeightHome`."""
        self._block.withhold(self._offset)

    def renew(self, start: int, weights: torch.Tensor) -> None:
        """Write `weights` from element `start` on the host."""
        # Before the first byte: whoever compares it with the device's looks here afterwards.
        self._block.newer_at_home.add(self._offset)
        self.host_part(start, start + weights.numel()).copy_(weights)

    def device_part(self, start: int, stop: int) -> torch.Tensor:
        """Return the same elements on the device, flat, while the block visits."""
        size = self._dtype.itemsize
        return self._block.at(self._offset + start * size, (stop - start) * size).view(self._dtype)

    @property
    def is_lent(self) -> bool:
        """Whether the weights of the block are ordinary tensors for now."""
        return not self._block.is_streamed

    def bring(self) -> Event:
        """Copy the weight to the device once more, on the stream for new weights, behind the copy of its block."""
        self._block.newer_at_home.discard(self._offset)
        arrival = self._block.arrival
        if arrival is None:
            return REACHED
        device = self._homes.device
        with device.on_h2d_of_weights():
            device.wait(arrival)
            device.copy(self.device_part(0, self._numel), self.host)
            event = device.record()
        self._block.brought(self._offset, event)
        return event

    @property
    def block_index(self) -> int:
        """The block's number."""
        return self._block.index

    def leave(self, stored: Event) -> None:
        """Let the block go once `stored` is reached."""
        self._block.stored(stored)


class HomeCopy(PinnedCopy):
    """A block's pinned bytes that new weights come home to; they stay until all homes close."""

    def renew(self, sources: Sequence[torch.Tensor]) -> list[bool]:
        """Copy `sources` as they are now; return which of them differ from the copies before."""
        changed = [
            not torch.equal(part, source.cpu()) for part, source in zip(self.parts, sources, strict=True)
        ]
        for part, source, differs in zip(self.parts, sources, changed, strict=True):
            if differs:
                part.copy_(source)
        return changed

    def release(self, *, after: Event) -> None:
        """Do nothing: the home stays."""


class Homes:
    """The pinned memory of all blocks' weights, as `host_memory.Host`."""

    # Blocks are copied to their place at once.
    buffer_bytes = 0

    def __init__(self, device: Device, blocks: Sequence[Sequence[BlockStorage]], *, remedy: str) -> None:
        total_bytes = sum(layout(block)[1] for block in blocks)
        self.device = device
        self._arena = HostArena(
            device, slab_bytes=max(min(total_bytes, _SLAB_BYTES), 1), remedy=remedy, serves="weights"
        )
        self._loader = Loader(device)
        self._copies: dict[int, HomeCopy] = {}
        self._shapes: dict[int, tuple[list[int], int]] = {}
        # For each block, its storages found changed by the last `keep`.
        self.changed: dict[int, list[bool]] = {}

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory in use."""
        return self._arena.live_bytes

    def bytes_of(self, index: int) -> torch.Tensor:
        """Return the bytes of block `index`, laid out as on the device."""
        return self._copies[index].whole

    def keep(
        self, index: int, sources: Sequence[torch.Tensor], offsets: Sequence[int], size_bytes: int
    ) -> HomeCopy:
        """Return the home of block `index`, with the elements of `sources`. Raises HostMemoryError, RuntimeError.

        RuntimeError: the block's weights differ from the lent ones.
        """
        shape = list(offsets), size_bytes
        if index not in self._copies:
            self._copies[index] = HomeCopy(self._loader, self._arena, sources, offsets, size_bytes)
            self._shapes[index] = shape
            self.changed[index] = [False] * len(sources)
        elif self._shapes[index] != shape:
            raise RuntimeError(
                f"block {index} has come back with {len(sources)} weights of {size_bytes} bytes; expected the "
                f"{len(self._shapes[index][0])} of {self._shapes[index][1]} that were lent, on their device and in "
                "their dtype; try changing dtype or device before the streamer is made"
            )
        else:
            self.changed[index] = self._copies[index].renew(sources)
        return self._copies[index]

    def close(self) -> None:
        """Wait for copies and give everything back. Calling it again does nothing."""
        self._loader.close()
        self._copies.clear()
        self._arena.close()


class TrainedWeights(LayerStreamer):
    """Streams all weights of blocks, trained ones too, for an optimizer that updates them during their visits.

    Args:
        model, modules, storages, device, allowances: see `LayerStreamer`.
        homes: the host memory of the weights.
        finish_update: makes the weights of trained parameters new, on the device and at home, as far as the optimizer
            has begun to change them; called with one block's parameters before anybody reads them. If the block is on
            the device for its forward, parameters of the next blocks are passed too, as `ahead`.
        changed: is told which parameters the user has changed while they were lent.
        noting_status_on_error: weights come and go inside it, so that the optimizer hears of a lost device.
        passed: hears that backward is about to begin another block. A block that it has passed then lingers for the
            time of another one, so that its update on the device delays no kernel.
    """

    _with_trained = True

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        storages: Sequence[Sequence[BlockStorage]],
        *,
        device: Device,
        homes: Homes,
        allowances: Sequence[int],
        finish_update: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
        changed: Callable[[list[torch.Tensor]], None],
        noting_status_on_error: Callable[[], AbstractContextManager[None]],
        passed: Callable[[], None] | None = None,
    ) -> None:
        self.homes = homes
        self.home_of: dict[torch.Tensor, Home] = {}
        self._finish_update = finish_update
        self._changed = changed
        self._noting_status_on_error = noting_status_on_error
        self._passed = passed
        self._params: dict[int, list[torch.Tensor]] = {}
        super().__init__(
            model,
            modules,
            storages,
            device=device,
            host=homes,
            allowances=allowances,
        )

    @property
    def ahead(self) -> list[torch.Tensor]:
        """The trained parameters that are on the device or on their way, in the order of the model."""
        return [param for block in self._window.loaded for param in self._params[block.index]]

    def reload(self) -> None:
        """Bring the weights on the device again: their homes have been written."""
        self._window.reload()

    def end_failed_loads(self) -> None:
        """See `trained_layers.placement.VisitingWeights`."""
        for load in self._loads.values():
            load.end_failed()

    @contextmanager
    def gathered(self, layer: nn.Module | None = None) -> Iterator[None]:
        """See `LayerStreamer`; weights that never leave the device are new inside, too."""
        if not self._is_closed:
            params = (self._model if layer is None else layer).parameters()
            self._finish_update(
                [param for param in params if param.requires_grad and param not in self.home_of], []
            )
        with super().gathered(layer):
            yield

    def visit(self, block: StreamedBlock) -> Event:
        """Have `block` on the device, held until its new weights are home; return the event of its arrival."""
        if not block.is_streamed:
            raise refuse_update(block.index)
        self._window.bring(block)
        return block.hold()

    def _before_forward(self, block: StreamedBlock) -> None:
        with self._noting_status_on_error():
            super()._before_forward(block)
            if block.is_streamed:
                self._finish_update(self._params[block.index], self._next_to_update(block))

    def _next_to_update(self, block: StreamedBlock) -> list[torch.Tensor]:
        """Return the parameters of loaded blocks after `block`, without the last: its weights come in now.

        Its states would wait for them in every slot, and the link would idle until one of these is free again.
        """
        coming = [each for each in self._window.loaded if each.index > block.index]
        return [param for each in coming[:-1] or coming for param in self._params[each.index]]

    def _after_forward(self, block: StreamedBlock) -> None:
        with self._noting_status_on_error():
            super()._after_forward(block)

    def _before_backward(self, block: StreamedBlock) -> None:
        # Every module of the block that has a weight says so.
        if not self._window.begins_backward(block):
            return
        with self._noting_status_on_error():
            if self._passed is not None:
                self._passed()
            super()._before_backward(block)

    def _take(self, block: StreamedBlock, storages: Sequence[BlockStorage]) -> None:
        super()._take(block, storages)
        if block.index not in self._params:
            tensors = dict.fromkeys(tensor for storage in storages for tensor in storage.tensors)
            trained: list[torch.Tensor] = [
                each for each in tensors if each.requires_grad and isinstance(each, nn.Parameter)
            ]
            self._params[block.index] = trained
            for param in trained:
                offset = int(param.storage_offset()) * param.itemsize
                self.home_of[param] = Home(self.homes, block, offset, param, partial(self.visit, block))
            return
        changed = self.homes.changed[block.index]
        written = [s.tensors for s, differs in zip(storages, changed, strict=True) if differs]
        params = [tensor for tensors in written for tensor in tensors if tensor in self.home_of]
        if params:
            self._changed(params)

    def _lend(self, block: StreamedBlock) -> None:
        if block.is_streamed:
            self._finish_update_at_home([block])
        super()._lend(block)

    def _on_host(self, block: StreamedBlock, tensor: torch.Tensor) -> torch.Tensor:
        self._finish_update_at_home([block])
        return super()._on_host(block, tensor)

    def _finish_update_at_home(self, blocks: Iterable[StreamedBlock]) -> None:
        """Wait on the host until the weights of `blocks` are new at home."""
        for block in blocks:
            self._finish_update(self._params[block.index], [])
            block.wait_stored()
