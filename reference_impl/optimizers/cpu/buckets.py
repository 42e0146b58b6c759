"""The host memory behind the offloaded share: one bucket holds a slice of master, moments and wire.

The wire buffer has the parameter's dtype and carries both directions: a gradient comes in, the new weight goes
out of the same bytes, which saves memory and the read-for-ownership of a second buffer. Host bytes an
offloaded bf16 element: 2 wire + 4 master + 8 Adam moments = 14; fp32: 4 + 4 + 8 = 16. Only the wire is pinned,
because copies touch nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from reference_impl.device import Device
from reference_impl.memory.arena import ALIGNMENT_BYTES, HostArena
from reference_impl.memory.host import HostMemoryError, available_bytes
from reference_impl.optimizers.layout import BucketPlan, Piece


@dataclass(eq=False, slots=True)
class Bucket:
    """Flat host tensors of `numel` elements: `wire` (parameter dtype), `master` and `moments` (fp32)."""

    pieces: tuple[Piece, ...]
    wire: torch.Tensor
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        """No gradient has arrived yet."""
        self.missing = len(self.pieces)

    @property
    def deadline(self) -> int:
        """The place in the forward of the first member that waits for this bucket."""
        return min(piece.member.order for piece in self.pieces)


class HostState:
    """All buckets of one optimizer and the arenas that hold them."""

    def __init__(self, device: Device, *, moments: int, pinned: bool) -> None:
        """Hold nothing; `moments` fp32 states accompany each element."""
        self._moments = moments
        self._wire = HostArena(device, pinned=pinned)
        self._state = HostArena(device, pinned=False)

    def add(self, plans: Sequence[BucketPlan], *, total_numel: int) -> list[Bucket]:
        """Make the buckets of `plans`.

        Raises HostMemoryError before anything is taken, naming the share of `total_numel` that would fit.
        """
        wire_bytes = sum(_aligned(plan.numel * plan.dtype.itemsize) for plan in plans)
        state_bytes = sum(_aligned(plan.numel * 4) * (1 + self._moments) for plan in plans)
        needed, available = wire_bytes + state_bytes, available_bytes()
        if needed > 0.95 * available:
            numel = sum(plan.numel for plan in plans)
            fits = 0.9 * available / needed * numel / total_numel
            raise HostMemoryError(
                needed_bytes=needed,
                available_bytes=available,
                remedy=f"try offload_fraction={fits:.2f} or less",
            )
        if plans:
            self._wire.reserve(wire_bytes)
            self._state.reserve(state_bytes)
        return [self._bucket(plan) for plan in plans]

    def close(self) -> None:
        """Give all host memory back."""
        self._wire.close()
        self._state.close()

    def _bucket(self, plan: BucketPlan) -> Bucket:
        def fp32() -> torch.Tensor:
            return self._state.allocate(plan.numel * 4).view(torch.float32, (plan.numel,))

        wire = self._wire.allocate(plan.numel * plan.dtype.itemsize).view(plan.dtype, (plan.numel,))
        return Bucket(plan.pieces, wire, fp32(), tuple(fp32() for _ in range(self._moments)))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
