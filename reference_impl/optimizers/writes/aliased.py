# SPDX-License-Identifier: Apache-2.0
"""Finds weights with another live tensor: a read of it behind `step()` is not made to wait.

A parameter waits for its new weight (`awaited`). A tensor taken from it before (`p.data`, a view, a `state_dict()` that
was kept) is a plain one. So `step()` waits for such weights itself, as without an attached model. How many tensors
use a storage, torch counts; the optimizer's own are learnt when it makes the states. Slices of one buffer are found
too: they have one counter of writes, so that a write to one may be a write to any.

Explained in docs/optimizer-offloading.md, "Writing weights yourself".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from reference_impl.memory.absent import unanswered
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.writes.awaited import AwaitedParameter


class AliasedWeights:
    """Knows for each member how many tensors of the optimizer's own have its memory.

    Of shards nothing is said: FSDP2 holds a tensor of each.
    """

    def __init__(self) -> None:
        self._own: dict[Member, int] = {}
        self._noted: dict[Member, None] = {}

    @contextmanager
    def learning(self, members: Iterable[Member]) -> Iterator[None]:
        """Learn how many tensors of each of `members` are made inside, where their states are made."""
        listed = list(members)
        before = _uses(listed)
        yield
        for member, uses in _uses(listed).items():
            self._own[member] = uses - before[member]

    def note(self, members: Iterable[Member]) -> None:
        """Note the `members` held by other code, before their update begins: the update makes tensors of them, too."""
        self._noted.update(
            (member, None) for member, uses in _uses(members).items() if uses > 1 + self._own.get(member, 0)
        )

    def take_noted(self) -> list[Member]:
        """Return the weights that were noted, and forget them."""
        noted, self._noted = list(self._noted), {}
        return noted


def _countable(members: Iterable[Member]) -> Iterator[Member]:
    return (m for m in members if m.home is None and type(m.param) in (nn.Parameter, AwaitedParameter))


def _uses(members: Iterable[Member]) -> dict[Member, int]:
    """Return how many tensors use the memory of each of `members`; the caller uses it, too."""
    # Asked once for all of them: each step asks of every weight.
    return unanswered(_count_uses, members)


def _count_uses(members: Iterable[Member]) -> dict[Member, int]:
    count = torch._C._storage_Use_Count
    return {each: count(each.param.untyped_storage()._cdata) - 1 for each in _countable(members)}
