# SPDX-License-Identifier: Apache-2.0
"""The gradients that a step uses, as far as they stand on parameters: so that no step uses them again, or others.

Explained in docs/optimizer-offloading.md, "When something fails".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch

from reference_impl.optimizers.gradients.in_use import itself
from reference_impl.optimizers.gradients.stand_in import GradientStandIn, unwrapped
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.step import WorkLostError


def standing_on(members: Iterable[Member]) -> dict[Member, torch.Tensor]:
    """Return the gradients of `members`, for each that has one."""
    return {member: gradient for member in members if (gradient := member.gradient) is not None}


def version_of(gradient: torch.Tensor) -> int:
    """Return a number that changes when a gradient is written in place."""
    return 0 if gradient.is_inference() else gradient._version


def _writes_of(gradient: torch.Tensor) -> int:
    # A stand-in says itself that it was dropped, and answers other questions slowly.
    return 0 if isinstance(gradient, GradientStandIn) else version_of(gradient)


# Gradients and how often each had been written. Weak, so that a gradient's memory is free once it is dropped.
Noted = dict[Member, tuple[weakref.ref[torch.Tensor], int]]


def noted_of(standing: Mapping[Member, torch.Tensor]) -> Noted:
    """Return the notes of `UsedGradients` on `standing` gradients."""
    plain = {member: itself(gradient) for member, gradient in standing.items()}
    return {member: (weakref.ref(gradient), _writes_of(gradient)) for member, gradient in plain.items()}


def written_while_read(gradient: torch.Tensor) -> RuntimeError:
    """Return the error for a gradient that was written before its update was waited for."""
    return RuntimeError(
        f"a gradient of shape {tuple(gradient.shape)} was written after step(), while the update still read it; "
        "expected it to stay until the next forward; try optimizer.synchronize() before writing, or "
        "optimizer.zero_grad()"
    )


class UsedGradients:
    """The gradients that the last step was taken from, as far as they still stand on parameters."""

    def __init__(self) -> None:
        self._used: Noted = {}
        self._all_offloaded = False

    def note(self, noted: Noted, *, all_offloaded: bool) -> None:
        """Note that a step uses the gradients in `noted`, and offloaded ones unseen; allocates nothing."""
        self._used, self._all_offloaded = noted, all_offloaded

    def forget(self) -> None:
        """Note dropped or new gradients."""
        self._used, self._all_offloaded = {}, False

    def are_all(self, members: Iterable[Member]) -> bool:
        """Return whether no other gradients stand on parameters, and these do unless they could not."""
        if not self._used and not self._all_offloaded:
            return False
        standing = standing_on(members)
        return (bool(standing) or self._all_offloaded) and all(
            map(self._is_used, standing, standing.values())
        )

    def _is_used(self, member: Member, gradient: torch.Tensor) -> bool:
        gradient = itself(gradient)
        used, version = self._used.get(member, (None, 0))
        if used is None or used() is not gradient or version != _writes_of(gradient):
            return False
        return not (isinstance(gradient, GradientStandIn) and gradient.dropped)


class RestOfStep:
    """The rest of a step that backward has begun: the gradients of `members` when `step()` was called.

    It uses these gradients, however often it fails, and whatever stands on the parameters then.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = list(members)
        standing = ((member.param, member.param.grad) for member in self._members)
        self._gradients = [
            (param, gradient, _writes_of(gradient)) for param, gradient in standing if gradient is not None
        ]
        self._awaited: list[Member] = []

    def be_awaited(self) -> None:
        """Have readers of the members' weights wait for the step."""
        self._awaited += [member for member in self._members if not member.pending]
        for member in self._awaited:
            member.pending = True

    def use(self, take: Callable[[], None], *, has_begun: Callable[[], bool]) -> None:
        """Call `take` while these gradients stand on their parameters; put back later ones afterwards.

        Until the step `has_begun`, it is awaited. Raises WorkLostError for a written gradient.
        """
        try:
            for member in self._awaited:
                member.pending = False
            self._awaited = []
            self._use(take)
        finally:
            if not has_begun():
                self.be_awaited()

    def _use(self, take: Callable[[], None]) -> None:
        for param, gradient, writes in self._gradients:
            stands = unwrapped(gradient)
            is_dropped = isinstance(stands, GradientStandIn) and stands.dropped
            if is_dropped or _writes_of(gradient) != writes:
                raise WorkLostError(
                    f"the gradient of a parameter of shape {tuple(param.shape)} was written after step() had raised, "
                    "and before the update that backward had begun was done; expected it to stay until the optimizer "
                    "has gone on; try loading the last checkpoint into a new optimizer"
                )
        replaced = [
            (param, gradient, param.grad)
            for param, gradient, _ in self._gradients
            if param.grad is not gradient
        ]
        now = [(param, stands) for param, _, stands in replaced]
        try:
            try:
                _put_on((param, gradient) for param, gradient, _ in replaced)
                take()
            finally:
                _put_on(now)
        finally:
            # An interrupt may have come before the same line above.
            _put_on(now)


def _put_on(gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for param, gradient in gradients:
        param.grad = gradient
