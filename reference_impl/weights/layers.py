# SPDX-License-Identifier: Apache-2.0
"""Blocks with streamed weights: the common part of frozen and trained layers.

It puts hooks on the blocks, gathers weights for code that reads or changes them, and restores them at the end.
Subclasses decide which storages stream, and add steps to a visit.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from offload_arithmetic.residency import kept
from reference_impl.device import Device
from reference_impl.memory.closing import ClosedAtExit, past_a_lost_device, undo_all
from reference_impl.memory.shown import Report, Shown, size
from reference_impl.memory.transforms import outside_transforms
from reference_impl.weights import hooks
from reference_impl.weights.block import StreamedBlock
from reference_impl.weights.host_memory import Host
from reference_impl.weights.storages import (
    BlockStorage,
    layout,
    move,
    streamable_storages,
    weighted_modules,
)
from reference_impl.weights.turns import Turns
from reference_impl.weights.window import Window


@dataclass(frozen=True)
class StreamReport(Report):
    """Where the blocks' frozen weights are, and the copies to the device since the start.

    `late_loads` counts the visits whose block had not been asked for ahead: 0 once the order is known.
    """

    streamed_bytes: int
    resident_bytes: int
    window_bytes: int
    pinned_bytes: int
    loads: int
    loaded_bytes: int
    late_loads: int


class LayerStreamer(Shown, ClosedAtExit):
    """Takes the weights of `modules`, blocks of `model`, over and brings each block's when it runs.

    Args:
        model: whose other tensors are moved to the device.
        modules: the blocks, in the order of the forward.
        storages: for each block the storages that may stream; of these it keeps `allowances` bytes on the device.
        host: keeps the bytes; closed with this.

    It touches nothing until it is attached, so that its closer knows it by then.
    """

    _with_trained = False

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        storages: Sequence[Sequence[BlockStorage]],
        *,
        device: Device,
        host: Host,
        allowances: Sequence[int],
    ) -> None:
        self._model = model
        self._device = device
        self._host = host
        self._allowances = allowances
        streamed = [beyond(block, allowance) for block, allowance in zip(storages, allowances, strict=True)]
        self._resident_bytes = sum(s.size_bytes for block in storages for s in block) - sum(
            s.size_bytes for block in streamed for s in block
        )
        self._slot_bytes = max(layout(block)[1] for block in streamed)
        self._blocks = [StreamedBlock(device, host, module, index) for index, module in enumerate(modules)]
        self._turns = Turns(device)
        self._gathered: set[int] = set()
        self._is_closed = False
        self._undo: dict[int, list[Callable[[], None]]] = {}
        self._loads: dict[int, hooks.Load] = {}

    def attach(
        self, streamed: Sequence[Sequence[BlockStorage]], *, prefetch: int, lingering: int = 0
    ) -> None:
        """Take the storages of each block over that are `streamed`. After an error `close` leaves the model as it was.

        Args:
            streamed: for each block the storages beyond its allowance, see `beyond`.
            prefetch: how many blocks may wait on the device, or be on their way, beside the one in use.
            lingering: how many more stay there that have been used.

        Raises HostMemoryError.
        """
        ahead = min(prefetch + 1, len(self._blocks))
        for block, storages in zip(self._blocks, streamed, strict=True):
            if storages:
                self._take(block, storages)
        move(self._model, self._device.torch_device)
        self._window = Window(self._blocks, ahead + lingering, lingering=lingering)
        for block in self._blocks:
            if block.is_streamed:
                self._follow(block)

    def _facts(self) -> Mapping[str, str]:
        report = self.report
        return {
            "layers": f"{len(self._blocks)}",
            "weights on the host": size(report.streamed_bytes),
            "weights that stay": size(report.resident_bytes),
            "window on the device": size(report.window_bytes),
            "status": "closed" if self._is_closed else "attached",
        }

    @property
    def report(self) -> StreamReport:
        """Where the weights are, and how many bytes have moved."""
        return StreamReport(
            streamed_bytes=sum(block.size_bytes for block in self._blocks),
            resident_bytes=self._resident_bytes,
            window_bytes=self._slot_bytes * self._window.capacity + self._host.buffer_bytes,
            pinned_bytes=self._host.pinned_bytes,
            loads=self._window.loads,
            loaded_bytes=self._window.loaded_bytes,
            late_loads=self._window.late_loads,
        )

    @contextmanager
    def gathered(self, layer: nn.Module | None = None) -> Iterator[None]:
        """Have the weights of `layer`, or of all blocks, as ordinary device tensors, to read or change them.

        Afterwards they are taken over again as they are then, except weights moved off the device.
        """
        # Somebody may have kept a method that gathers first.
        blocks = [
            block
            for block in ([] if self._is_closed else self._blocks)
            if (layer is None or block.module is layer) and block.index not in self._gathered
        ]
        self._gathered.update(block.index for block in blocks)
        try:
            for block in blocks:
                self._lend(block)
            yield
        finally:
            try:
                # Closed inside, weights are the model's own for good.
                if not self._is_closed:
                    self._take_again(blocks)
            finally:
                # Blocks that an error leaves with the model can be gathered again, and then go back.
                self._gathered.difference_update(block.index for block in blocks)
            if not self._is_closed:
                self._window.advance()

    def is_gathered(self, layer: nn.Module) -> bool:
        """Return whether the weights of `layer` are ordinary tensors for now."""
        return any(block.module is layer and block.index in self._gathered for block in self._blocks)

    def close(self) -> None:
        """Give every weight its own memory where it came from, and the host memory back. Idempotent.

        Live graphs keep their saved weights, and run backward as before. After an error, such as a device that lacks
        the memory for a block, it may be called again.
        """
        self._is_closed = True
        with past_a_lost_device():
            undo_all(
                [
                    *(functools.partial(block.restore, to_origin=True) for block in self._blocks),
                    *(functools.partial(undo_all, undo) for undo in self._undo.values()),
                ]
            )
        with past_a_lost_device():
            self._host.close()

    def __enter__(self) -> Self:
        """Return the streamer, attached already."""
        return self

    def _forget_loads(self, block: StreamedBlock) -> None:
        self._loads.pop(block.index, None)

    def _enter_forward(self, block: StreamedBlock) -> None:
        try:
            self._turns.begin_forward()
            self._loads[block.index].end_failed()
            self._before_forward(block)
        except BaseException:
            self._turns.end_forward()
            raise

    def _leave_forward(self, block: StreamedBlock) -> None:
        try:
            self._after_forward(block)
        finally:
            self._turns.end_forward()

    def _enter_backward(self, block: StreamedBlock) -> None:
        self._turns.begin_backward()
        self._before_backward(block)

    def _before_forward(self, block: StreamedBlock) -> None:
        """Have the weights of `block` there for the kernels that follow."""
        self._window.before_forward(block)

    def _after_forward(self, block: StreamedBlock) -> None:
        """Let `block` go, unless it is needed again soon."""
        self._window.after_forward(block)

    def _before_backward(self, block: StreamedBlock) -> None:
        """Have the weights of `block` there for its backward."""
        self._window.before_backward(block)

    def _take(self, block: StreamedBlock, storages: Sequence[BlockStorage]) -> None:
        """Take the weights of `block` over."""
        block.take(storages, self._slot_bytes)

    def _lend(self, block: StreamedBlock) -> None:
        """Make the weights of `block` ordinary device tensors."""
        self._window.forget(block)
        block.restore(to_origin=False)

    def _on_host(self, block: StreamedBlock, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of `tensor`, which `block` owns."""
        return block.on_host(tensor)

    def _follow(self, block: StreamedBlock) -> None:
        undo = self._undo[block.index] = []
        hooks.follow(
            block.module,
            weighted_modules(block.module, with_trained=self._with_trained),
            # Of memory that moves inside a transform, torch would say that somebody has captured it.
            before_forward=outside_transforms(functools.partial(self._enter_forward, block)),
            after_forward=outside_transforms(functools.partial(self._leave_forward, block)),
            before_backward=outside_transforms(functools.partial(self._enter_backward, block)),
            undo=undo,
        )
        self._loads[block.index] = hooks.gather_around(
            block.module, functools.partial(self.gathered, block.module), undo
        )
        # It has this streamer, which would then wait for the garbage collector, and its model with it.
        undo.append(functools.partial(self._forget_loads, block))
        hooks.replace_in_state_dict(block.module, block.owns, functools.partial(self._on_host, block), undo)
        hooks.replace_copies(
            block.module,
            functools.partial(self._copy, block),
            # The pickler holds the copy itself: hooks in its state know it by a weak reference.
            lambda _: (operator.getitem, ((self._copy(block, {}),), 0)),
            undo,
        )

    def _copy(self, block: StreamedBlock, memo: dict[int, Any]) -> nn.Module:
        """Return a deep copy of `block`'s module, whose weights are its own and do not stream."""
        with self.gathered(block.module):
            undo_all(self._undo[block.index])
            try:
                return copy.deepcopy(block.module, memo)
            finally:
                self._follow(block)

    def _take_again(self, blocks: Sequence[StreamedBlock]) -> None:
        """Stream `blocks` with the weights that their modules have now, as far as these are on the device."""
        modules = [block.module for block in self._blocks]
        storages = streamable_storages(self._model, modules, with_trained=self._with_trained)
        for block in blocks:
            if block.is_streamed:
                continue
            here = [s for s in storages[block.index] if s.device == self._device.torch_device]
            if streamed := beyond(here, self._allowances[block.index]):
                self._take(block, streamed)


def beyond(storages: Sequence[BlockStorage], allowance_bytes: int) -> list[BlockStorage]:
    """Return the storages of a block that do not stay on the device."""
    keep = kept([storage.size_bytes for storage in storages], allowance_bytes)
    return [storage for storage, is_kept in zip(storages, keep, strict=True) if not is_kept]


def device_of(model: nn.Module, device: torch.device | str | None) -> Device:
    """Return where `model` runs. Raises ValueError where its tensors are on several devices."""
    if device is not None:
        return Device.of(device)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    devices = {found for found in devices if found.type not in ("cpu", "meta")}
    if len(devices) > 1:
        raise ValueError(
            f"{type(model).__name__} is on devices {', '.join(sorted(map(str, devices)))}; expected one; "
            "try one streamer for each part"
        )
    return Device.of(devices.pop() if devices else "cpu")
