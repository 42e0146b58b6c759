"""Gradients leave the device during backward.

A hook on each offloaded parameter runs when its gradient is final. It measures the norm, starts the D2H copy
behind the work that is on the live stream, and lets the GPU gradient go as soon as the copy has read it. The
hook knows nothing of the update; `hybrid` decides when that may start.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from reference_impl.device import Device, Event
from reference_impl.memory.in_flight import InFlight
from reference_impl.optimizers.checks import check_used_in_time
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.layout import Member, Piece

_IN_FLIGHT_BYTES = 2 * 2**30


class GradientMover:
    """Copies gradients of offloaded members into their buckets' wire, and keeps each member's norm."""

    def __init__(self, device: Device) -> None:
        """Nothing is in flight."""
        self._device = device
        self._in_flight = InFlight(device, limit_bytes=_IN_FLIGHT_BYTES)
        self._wires: dict[Piece, torch.Tensor] = {}
        self._norms: dict[Member, torch.Tensor] = {}

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Learn where the pieces of new buckets go."""
        for bucket in buckets:
            for piece in bucket.pieces:
                self._wires[piece] = bucket.wire[piece.offset : piece.offset + piece.numel]

    def leave(self, member: Member, *, measure: bool) -> None:
        """Start the copy of `member`'s gradient and take it off the parameter.

        Raises RuntimeError when the gradient of the last backward has not been used yet, or when the forward
        used a weight that was still on its way.
        """
        check_used_in_time([member])
        if member.arrival is not None:
            raise RuntimeError(
                f"a second gradient of a parameter of shape {tuple(member.param.shape)} came before step(); "
                "expected one backward a step; try `with optimizer.accumulate():` around all but the last"
            )
        gradient = gradient_of(member)
        if measure:
            self._norms[member] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._copy(member, gradient)
        if member.on_device == 0:
            member.param.grad = None

    def _copy(self, member: Member, gradient: torch.Tensor) -> None:
        wire_dtype = member.param.dtype
        if gradient.dtype != wire_dtype:
            gradient = gradient.to(wire_dtype)
        flat = member.flat(gradient)
        computed = self._device.record()
        with self._device.on_d2h_for_threads():
            self._device.wait(computed)
            self._device.wait(member.published)
            for piece in member.pieces:
                self._device.copy(self._wires[piece], flat[piece.start : piece.stop])
            member.arrival = self._device.record()
        self._in_flight.hold(member.arrival, gradient, gradient.nbytes)

    def arrived(self) -> Event:
        """Return the event for threads after which all gradients that left so far are on the host."""
        with self._device.on_d2h_for_threads():
            return self._device.record(for_threads=True)

    def take_norms(self) -> list[torch.Tensor]:
        """Return the fp32 norms (0-dim, on the device) of the gradients that left, and forget them."""
        norms = list(self._norms.values())
        self._norms.clear()
        return norms

    def fence(self) -> None:
        """Make the live current stream wait until all gradients have been read."""
        self._in_flight.clear()

    def drain(self) -> None:
        """Free the GPU gradients whose copies have finished."""
        self._in_flight.drain()


def gradient_of(member: Member) -> torch.Tensor:
    """Return a member's gradient on this rank, laid out in memory like the parameter.

    Raises RuntimeError for a sparse gradient, and when the parameter has changed its layout.
    """
    gradient = member.gradient
    assert gradient is not None
    if gradient.is_sparse:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(member.param.shape)} is sparse; expected a dense one; "
            "try sparse=False in the embedding"
        )
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    local = member.param_local
    if local.stride() != member.stride:
        raise RuntimeError(
            f"a parameter of shape {tuple(local.shape)} has strides {local.stride()}; expected {member.stride}, as "
            "its optimizer state; try changing the memory format before the optimizer is made"
        )
    if gradient.stride() != local.stride():
        gradient = torch.empty_like(local, dtype=gradient.dtype).copy_(gradient)
    return gradient


def forgetful_hook(
    method: weakref.WeakMethod[Callable[[torch.Tensor], None]],
) -> Callable[[torch.Tensor], None]:
    """Return a gradient hook that does not keep the owner of `method` alive."""

    def hook(param: torch.Tensor) -> None:
        bound = method()
        if bound is not None:
            bound(param)

    return hook
