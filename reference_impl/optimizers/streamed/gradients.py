"""The gradients of a step whose states stream: what the step takes, and gradients that stay on their parameters.

`StandingGradients` are read by the update where they stand. Gradients that leave in backward are in
`trained_layers.gradients`.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from reference_impl.device import Event
from reference_impl.optimizers.clip_decision import norms_of
from reference_impl.optimizers.gradient_in_use import in_use, put_in_use, take_out
from reference_impl.optimizers.gradients import standing_on, version_of
from reference_impl.optimizers.layout import Member, gradient_of
from reference_impl.optimizers.stand_in import GradientStandIn


class TakenGradients(NamedTuple):
    """What a step takes: events after which gradients are on the host, their factors, and what stands for them."""

    arrived: Mapping[Member, Event]
    factors: Mapping[Member, Sequence[torch.Tensor | float]]
    stand_ins: Mapping[Member, GradientStandIn]


class StepGradients(Protocol):
    """The gradients of the members of one optimizer: those of a step, and what its update still reads."""

    def to_use(
        self, members: Collection[Member], wait_for: Callable[[Iterable[Member]], None]
    ) -> dict[Member, torch.Tensor]:
        """Return the gradients of a step; `wait_for` makes the live current stream see new weights."""

    def norms(self, gradients: Mapping[Member, torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms (fp32, 0-dim) of `gradients`."""

    def prepare(self, gradients: Mapping[Member, torch.Tensor]) -> TakenGradients:
        """Prepare a step that uses `gradients`; changes nothing."""

    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step own its gradients: whoever writes one calls `wait_for`; without it nobody may."""

    def end(self, members: Iterable[Member]) -> torch.Tensor | None:
        """Note that the updates of `members` are waited for; return a gradient that was written before, if any."""

    def forget(self) -> None:
        """Let go of all gradients: the optimizer is closed."""

    @property
    def are_read(self) -> bool:
        """Whether an update still reads gradients where they stand."""


class StandingGradients:
    """Gradients that stay on their parameters until `zero_grad()`, as torch leaves them."""

    def __init__(self) -> None:
        # With their versions: of the prepared step, and those that a begun update still reads.
        self._prepared: dict[Member, tuple[torch.Tensor, int]] = {}
        self._read: dict[Member, tuple[torch.Tensor, int]] = {}

    def to_use(
        self, members: Collection[Member], wait_for: Callable[[Iterable[Member]], None]
    ) -> dict[Member, torch.Tensor]:
        """Return the gradients that stand on `members`; one that an update reads still is waited for."""
        wait_for(in_use(members))
        return {member: gradient_of(member) for member in standing_on(members)}

    def norms(self, gradients: Mapping[Member, torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms (fp32, 0-dim) of `gradients`."""
        return norms_of(gradients.values())

    def prepare(self, gradients: Mapping[Member, torch.Tensor]) -> TakenGradients:
        """Prepare a step that reads `gradients` where they stand; changes nothing."""
        self._prepared = {member: (each, version_of(each)) for member, each in gradients.items()}
        return TakenGradients({}, {}, {})

    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step read its gradients; whoever writes one calls `wait_for` first, if it is given."""
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

    def forget(self) -> None:
        """Let go of all gradients."""
        self._prepared, self._read = {}, {}

    @property
    def are_read(self) -> bool:
        """Whether an update still reads gradients where they stand."""
        return bool(self._read)
