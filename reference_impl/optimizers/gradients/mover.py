# SPDX-License-Identifier: Apache-2.0
"""Copies gradients to the host, each as soon as it is final.

The norm is computed, the D2H copy starts behind the work on the current stream, and the gradient's device memory is
freed as soon as the copy has read it. The share whose memory it fills decides when the update may start.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from offload_arithmetic.sizes import GRADIENTS_IN_FLIGHT_BYTES
from reference_impl.device import REACHED, Device, Event, together
from reference_impl.memory.in_flight import InFlight
from reference_impl.optimizers.checks import check_used_in_time
from reference_impl.optimizers.gradients.clip_decision import norms_of
from reference_impl.optimizers.layout import Member, Piece, gradient_of


class GradientMover:
    """Copies gradients of members to where each of their pieces is left on the host.

    At most `in_flight_bytes` of them, or one that is longer, are on their way before compute waits; with 0 it waits for
    each. `norms` of the gradients sent off for the next step are fp32, 0-dim, on the device.
    """

    def __init__(self, device: Device, *, in_flight_bytes: int = GRADIENTS_IN_FLIGHT_BYTES) -> None:
        self._device = device
        self._in_flight_bytes = in_flight_bytes
        self._in_flight = InFlight(device, limit_bytes=in_flight_bytes)
        self._targets: dict[Piece, torch.Tensor] = {}
        # The last copy that ends in pageable memory.
        self._landed: Event = REACHED
        self.norms: dict[Member, torch.Tensor] = {}

    def add(self, targets: Mapping[Piece, torch.Tensor]) -> None:
        """Learn where the gradients of new pieces go: flat, on the host."""
        self._targets.update(targets)

    def forget(self, piece: Piece) -> None:
        """Forget where the gradient of `piece` goes."""
        self._targets.pop(piece, None)

    def offload(self, member: Member, *, measure: bool, reduced: torch.Tensor | None = None) -> torch.Tensor:
        """Start the copy of `member`'s gradient; return that gradient, laid out like the parameter.

        It is the gradient on the parameter (the copy frees its memory), or `reduced` (its memory stays taken).
        Changes nothing when it raises: RuntimeError if the forward used a weight in flight, and torch's error for a
        lack of memory.
        """
        check_used_in_time([member])
        gradient = gradient_of(member) if reduced is None else reduced
        self._send({member: gradient}, measure=measure, frees=reduced is None)
        return gradient

    def offload_together(self, members: Sequence[Member]) -> list[torch.Tensor]:
        """Do as `offload`, for several that measure, with one event for all: half of the host's time for each."""
        check_used_in_time(members)
        gradients = [gradient_of(member) for member in members]
        self._send(dict(zip(members, gradients, strict=True)), measure=True, frees=True)
        return gradients

    def bring_back(self, member: Member, target: torch.Tensor) -> None:
        """Start the copy of a gradient that was sent off into `target`, its memory on the device in one dimension.

        Elements of the member that no piece holds stay as they are in `target`.
        """
        assert member.arrival is not None
        self._device.wait(member.arrival)
        for piece in member.pieces:
            self._device.copy(target[piece.start : piece.stop], self._targets[piece])

    def discard(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that were sent off but will not be used."""
        for member in members:
            if member.arrival is not None:
                self._device.wait(member.arrival)
                self.let_go([member])

    def let_go(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that a step owns from now on."""
        for member in members:
            member.arrival = member.placeholder = None
            self.norms.pop(member, None)

    def _send(self, gradients: Mapping[Member, torch.Tensor], *, measure: bool, frees: bool) -> None:
        # As the update will read them.
        sent = {member: gradient.to(member.param.dtype) for member, gradient in gradients.items()}
        norms = dict(zip(sent, norms_of(sent.values()), strict=True)) if measure else {}
        arrival = self._copy(sent, frees=frees)
        for member in sent:
            member.arrival = arrival
        self.norms.update(norms)

    def _copy(self, gradients: Mapping[Member, torch.Tensor], *, frees: bool) -> Event:
        computed = self._device.record()
        landings: list[Event] = []
        with self._device.on_d2h_for_threads():
            self._device.wait(computed)
            for member, gradient in gradients.items():
                flat = member.flat(gradient)
                self._device.wait(member.published)
                for piece in member.pieces:
                    landed = self._device.copy(self._targets[piece], flat[piece.start : piece.stop])
                    if landed is not REACHED:
                        # It comes behind the earlier ones.
                        self._landed = landed
                        landings.append(landed)
            arrival = together(self._device.record(), *landings)
        size_bytes = sum(gradient.nbytes for gradient in gradients.values())
        # A gradient longer than the limit may be on its way alone. Waiting for a copy that frees nothing is of no use.
        counted_bytes = min(size_bytes, self._in_flight_bytes or size_bytes)
        self._in_flight.hold(arrival, list(gradients.values()), counted_bytes if frees else 0)
        return arrival

    def arrived(self) -> Event:
        """Return the event for threads after which all gradients sent off so far are on the host."""
        with self._device.on_d2h_for_threads():
            return together(self._device.record(for_threads=True), self._landed)

    def fence(self) -> None:
        """Make the live current stream wait until all gradients in flight have been read."""
        self._in_flight.clear()

    def drain(self) -> None:
        """Free the GPU gradients whose copies have finished."""
        self._in_flight.drain()
