# SPDX-License-Identifier: Apache-2.0
"""How much device memory extra slots may take during backward: a part of the memory that it has freed.

Apart because it counts backward passes, and the share that asks it does not. Explained in
docs/optimizer-state-offloading.md, "Memory borrowed from backward".
"""

from __future__ import annotations

from collections import Counter

from reference_impl.device import Device
from reference_impl.memory.ledger import device_bytes
from reference_impl.optimizers.layout import Member


class FreedMemory:
    """How much of the memory that backward has freed may hold extra slots.

    Backward frees activations from its first layer on. Half of the memory freed since it began may be used, because
    it needs memory for temporaries of its own; so the bytes allocated do not rise above those when it began. With
    several backward passes a step only the last counts, because the forward after any other needs its memory back. As
    many passes are expected as the step before had, none before the first step.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._expected_passes = 0
        self._count = 0
        self._passes: Counter[Member] = Counter()
        self._began_bytes: int | None = None

    def on_gradient(self, member: Member) -> bool:
        """Count a gradient; return whether this is the last backward pass of the step."""
        self._passes[member] += 1
        if self._passes[member] > self._count:
            self._count = self._passes[member]
            self._began_bytes = device_bytes(self._device)
        return self._count == self._expected_passes

    def limit_bytes(self, extra_bytes: int) -> int | None:
        """Return the most bytes of all extra slots, with `extra_bytes` now; None if nobody counts."""
        now = device_bytes(self._device)
        if now is None or self._began_bytes is None:
            return None
        return (self._began_bytes - (now - extra_bytes)) // 2

    def on_step(self) -> None:
        """Begin anew after an optimizer step, unless no gradient has come since the one before."""
        if self._count:
            self._expected_passes, self._count = self._count, 0
            self._passes.clear()
