# SPDX-License-Identifier: Apache-2.0
"""Where weights, states and updates of streamed trained layers and shards are: an `optimizers.placement.Placement`.

Explained in docs/larger-than-gpu.md, "Where states are updated".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from reference_impl.memory.weight_home import WeightHome
from reference_impl.optimizers.algorithms import MatrixAlgorithm
from reference_impl.optimizers.layout import Member, members_of
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.trained_layers.shares import StateShares


class VisitingWeights(Protocol):
    """The weights that visit the device."""

    @property
    def home_of(self) -> Mapping[torch.Tensor, WeightHome]:
        """Where each parameter's weight lives."""

    @property
    def ahead(self) -> Sequence[torch.Tensor]:
        """The trained parameters that are on the device or on their way, in the order of the model."""

    def reload(self) -> None:
        """Bring the weights on the device again: their homes have been written."""

    def end_failed_loads(self) -> None:
        """Let weights stream again that a failed load has left on the device."""


class VisitingPlacement:
    """Weights that visit the device, with states on the host except for the resident elements of `shares`.

    Args:
        weights: the weights that visit.
        shares: the states that stay on the device, and the CPU's parameters.
    """

    def __init__(self, weights: VisitingWeights, shares: StateShares) -> None:
        self._weights, self._shares = weights, shares

    def lay_out(
        self,
        params: Sequence[tuple[torch.Tensor, int]],
        *,
        before: Collection[Member],
        matrices: Sequence[MatrixAlgorithm | None],
    ) -> list[Member]:
        """Return members of `params`, each with its group and its home."""
        members = members_of(params, first_order=len(before), fraction=1.0, offload=None, matrices=matrices)
        for member in members:
            member.home = self._weights.home_of.get(member.param)
            # Of matrices too the whole gradient leaves; `parts` says which elements stream.
            member.streamed = 0
        return members

    def parts(self, members: Iterable[Member]) -> dict[Member, Part]:
        """Return the resident and streamed elements of `members`, without the CPU's."""
        staying, on_cpu = self._shares.staying, self._shares.on_cpu
        return {
            member: Part(
                staying=range(staying.get(member.param, 0)),
                streamed=range(staying.get(member.param, 0), member.param_local.numel()),
            )
            for member in members
            if member.param not in on_cpu
        }

    def check_room(self, shares: Shares, members: Sequence[Member], parts: Mapping[Member, Part]) -> None:
        """Do nothing: the streamer has made sure, of weights and gradients too."""

    def check_unfrozen(self, params: Iterable[torch.Tensor], model: nn.Module | None) -> None:
        """Raise RuntimeError, unless there are none, that `params` are to train and have no states.

        Their blocks came to the host as they were: the homes of their weights are settled.
        """
        for param in params:
            named = () if model is None else model.named_parameters()
            shape = tuple(param.shape)
            name = next((name for name, each in named if each is param), f"a parameter of shape {shape}")
            raise RuntimeError(
                f"{name} was frozen when its layers were made to stream, and is to train now; expected all that trains "
                "to require a gradient by then; try requires_grad_() before the plan is applied or the streamer is "
                "made, or freeze it again"
            )

    def has_loaded(self) -> None:
        """Bring the weights anew that are on the device: their homes were written."""
        self._weights.reload()
