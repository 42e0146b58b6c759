"""Gradients go to the host, each as soon as it is final.

The norm is measured, the D2H copy starts behind the work that is on the live stream, and the gradient's device memory
is freed as soon as the copy has read it. When the update may start is decided elsewhere.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.in_flight import InFlight
from reference_impl.optimizers.checks import check_used_in_time
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.layout import Member, Piece, gradient_of

_IN_FLIGHT_BYTES = 2 * 2**30


class GradientMover:
    """Copies gradients of offloaded members into their buckets' staging buffers, and keeps each member's norm."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._in_flight = InFlight(device, limit_bytes=_IN_FLIGHT_BYTES)
        self._targets: dict[Piece, torch.Tensor] = {}
        self._norms: dict[Member, torch.Tensor] = {}

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Learn where the gradients of new buckets go."""
        for bucket in buckets:
            for piece in bucket.pieces:
                self._targets[piece] = bucket.staging[piece.offset : piece.offset + piece.numel]

    def offload(self, member: Member, *, measure: bool) -> None:
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
        if gradient.dtype != member.param.dtype:
            gradient = gradient.to(member.param.dtype)
        flat = member.flat(gradient)
        computed = self._device.record()
        with self._device.on_d2h_for_threads():
            self._device.wait(computed)
            self._device.wait(member.published)
            for piece in member.pieces:
                self._device.copy(self._targets[piece], flat[piece.start : piece.stop])
            member.arrival = self._device.record()
        self._in_flight.hold(member.arrival, gradient, gradient.nbytes)

    def arrived(self) -> Event:
        """Return the event for threads after which all gradients sent off so far are on the host."""
        with self._device.on_d2h_for_threads():
            return self._device.record(for_threads=True)

    def take_norms(self) -> list[torch.Tensor]:
        """Return the fp32 norms (0-dim, on the device) of the gradients sent off, and forget them."""
        norms = list(self._norms.values())
        self._norms.clear()
        return norms

    def fence(self) -> None:
        """Make the live current stream wait until all gradients in flight have been read."""
        self._in_flight.clear()

    def drain(self) -> None:
        """Free the GPU gradients whose copies have finished."""
        self._in_flight.drain()
