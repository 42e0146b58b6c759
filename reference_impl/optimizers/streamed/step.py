# SPDX-License-Identifier: Apache-2.0
"""Gradients, numbers and decision of one step of streamed states.

Explained in docs/optimizer-state-offloading.md, "A step".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reference_impl.device import Device, Event
from reference_impl.optimizers.gradients.clip_decision import ClipDecision
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.streamed.chunks import StreamedWeights


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """Gradients, numbers and decision of one step.

    `gradients` have the shape of their parameters; one may be taken out once its update is queued; this frees its
    memory. `steps` are the step counters, 0-dim fp32 on the device; they count this step from its begin on. `groups`
    are the hyper-parameters by group. Without a `decision` gradients are used as they are. For chunks with gradients on
    the host `gradients` only names the members. Each gradient there is whole after its member's event in `arrived`, and
    is multiplied by each of its `factors`, in its own dtype.
    """

    gradients: dict[Member, torch.Tensor]
    steps: Mapping[Member, torch.Tensor]
    decision: ClipDecision | None
    groups: Sequence[Mapping[str, Any]]
    weights: StreamedWeights
    arrived: Mapping[Member, Event] = field(default_factory=dict)
    factors: Mapping[Member, Sequence[torch.Tensor | float]] = field(default_factory=dict)

    def gradient(self, piece: Piece) -> torch.Tensor:
        """Return the gradient of `piece`, flat."""
        return piece.member.flat(self.gradients[piece.member])[piece.start : piece.stop]

    def counted(self, members: Sequence[Member]) -> torch.Tensor:
        """Return the counters of `members` as they will be from the step's begin on: fp32, one dimension."""
        counted = torch.stack([self.steps[member] for member in members]).add_(1)
        return counted if self.found_inf is None else counted.sub_(self.found_inf)

    def count(self, device: Device) -> None:
        """Count the step."""
        counters = [self.steps[member] for member in self.gradients]
        device.launch(torch._foreach_add_, counters, 1)
        if self.found_inf is not None:
            device.launch(torch._foreach_sub_, counters, [self.found_inf] * len(counters))

    @property
    def grad_scale(self) -> torch.Tensor | None:
        """The divisor of gradients, if there is one."""
        return None if self.decision is None else self.decision.grad_scale

    @property
    def found_inf(self) -> torch.Tensor | None:
        """Not 0 if the step is skipped; None if nothing decides that."""
        return None if self.decision is None else self.decision.found_inf
