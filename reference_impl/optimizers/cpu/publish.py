# SPDX-License-Identifier: Apache-2.0
"""Copies new weights to the device or to their home, and tells their readers when to go on.

All pieces of a member are copied together, on the H2D stream for weights, so that a parameter is either old or new,
never a mixture. A weight that only visits the device goes home at once; its first reader brings it to the device, if
its block has been copied there meanwhile.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from reference_impl.device import Device, Event
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.layout import Member, NewWeights, Piece


class Publisher:
    """Copies new weights of offloaded members to the device, and keeps one flag a member.

    A member's flag is down from `expect` to `release`: until then its copy may not have been started, and there is no
    event that a reader could wait for.

    Args:
        device: where the weights are.
        note: called for each whose new weight is on the device, on the stream of the copy.
    """

    def __init__(self, device: Device, note: Callable[[Member], None] = lambda _: None) -> None:
        self._device, self._note = device, note
        self._sources: dict[Piece, torch.Tensor] = {}
        self._flags: dict[Member, threading.Event] = {}
        # Members whose weights are new at home, and may be old on the device.
        self._came_home: set[Member] = set()

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Learn where the new weights of buckets will be: in the staging buffers."""
        for bucket in buckets:
            for piece in bucket.pieces:
                self._sources[piece] = bucket.staging[piece.offset : piece.offset + piece.numel]

    def forget(self, piece: Piece) -> None:
        """Forget where the new weight of `piece` will be."""
        self._sources.pop(piece, None)

    def expect(self, member: Member) -> None:
        """From now on a reader of `member` has to wait."""
        flag = self._flags.get(member)
        if flag is None:
            self._flags[member] = threading.Event()
        else:
            flag.clear()
        member.pending = True
        if member.home is not None:
            member.home.expect()

    def publish(self, member: Member, new_weights: Iterable[NewWeights], *, after: Event) -> None:
        """Start the copy of all of `member`, the device's `new_weights` included.

        It runs behind `after`, the last use of the old weights; `member.published` is the event of its end. Of a member
        that has a home nothing is new on the device until `wait`.
        """
        if member.home is not None:
            for piece in member.pieces:
                member.home.renew(piece.start, self._sources[piece])
            self._came_home.add(member)
            return
        weight = member.flat(member.weight)
        with self._device.on_h2d_of_weights():
            self._device.wait(after)
            for piece in member.pieces:
                self._device.copy(weight[piece.start : piece.stop], self._sources[piece])
            for part in new_weights:
                self._device.wait(part.event)
                part.target.copy_(part.weights)
            self._note(member)
            member.published = self._device.record()

    def release(self, member: Member) -> None:
        """Let readers of `member` go on: its copy has been started, or the step is skipped."""
        self._flags[member].set()

    def flag(self, member: Member) -> threading.Event:
        """Return the flag that readers of `member` wait for."""
        return self._flags[member]

    def wait(self, member: Member) -> None:
        """Make the live current stream wait for the new weight of `member`, whose flag is up."""
        if member.home is not None and member in self._came_home:
            # The weight on the device was copied before the home was new, or while it became so.
            member.published = member.home.bring()
            self._came_home.discard(member)
        self._device.wait(member.published)
