"""How much of the memory that backward has freed may be borrowed.

Backward frees activations from its first layer on. Half of what it has freed since it began is offered, because it
needs room for temporaries of its own; so the bytes allocated do not rise above those when it began. With several
backward passes a step only the last may be used, since the forward after any other needs its memory back: as many
are expected as the step before had.
"""

from __future__ import annotations

from collections import Counter

from reference_impl.device import Device
from reference_impl.memory.ledger import device_bytes
from reference_impl.optimizers.layout import Member


class FreedRoom:
    """Follows the gradients of one step."""

    def __init__(self, device: Device) -> None:
        """Expect nothing before the first step: nobody knows how many backward passes it has."""
        self._device = device
        self._expected = 0
        self._count = 0
        self._passes: Counter[Member] = Counter()
        self._began_bytes: int | None = None

    def gradient(self, member: Member) -> bool:
        """Note a gradient; return whether this is the last backward of the step."""
        self._passes[member] += 1
        if self._passes[member] > self._count:
            self._count = self._passes[member]
            self._began_bytes = device_bytes(self._device)
        return self._count == self._expected

    def room_bytes(self, borrowed_bytes: int) -> int | None:
        """Return the bytes that may be borrowed in all; None where nobody counts memory."""
        now = device_bytes(self._device)
        if now is None or self._began_bytes is None:
            return None
        return (self._began_bytes - (now - borrowed_bytes)) // 2

    def step(self) -> None:
        """Start anew after `step()`, unless no gradient has come since."""
        if self._count:
            self._expected, self._count = self._count, 0
            self._passes.clear()
