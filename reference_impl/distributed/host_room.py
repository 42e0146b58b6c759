# SPDX-License-Identifier: Apache-2.0
"""The host memory that ranks need together, checked on all of them before any takes some.

Free memory of a host is free to each of its ranks until one has taken it, so ranks that look one by one promise
themselves the same bytes. And a rank that ends alone leaves the others waiting for it.

Explained in docs/distributed.md.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from reference_impl.distributed.ranks import RankGroup
from reference_impl.memory.host import HostMemoryError, available_by_pool
from reference_impl.memory.slab import RESERVE_BYTES


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """The memory that a rank is about to take: bytes by their purpose.

    `freed_bytes` are its own on the host that it gives back meanwhile.
    """

    items: Mapping[str, int]
    freed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.items.values())

    def __str__(self) -> str:
        """Return the items, each with its gigabytes."""
        return ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in self.items.items())


@dataclass(frozen=True)
class _Answer:
    """The findings of one rank."""

    rank: int
    host: str
    need: HostNeed
    pools: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class _Shortage:
    """A pool of memory too small for its `sharing` ranks, of all ranks that gave `answers`."""

    answers: list[_Answer]
    # The index of the answer with the least memory.
    poorest: int
    sharing: int
    needed_bytes: int
    there_bytes: int


def require_room(need: HostNeed, ranks: RankGroup | None, *, remedy: Callable[[float], str]) -> None:
    """Raise HostMemoryError unless the memory of a host, or of a container, suffices for all its `ranks`.

    All ranks have to call it, and all raise the same error. It names the rank with the least memory, its needs, item by
    item, and the `remedy` for the share of the need that fits.
    """
    short = _shortage(need, ranks)
    if short is not None:
        # Closed and dropped memory may still wait for the collector, on any rank.
        gc.collect()
        short = _shortage(need, ranks)
    if short is None:
        return
    said = remedy(short.there_bytes / short.needed_bytes)
    whose, poorest = "", short.answers[short.poorest]
    if ranks is not None:
        whose = f"rank {poorest.rank} on {poorest.host}, one of {short.sharing} that share it, needs "
        said = ranks.everyones(said)[short.poorest]
    raise HostMemoryError(
        needed_bytes=short.needed_bytes,
        available_bytes=short.there_bytes,
        remedy=f"{whose}{poorest.need}; {said}",
    )


def _shortage(need: HostNeed, ranks: RankGroup | None) -> _Shortage | None:
    """Return the first pool that is too small, the same one on every rank; None where all have room."""
    rank = 0 if ranks is None else dist.get_rank()
    own = _Answer(rank, os.uname().nodename, need, available_by_pool())
    answers: list[_Answer] = [own] if ranks is None else ranks.everyones(own)
    for pool in sorted({name for answer in answers for name in answer.pools}):
        sharing = [answer for answer in answers if pool in answer.pools]
        poorest = min(sharing, key=lambda answer: (answer.pools[pool], -answer.need.total_bytes))
        needed_bytes = sum(answer.need.total_bytes for answer in sharing)
        freed_bytes = sum(answer.need.freed_bytes for answer in sharing)
        there_bytes = max(poorest.pools[pool] - RESERVE_BYTES + freed_bytes, 0)
        if needed_bytes > there_bytes:
            return _Shortage(
                answers=answers,
                poorest=answers.index(poorest),
                sharing=len(sharing),
                needed_bytes=needed_bytes,
                there_bytes=there_bytes,
            )
    return None
