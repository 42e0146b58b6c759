# SPDX-License-Identifier: Apache-2.0
"""Buckets: their pieces, and the host memory of their states and staging buffer.

The staging buffer has the parameter's dtype and carries both directions: a gradient comes in, the new weight goes out
of the same bytes. That saves memory and the read-for-ownership of a second buffer. Host bytes an offloaded bf16
element: 2 staging + 4 master + 8 Adam moments = 14; fp32: 4 + 4 + 8 = 16. Only staging is pinned, because copies touch
nothing else.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_arithmetic.division import aligned
from offload_arithmetic.states import ALIGNMENT_ELEMENTS
from reference_impl.device import Device
from reference_impl.memory.arena import ALIGNMENT_BYTES, HostArena, HostBlock
from reference_impl.memory.closing import undo_all
from reference_impl.optimizers.layout import Member, Piece


@dataclass(eq=False, slots=True)
class Bucket:
    """Flat host tensors of all pieces, with gaps: `staging` (parameter dtype), `master` and `moments` (fp32)."""

    pieces: tuple[Piece, ...]
    staging: torch.Tensor
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]

    @property
    def deadline(self) -> int:
        """The place in the forward of the first member that waits for this bucket."""
        return min(piece.member.order for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The pieces of one bucket, all of one dtype, and its elements with the gaps that alignment leaves."""

    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    numel: int


def plan_buckets(
    members: Sequence[Member], *, bucket_elements: int, whole_members: bool = False
) -> list[BucketPlan]:
    """Fill buckets in the order in which gradients arrive: last used first, one dtype a bucket.

    With `whole_members` none is split; one that is larger than `bucket_elements` has a bucket of its own.
    """
    open_pieces: dict[torch.dtype, list[Piece]] = {}
    free: dict[torch.dtype, int] = {}
    plans: list[BucketPlan] = []
    for member in sorted(members, key=lambda member: -member.order):
        dtype = member.param.dtype
        start, stop = member.on_device, member.on_device + member.on_cpu
        if whole_members and member.on_cpu > free.get(dtype, 0):
            if dtype in open_pieces:
                plans.append(_close(dtype, open_pieces.pop(dtype)))
            free[dtype] = max(bucket_elements, member.on_cpu)
        while start < stop:
            count = min(stop - start, free.setdefault(dtype, bucket_elements))
            open_pieces.setdefault(dtype, []).append(Piece(member, start, start + count, 0))
            start += count
            free[dtype] -= aligned(count)
            if free[dtype] < ALIGNMENT_ELEMENTS:
                plans.append(_close(dtype, open_pieces.pop(dtype)))
                del free[dtype]
    plans.extend(_close(dtype, pieces) for dtype, pieces in open_pieces.items())
    return plans


def _close(dtype: torch.dtype, pieces: list[Piece]) -> BucketPlan:
    """Place pieces of one group side by side, so that one kernel call updates many."""
    offset = 0
    for piece in sorted(pieces, key=lambda piece: piece.member.group):
        piece.offset = offset
        piece.member.pieces.append(piece)
        offset += aligned(piece.numel)
    return BucketPlan(dtype, tuple(sorted(pieces, key=lambda piece: piece.offset)), offset)


class BucketMemory:
    """The arenas that hold all buckets of one optimizer, with `moments` fp32 states an element.

    `pinned` is about staging: states are never pinned.
    """

    def __init__(self, device: Device, *, moments: int, pinned: bool) -> None:
        self._moments = moments
        self._staging = HostArena(device, pinned=pinned)
        self._state = HostArena(device, pinned=False)
        self._blocks: dict[Bucket, list[tuple[HostArena, HostBlock]]] = {}

    def add(self, plans: Sequence[BucketPlan]) -> list[Bucket]:
        """Make the buckets of `plans`. Raises HostMemoryError; then nothing has been handed out."""
        state_bytes = sum(_aligned_bytes(plan.numel * 4) * (1 + self._moments) for plan in plans)
        if plans:
            self._staging.reserve_blocks(plan.numel * plan.dtype.itemsize for plan in plans)
            self._state.reserve(state_bytes)
        made: list[Bucket] = []
        try:
            for plan in plans:
                made.append(self._bucket(plan))
        except BaseException:
            for bucket in made:
                self.give_back(bucket)
            raise
        return made

    def give_back(self, bucket: Bucket) -> None:
        """Take the memory of a bucket back that nobody uses any more."""
        for arena, block in self._blocks.pop(bucket):
            arena.free(block)

    def close(self) -> None:
        """Give all host memory back."""
        undo_all([self._state.close, self._staging.close])

    def _bucket(self, plan: BucketPlan) -> Bucket:
        blocks: list[tuple[HostArena, HostBlock]] = []

        def tensor(arena: HostArena, dtype: torch.dtype) -> torch.Tensor:
            block = arena.allocate(plan.numel * dtype.itemsize)
            blocks.append((arena, block))
            return block.view(dtype, (plan.numel,))

        try:
            staging, *states = (
                tensor(self._staging, plan.dtype),
                *(tensor(self._state, torch.float32) for _ in range(1 + self._moments)),
            )
        except BaseException:
            for arena, block in blocks:
                arena.free(block)
            raise
        bucket = Bucket(plan.pieces, staging, states[0], tuple(states[1:]))
        self._blocks[bucket] = blocks
        return bucket


def _aligned_bytes(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
