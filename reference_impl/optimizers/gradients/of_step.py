# SPDX-License-Identifier: Apache-2.0
"""The gradients of one optimizer's members, as its step uses them.

`StandingGradients` stay on their parameters, where the update reads them. `LeavingGradients` are on the host by then,
or partly so; gradients of streamed layers leave a block at a time, and are in `trained_layers.gradients`.

Explained in docs/optimizer-offloading.md and docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from reference_impl.device import Event
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.optimizers.gradients.used import RestOfStep
from reference_impl.optimizers.layout import Member


class PreparedGradients(NamedTuple):
    """The gradients of a prepared step: events after which they are on the host, their factors, and their stand-ins."""

    arrived: Mapping[Member, Event]
    factors: Mapping[Member, Sequence[torch.Tensor | float]]
    stand_ins: Mapping[Member, GradientStandIn]


class StepGradients(ABC):
    """The gradients of the members of one optimizer: a step's, and the ones that its update still reads.

    `measures`: norms are taken; `may_leave`: gradients lose their values in backward. If backward has begun to update,
    `backward_part` is that part of the step, and `rest` has the other gradients, once `step()` was called for them.
    `begins_whole`: backward queues the whole update of each begun parameter.
    """

    measures = True
    may_leave = False
    begins_whole = False
    backward_part: CpuStep | None = None
    rest: RestOfStep | None = None

    @property
    def used_in_backward(self) -> Collection[Member]:
        """The members whose gradients backward has begun to use, before `step()`."""
        return () if self.backward_part is None else self.backward_part.arrivals

    @abstractmethod
    def to_use(
        self, members: Iterable[Member], wait_for: Callable[[Iterable[Member]], None]
    ) -> dict[Member, torch.Tensor]:
        """Return the gradients of a step, each laid out like its parameter, or the stand-in of one on the host.

        Gradients of members that backward has begun to update are not among them. `wait_for` makes the live current
        stream see new weights: of the last step's members that have to be new before these gradients are used. Raises
        RuntimeError for a gradient made from a weight in flight.
        """

    @abstractmethod
    def norms(self, gradients: Mapping[Member, torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms (fp32, 0-dim) of `gradients`."""

    @abstractmethod
    def prepare(self, gradients: Mapping[Member, torch.Tensor], *, returns_early: bool) -> PreparedGradients:
        """Prepare a step that uses `gradients`; changes nothing.

        Its update reads them after `step()`, if that `returns_early`.
        """

    @abstractmethod
    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step own its gradients: a write to one calls `wait_for`; without it nobody may."""

    def end(self, members: Iterable[Member]) -> torch.Tensor | None:
        """Note that the updates of `members` are waited for; return a gradient that was written before, if any."""
        return None

    def cut_short(self) -> Exception | None:
        """Return the error of a backward that has failed after it had begun to update, if one has."""
        return None

    def note_rest(self, members: Iterable[Member], *, checks_used: bool = True) -> None:  # noqa: B027
        """Note the rest of a step begun in backward, once: the present gradients of `members`.

        Raises RuntimeError, if it `checks_used`, for dropped gradients that backward has used.
        """

    @abstractmethod
    def drop(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that have left and were not used."""

    @abstractmethod
    def being_read(self, members: Iterable[Member]) -> list[Member]:
        """Return the `members` with a gradient that an update still reads in place.

        The live current stream waits for copies that read others.
        """

    @abstractmethod
    def forget(self) -> None:
        """Let go of all gradients: the optimizer is closed."""
