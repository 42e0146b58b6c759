"""`FrozenLayerStreamer`: frozen weights are held on the host and visit the device block by block.

For LoRA and other training of a few parameters on a frozen base: a step is bitwise the same in less device
memory. Trainable parameters stay on the device, and nothing is ever copied back. It does not shard, and it
does not quantise: packed weights stream as they are.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.memory.closing import ClosedAtExit, past_a_lost_device, undo_all
from reference_impl.weights import hooks
from reference_impl.weights.block import StreamedBlock
from reference_impl.weights.frozen import (
    FrozenStorage,
    frozen_storages,
    layout,
    move,
    plain_tensors,
    repeated_blocks,
    weighted_modules,
)
from reference_impl.weights.host_memory import HostMemory
from reference_impl.weights.residency import allowances, fraction_within, kept
from reference_impl.weights.window import Window


@dataclass(frozen=True)
class StreamReport:
    """Where the blocks' frozen weights are, and what has been copied to the device since the start.

    `late_loads` counts the visits whose block had not been asked for ahead: 0 once the order is known.
    """

    streamed_bytes: int
    resident_bytes: int
    window_bytes: int
    pinned_bytes: int
    loads: int
    loaded_bytes: int
    late_loads: int


class FrozenLayerStreamer(ClosedAtExit):
    """Attached to `model` from its construction to `close()`; a context manager.

    >>> with FrozenLayerStreamer(model, prefetch=2):
    ...     train(model)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        resident_layers: int | None = None,
        budget_bytes: int | None = None,
        prefetch: int = 2,
        host_limit_bytes: int | None = None,
        layers: Iterable[nn.Module] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Take over the frozen weights of `model`'s blocks.

        Args:
            model: any module made of repeated blocks (an `nn.ModuleList`, or an `nn.Sequential` of one class).
            resident_layers: keep so many layers' worth of frozen weights on the device, spread evenly: every block
                keeps the same share. 0 unless stated.
            budget_bytes: instead of it, the most device bytes for the blocks' frozen weights, window included.
            prefetch: how many blocks may wait on the device, or be on their way, beside the one in use.
            host_limit_bytes: the most pinned host memory to take; None: what the host has. Weights beyond it stay in
                ordinary memory, which for a model loaded from safetensors on the CPU is its mapped files, and pass
                through two pinned buffers: the tier for weights that exceed host memory.
            layers: the blocks, where they cannot be found by structure.
            device: where `model` runs, when its weights are still on the CPU; everything that does not stream is
                moved there.

        Raises:
            ValueError: no blocks, nothing frozen, sharded parameters, or an option out of range.
            HostMemoryError: the host cannot hold the weights. The model is left as it was.
        """
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}; expected at least 0; try 2")
        self._model = model
        modules = list(dict.fromkeys(repeated_blocks(model).values() if layers is None else layers))
        self._device = _device_of(model, device)
        storages = _with_something_frozen(model, frozen_storages(model, modules))
        sizes = [[storage.size_bytes for storage in block] for block in storages]
        window_blocks = min(prefetch + 1, len(modules))
        fraction = _fraction(sizes, resident_layers, budget_bytes, window_blocks)
        self._allowances = allowances(sizes, fraction)
        streamed = [
            _streamed(block, allowance) for block, allowance in zip(storages, self._allowances, strict=True)
        ]
        self._resident_bytes = sum(map(sum, sizes)) - sum(s.size_bytes for block in streamed for s in block)
        self._slot_bytes = max(layout(block)[1] for block in streamed)
        self._host = HostMemory(self._device, streamed, host_limit_bytes)
        self._blocks = [
            StreamedBlock(self._device, self._host, module, index) for index, module in enumerate(modules)
        ]
        self._gathered: set[int] = set()
        self._is_closed = False
        self._undo: dict[int, ExitStack] = {}
        try:
            self._attach(streamed, window_blocks)
        except BaseException:
            self.close()
            raise

    @property
    def report(self) -> StreamReport:
        """What is where, and what has moved."""
        return StreamReport(
            streamed_bytes=sum(block.size_bytes for block in self._blocks),
            resident_bytes=self._resident_bytes,
            window_bytes=self._slot_bytes * self._window.capacity,
            pinned_bytes=self._host.pinned_bytes,
            loads=self._window.loads,
            loaded_bytes=self._window.loaded_bytes,
            late_loads=self._window.late_loads,
        )

    @contextmanager
    def gathered(self, layer: nn.Module | None = None) -> Iterator[None]:
        """Have the weights of `layer`, or of all blocks, as ordinary device tensors, to read or change them.

        Afterwards they are taken over again as they are then, except those that were moved off the device.
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
                self._window.forget(block)
                block.restore(to_origin=False)
            yield
        finally:
            self._take_again(blocks)
            self._gathered.difference_update(block.index for block in blocks)
            self._window.advance()

    def close(self) -> None:
        """Give every weight its own memory where it came from, and the host memory back. Idempotent.

        Graphs that are still alive keep the weights that they saved, and run backward as before. After an error, such
        as a device that lacks the memory for a block, it may be called again.
        """
        self._is_closed = True
        with past_a_lost_device():
            undo_all(
                [
                    *(functools.partial(block.restore, to_origin=True) for block in self._blocks),
                    *(undo.close for undo in self._undo.values()),
                ]
            )
        with past_a_lost_device():
            self._host.close()

    def __enter__(self) -> Self:
        """Return the streamer, which is attached already."""
        return self

    def _attach(self, streamed: Sequence[Sequence[FrozenStorage]], capacity: int) -> None:
        for block, storages in zip(self._blocks, streamed, strict=True):
            if storages:
                block.take(storages, self._slot_bytes)
        self._move_the_rest()
        self._window = Window(self._blocks, capacity)
        for block in self._blocks:
            if block.is_streamed:
                self._follow(block)

    def _follow(self, block: StreamedBlock) -> None:
        undo = self._undo[block.index] = ExitStack()
        visits = hooks.follow(
            block.module,
            weighted_modules(block.module),
            before_forward=functools.partial(self._window.before_forward, block),
            after_forward=functools.partial(self._window.after_forward, block),
            before_backward=functools.partial(self._window.before_backward, block),
        )
        undo.callback(visits)
        undo.callback(hooks.gather_around(block.module, functools.partial(self.gathered, block.module)))
        undo.callback(hooks.replace_in_state_dict(block.module, block.owns, block.on_host))
        undo.callback(
            hooks.replace_copies(
                block.module,
                functools.partial(self._copy, block),
                lambda protocol: self._copy(block, {}).__reduce_ex__(protocol),
            )
        )

    def _copy(self, block: StreamedBlock, memo: dict[int, Any]) -> nn.Module:
        """Return a deep copy of `block`'s module, whose weights are its own and do not stream."""
        with self.gathered(block.module):
            self._undo[block.index].close()
            try:
                return copy.deepcopy(block.module, memo)
            finally:
                self._follow(block)

    def _move_the_rest(self) -> None:
        target = self._device.torch_device
        move((tensor for _, _, tensor, _ in plain_tensors(self._model) if tensor.device != target), target)

    def _take_again(self, blocks: Sequence[StreamedBlock]) -> None:
        """Stream `blocks` from what their modules hold now, as far as that is on the device."""
        storages = frozen_storages(self._model, [block.module for block in self._blocks])
        for block in blocks:
            if block.is_streamed:
                continue
            here = [s for s in storages[block.index] if s.device == self._device.torch_device]
            if streamed := _streamed(here, self._allowances[block.index]):
                block.take(streamed, self._slot_bytes)


