# SPDX-License-Identifier: Apache-2.0
"""The base of all activation offloaders: one engine on one model, attached until it is closed.

A subclass chooses the modules around which the engine is active, and the policy.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self, TypedDict

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offload_arithmetic.sizes import ACTIVATIONS_IN_FLIGHT_BYTES
from reference_impl.activations.attach import Around, Forward, wrap_forward
from reference_impl.activations.engine import SavedTensorEngine
from reference_impl.activations.headroom import Headroom
from reference_impl.activations.run import ForwardPass
from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.memory.closing import (
    ClosedAtExit,
    close_behind,
    do_undoably,
    past_a_lost_device,
    undo_all,
)
from reference_impl.memory.disk import DiskSpace, DiskTier, SpillTier
from reference_impl.memory.shown import Shown, size
from reference_impl.memory.tiers import HostTier, Tier
from reference_impl.memory.transforms import running_transform

MIN_BYTES = 2**20
_BLOCKS_AHEAD = 2


class EngineOptions(TypedDict, total=False):
    """Options of every activation offloader.

    min_bytes: smaller storages stay on the device (1 MiB).
    in_flight_bytes: bytes on the device that may always wait for their copy to the host (512 MiB; 0 with a budget or
        recomputed layers). Less lowers the peak.
    double_buffering: copy the next storages back while backward uses the last ones; False: one at a time.
    host_limit_bytes: the most pinned host memory to take; None: all that the host has free.
    reserve_bytes: pinned host memory to allocate at once (0), so that the first step does not wait for it. After a
        step `arena.reserved_bytes` says how much it has needed.
    disk: takes the bytes beyond `host_limit_bytes`; None: no disk.
    """

    min_bytes: int
    in_flight_bytes: int
    double_buffering: bool
    host_limit_bytes: int | None
    reserve_bytes: int
    disk: DiskSpace | None


class Forecast:
    """Tells the arena during the first forward which sizes the next blocks will save, so that they are pinned in time.

    Blocks of a model are mostly alike: the next ones are expected to save the same sizes as the last one. A forecast
    looks two blocks ahead, so a wrong one costs little memory. Later steps find everything pinned and need none.
    """

    def __init__(self, arena: HostArena, blocks: Iterable[nn.Module], chosen: Iterable[nn.Module]) -> None:
        """Forecast for each of `blocks` that contains a `chosen` module."""
        self._arena = arena
        wanted = set(chosen)
        self._coming = {block for block in blocks if not wanted.isdisjoint(block.modules())}
        self._seen = 0

    def end_block(self, block: nn.Module, run: ForwardPass) -> None:
        """Note that `block`'s forward has ended."""
        if block not in self._coming or not run.has_saved:
            return
        self._coming.discard(block)
        sizes = run.moved_sizes(self._seen)
        self._seen = run.length
        self._arena.expect(sizes * min(_BLOCKS_AHEAD, len(self._coming)))


