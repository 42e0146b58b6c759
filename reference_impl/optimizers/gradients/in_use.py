# SPDX-License-Identifier: Apache-2.0
"""A gradient on its parameter that a begun update still reads: a write to it waits for the update first.

`GradientInUse` has the gradient's own memory, so every read finds its values. It takes the gradient's place on
`param.grad` from `step()` until a forward has waited for the new weight.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from reference_impl.optimizers.guarded import GuardedTensor
from reference_impl.optimizers.layout import Member


class GradientInUse(GuardedTensor):
    """A gradient; `finish()` makes the live current stream wait for its update before any write."""

    finish: Callable[[], None]

    @classmethod
    def of(cls, gradient: torch.Tensor, finish: Callable[[], None]) -> GradientInUse:
        """Share the memory of `gradient`."""
        made = cls.over(gradient)
        made.finish = finish
        return made

    def before_write(self) -> None:
        """Wait for the update."""
        self.finish()

    def guarding(self, view: torch.Tensor) -> GradientInUse:
        """Guard a view in the same way."""
        return GradientInUse.of(view, self.finish)


def put_in_use(
    read: Mapping[Member, tuple[torch.Tensor, int]], wait_for: Callable[[Sequence[Member]], None]
) -> None:
    """Guard gradients that an update reads in place, until `take_out`; a write calls `wait_for`."""
    for member, (gradient, _) in read.items():
        if member.param.grad is gradient and type(gradient) is torch.Tensor:
            member.param.grad = GradientInUse.of(gradient, partial(wait_for, [member]))


def take_out(member: Member) -> None:
    """Put the gradient itself back, unless another one stands there."""
    stands = member.param.grad
    if isinstance(stands, GradientInUse):
        member.param.grad = stands.plain


def in_use(members: Iterable[Member]) -> list[Member]:
    """Return the `members` with the gradient of the last step and without a waiter for the new weight."""
    return [member for member in members if member.pending and isinstance(member.param.grad, GradientInUse)]


def itself(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient that stands on a parameter, guarded or not."""
    return gradient.plain if isinstance(gradient, GradientInUse) else gradient
