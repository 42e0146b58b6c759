# SPDX-License-Identifier: Apache-2.0
"""A block whose bytes visit the device: the weights of a block of layers, or the shards of one gather.

A `window.Window` decides when it comes and goes. An optimizer writes it while it is there, through a `trained.Home`,
and sends new weights home. Explained in docs/layer-streaming.md and docs/larger-than-gpu.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from reference_impl.device import REACHED, Device, Event
from reference_impl.weights.host_copies import Started


class VisitingBlock(ABC):
    """One such block, number `index` of all and of `size_bytes`.

    `is_being_written`: an update has begun to write it, and has not sent all of it home. It must not be evicted.
    """

    def __init__(self, device: Device, index: int) -> None:
        self.index = index
        self.size_bytes = 0
        self.is_being_written = False
        self._device = device
        # Its bytes on the device, while it is there or on its way.
        self._memory: torch.Tensor | None = None
        self._started: Started = lambda: REACHED
        self._stored: Event = REACHED
        self._brought: Event = REACHED
        # Where weights begin that the CPU has updated at home: the device has the old ones until they are brought.
        self.newer_at_home: set[int] = set()

    @property
    def copied_bytes(self) -> int:
        """Bytes that a visit copies to the device: all, unless they are compressed."""
        return self.size_bytes

    @property
    @abstractmethod
    def is_streamed(self) -> bool:
        """Whether it comes and goes now; if not, its tensors are ordinary ones of the device."""

    @abstractmethod
    def load(self) -> None:
        """Start the copy to the device, behind the last copy home. Raises RuntimeError while a graph is captured."""

    @abstractmethod
    def evict(self) -> None:
        """Free its device memory for others, behind all that uses it."""

    @abstractmethod
    def wait(self) -> None:
        """Make the live current stream wait until it is there, and let it be used."""

    @abstractmethod
    def rest(self) -> None:
        """Let nobody use it until the next `wait`, whether it is there or not."""

    @property
    def is_loaded(self) -> bool:
        """Whether it is on the device or on its way."""
        return self._memory is not None

    @property
    def arrival(self) -> Event | None:
        """The event after which it is on the device; None while it is away."""
        return self._started() if self.is_loaded else None

    def at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return the bytes (flat uint8) from `offset` on the device, while it visits."""
        assert self._memory is not None
        return self._memory[offset : offset + size_bytes]

    def hold(self) -> Event:
        """Keep the loaded block on the device until `stored`; return the event of its arrival."""
        self.is_being_written = True
        return self._started()

    @abstractmethod
    def withhold(self, offset: int) -> None:
        """Let nobody use the weight at `offset` until it is `brought`: the CPU updates it at home."""

    def stored(self, event: Event) -> None:
        """Note that all written bytes are home at `event`."""
        self._stored, self.is_being_written = event, False

    def brought(self, offset: int, event: Event) -> None:
        """Take note that the weight at `offset` is copied to the device once more until `event`."""
        self._brought = event

    def wait_stored(self) -> None:
        """Block until all written bytes are home."""
        self._stored.synchronize()