class Offloader(Shown, ClosedAtExit):
    """Attached to `model` from its construction to `close()`; a context manager."""

    # A failing constructor calls `close()`, and `close()` reads these: they exist before the constructor begins.
    _undo: list[Callable[[], None]]
    _tier: Tier | None = None
    _is_closed = False

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Return an offloader that is attached to nothing."""
        made = super().__new__(cls)
        made._undo = []
        return made

    def __init__(
        self,
        model: nn.Module,
        *,
        min_bytes: int = MIN_BYTES,
        in_flight_bytes: int = ACTIVATIONS_IN_FLIGHT_BYTES,
        double_buffering: bool = True,
        host_limit_bytes: int | None = None,
        reserve_bytes: int = 0,
        disk: DiskSpace | None = None,
    ) -> None:
        """Attach to `model`'s own forward.

        Raises ValueError for options out of range or a model on several devices, DiskError for an unusable disk,
        HostMemoryError without room for `reserve_bytes`.
        """
        if min_bytes < 1:
            raise ValueError(f"min_bytes={min_bytes}; expected at least 1; try {MIN_BYTES}")
        if in_flight_bytes < 0:
            raise ValueError(
                f"in_flight_bytes={in_flight_bytes}; expected at least 0; try {ACTIVATIONS_IN_FLIGHT_BYTES}"
            )
        if host_limit_bytes is not None and host_limit_bytes < 1:
            raise ValueError(
                f"host_limit_bytes={host_limit_bytes}; expected at least 1, or None for all host memory; try None"
            )
        if reserve_bytes < 0:
            raise ValueError(f"reserve_bytes={reserve_bytes}; expected at least 0; try 0")
        try:
            self.min_bytes = min_bytes
            self.device = Device.of(_device_of(model))
            self.arena = HostArena(
                self.device,
                limit_bytes=host_limit_bytes,
                serves="activations",
                remedy="try fewer layers or a higher host_limit_bytes",
            )
            host = HostTier(self.device, self.arena)
            self._tier = tier = host if disk is None else SpillTier(host, DiskTier(self.device, disk))
            self.engine = SavedTensorEngine(
                self.device,
                tier,
                headroom=Headroom(self.device, in_flight_bytes=in_flight_bytes, is_ahead=double_buffering),
                min_bytes=min_bytes,
            )
            if reserve_bytes:
                self.arena.reserve(reserve_bytes)
            self._forecast: Forecast | None = None
            self._has_passed_over = False
            self._has_looked = False
            self._wrap(model, self._around_model)
        except BaseException as error:
            close_behind(error, self.close)
            raise

    def _facts(self) -> Mapping[str, str]:
        return {
            "left the device": size(self.offloaded_bytes),
            "pinned host memory": size(self.arena.reserved_bytes),
            "status": "closed" if self._is_closed else "attached",
        }

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that have left the device since the start."""
        return self.engine.offloaded_bytes

    def close(self) -> None:
        """Leave the model as it was and give the host memory back. Calling it again does nothing.

        Wrappers that others have put around the model's forward meanwhile stay. After an error it may be called
        again, for example if the device lacked memory for weights on the host.
        """
        with past_a_lost_device():
            undo_all(self._undo)
        with past_a_lost_device():
            if self._tier is not None:
                self._tier.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        """Return the offloader, attached already. Raises RuntimeError when it was closed."""
        if self._is_closed:
            raise RuntimeError(
                f"this {type(self).__name__} was closed and has left its model; expected an open one; "
                f"try {type(self).__name__}(model, ...) again"
            )
        return self

    def _wrap(self, module: nn.Module, around: Around) -> None:
        def unless_transformed(
            forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            transform = running_transform()
            if transform is None:
                return around(forward, module, args, kwargs)
            self._pass_over(transform)
            return forward(*args, **kwargs)

        do_undoably(partial(wrap_forward, module, unless_transformed), self._undo)

    def _pass_over(self, transform: str) -> None:
        """Warn once that modules run unchanged inside `transform`. A subclass raises RuntimeError where they cannot."""
        if not self._has_passed_over:
            self._has_passed_over = True
            warnings.warn(
                f"{type(self).__name__} offloads and recomputes nothing inside {transform}, whose tensors have no "
                "storage of their own: modules run there as without it, in as much memory",
                stacklevel=2,
            )

    def _follow(self, blocks: list[nn.Module], chosen: list[nn.Module]) -> None:
        """Tell the engine when each of a model's blocks has run; in some of them modules were `chosen` to offload."""
        self._forecast = Forecast(self.arena, blocks, chosen)
        for block in blocks:
            self._wrap(block, self._around_block)

    def _around_block(
        self, forward: Forward, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = forward(*args, **kwargs)
        run = self.engine.end_block()
        if self._forecast is not None:
            self._forecast.end_block(block, run)
        return result

    def _around_model(
        self, forward: Forward, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self.engine.running(model) as run:
            self._start_run(run)
            with self._outside_layers(model, run):
                result = forward(*args, **kwargs)
            self.engine.start_loss(run)
        if run.has_saved:
            self._forecast = None
        if not self._has_looked:
            self._say_if_all_is_small()
        self._announce_backward(result, run)
        return result

    def _say_if_all_is_small(self) -> None:
        """Warn once if the first training forward has saved no tensor large enough to move."""
        largest_bytes = self._largest_small_bytes()
        moved_bytes = self.engine.offloaded_bytes + self.engine.recomputed_bytes
        self._has_looked = largest_bytes > 0 or moved_bytes > 0
        if largest_bytes and not moved_bytes:
            warnings.warn(
                f"{type(self).__name__} moves nothing: the largest tensor that may leave has {largest_bytes} bytes; "
                f"expected at least min_bytes={self.min_bytes}; try min_bytes={largest_bytes}",
                UserWarning,
                stacklevel=2,
            )

    def _largest_small_bytes(self) -> int:
        """Return the bytes of the largest tensor that was too small to leave; 0 where a larger one has stayed."""
        return 0 if self.engine.kept_bytes else self.engine.largest_small_bytes

    def _outside_layers(self, model: nn.Module, run: ForwardPass) -> AbstractContextManager[object]:
        """Return a context for the tensors that `model` saves outside its layers in `run`; by default they stay."""
        return nullcontext()

    def _start_run(self, run: ForwardPass) -> None:
        """Prepare for a forward of the model; by default there is nothing to prepare."""

    def _announce_backward(self, result: Any, run: ForwardPass) -> None:
        """Start `run`'s copies back at the arrival of an output's gradient, after the loss's own peak."""

        def start(_: torch.Tensor) -> None:
            self.engine.headroom.start_backward(run)
            run.start_backward()

        for output in tree_leaves(dict(result) if isinstance(result, Mapping) else result):
            if isinstance(output, torch.Tensor) and output.requires_grad and output.dim() > 0:
                output.register_hook(start)


def _device_of(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        names = ", ".join(sorted(str(device) for device in devices)) or "none"
        raise ValueError(
            f"the parameters of {type(model).__name__} are on devices: {names}; "
            "expected exactly one; try model.to(device) before"
        )
    return devices.pop()
