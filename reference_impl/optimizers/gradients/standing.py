# SPDX-License-Identifier: Apache-2.0
"""Gradients that stay on their parameters: the update reads them there.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from reference_impl.optimizers import checks
from reference_impl.optimizers.gradients.clip_decision import norms_of
from reference_impl.optimizers.gradients.in_use import in_use, put_in_use, take_out
from reference_impl.optimizers.gradients.of_step import PreparedGradients, StepGradients
from reference_impl.optimizers.gradients.used import standing_on, version_of
from reference_impl.optimizers.layout import Member, gradient_of


class StandingGradients(StepGradients):
    """Gradients that stay on their parameters until `zero_grad()`, as torch leaves them."""

    def __init__(self) -> None:
        # Gradients with their versions: the prepared step's, and the ones that a begun update still reads.
        self._prepared: dict[Member, tuple[torch.Tensor, int]] = {}
        self._read: dict[Member, tuple[torch.Tensor, int]] = {}

    def to_use(
        self, members: Iterable[Member], wait_for: Callable[[Iterable[Member]], None]
    ) -> dict[Member, torch.Tensor]:
        """Return the gradients that stand on `members`; everything still read by the last update is waited for."""
        listed = list(members)
        wait_for(in_use(listed))
        used = {member: gradient_of(member) for member in standing_on(listed)}
        checks.check_used_in_time(used)
        wait_for([member for member in listed if member.pending])
        return used

    def norms(self, gradients: Mapping[Member, torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms (fp32, 0-dim) of `gradients`."""
        return norms_of(gradients.values())

    def prepare(self, gradients: Mapping[Member, torch.Tensor], *, returns_early: bool) -> PreparedGradients:
        """Prepare a step on `gradients` in place; changes nothing."""
        self._prepared = {member: (each, version_of(each)) for member, each in gradients.items()}
        return PreparedGradients({}, {}, {})

    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step read its gradients; a write to one calls `wait_for` first, if it is given."""
        self._read, self._prepared = self._prepared, {}
        if wait_for is not None:
            put_in_use(self._read, wait_for)

    def end(self, members: Iterable[Member]) -> torch.Tensor | None:
        """Note that the updates of `members` are waited for; return a gradient that was written before, if any."""
        for member in members:
            gradient, version = self._read.get(member, (None, 0))
            if gradient is not None and version_of(gradient) != version:
                return gradient
            if self._read.pop(member, None) is not None:
                take_out(member)
        return None

    def drop(self, members: Iterable[Member]) -> None:
        """Do nothing: no gradient has left."""

    def being_read(self, members: Iterable[Member]) -> list[Member]:
        """Return the `members` with a gradient that an update still reads."""
        return [member for member in members if member in self._read]

    def forget(self) -> None:
        """Let go of all gradients."""
        self._prepared, self._read = {}, {}
