# SPDX-License-Identifier: Apache-2.0
"""Masters of our optimizers whose weights are away.

Masters follow a weight written by other code. They see the write by the weight's version and address. Parking changes
both, and is no write.

Explained in docs/parking.md. Apart because it is about our optimizers, and parking serves any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from reference_impl.memory.absent import is_absent
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.writes.module_load import written


class MastersOfParked:
    """The masters in `optimizers`, as far as these are ours."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._ours = [each for each in optimizers if isinstance(each, HostedOptimizer)]
        # Absent or leaving weights that nobody had written.
        self._unwritten: list[Member] = []

    def weights_leave(self) -> None:
        """Note which weights nobody has written since their masters were the same: the host may wait for the device."""
        unwritten = self._away()
        for optimizer in self._ours:
            members = [each for each in optimizer.members.values() if each.watched is not None]
            present = [member for member in members if not is_absent(member.param_local)]
            changed = {*written(present), *optimizer.written_uncounted(present)}
            unwritten += [member for member in present if member not in changed]
        self._unwritten = unwritten

    def weights_are_back(self) -> None:
        """Note the present weights with their addresses."""
        for member in self._unwritten:
            if not is_absent(member.param_local):
                member.note_weight()
        self._unwritten = self._away()

    def behind(self) -> list[Callable[[], None]]:
        """Return the calls by which masters follow their absent weights, for each pair that differs."""
        unwritten = set(self._unwritten)
        return [
            partial(optimizer.state.follow, member)
            for optimizer, member in self._members()
            if is_absent(member.param_local) and member not in unwritten
        ]

    def have_followed(self) -> None:
        """Note that the masters of all absent weights follow them."""
        self._unwritten = [member for _, member in self._members() if is_absent(member.param_local)]

    def _away(self) -> list[Member]:
        return [member for member in self._unwritten if is_absent(member.param_local)]

    def _members(self) -> list[tuple[HostedOptimizer, Member]]:
        return [(each, member) for each in self._ours for member in each.members.values()]