def _streamed(storages: Sequence[FrozenStorage], allowance_bytes: int) -> list[FrozenStorage]:
    """Return those of a block's storages that do not stay on the device."""
    keep = kept([storage.size_bytes for storage in storages], allowance_bytes)
    return [storage for storage, is_kept in zip(storages, keep, strict=True) if not is_kept]


def _fraction(
    sizes: Sequence[Sequence[int]], resident_layers: int | None, budget_bytes: int | None, window_blocks: int
) -> float:
    """Return the share of the frozen bytes that stays. Raises ValueError for options out of range."""
    if budget_bytes is not None:
        if resident_layers is not None:
            raise ValueError(
                f"resident_layers={resident_layers} and budget_bytes={budget_bytes} say the same thing twice; "
                "expected one of them; try budget_bytes alone"
            )
        return fraction_within(sizes, budget_bytes, window_blocks)
    resident_layers = resident_layers or 0
    if not 0 <= resident_layers <= len(sizes):
        raise ValueError(
            f"resident_layers={resident_layers}; expected 0 to {len(sizes)}, the blocks of the model; "
            f"try {min(max(resident_layers, 0), len(sizes))}"
        )
    return resident_layers / len(sizes)


def _with_something_frozen(
    model: nn.Module, storages: list[list[FrozenStorage]]
) -> list[list[FrozenStorage]]:
    if not any(storages):
        raise ValueError(
            f"no block of {type(model).__name__} has frozen weights of its own; expected parameters with "
            "requires_grad=False, as an adapter leaves them; try freezing the base model first"
        )
    return storages


def _device_of(model: nn.Module, device: torch.device | str | None) -> Device:
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
