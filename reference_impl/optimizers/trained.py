# SPDX-License-Identifier: Apache-2.0
"""The parameters of an optimizer's groups: trained ones, with states, and frozen ones.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from reference_impl.optimizers import checks
from reference_impl.optimizers.layout import Member


class TrainedParameters:
    """The members of one optimizer, by parameter, and the parameters of its groups that have no states.

    `also_frozen` ones get states too, as Megatron's do.
    """

    def __init__(self, *, also_frozen: bool) -> None:
        self.members: dict[torch.Tensor, Member] = {}
        self._also_frozen = also_frozen
        self._idle: list[torch.Tensor] = []
        self._checked: list[list[torch.Tensor]] = []

    def new_in(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor, int]]:
        """Return the trainable parameters without states, each with its group. Raises for several devices."""
        listed = [(param, index) for index, group in enumerate(groups) for param in group["params"]]
        checks.one_device(param for param, _ in listed)
        trained = [each for each in listed if each[0].requires_grad or self._also_frozen]
        return [each for each in trained if each[0] not in self.members]

    def add(self, members: Iterable[Member]) -> None:
        """Note new members, all at once."""
        self.members.update({member.param: member for member in members})

    def note_idle(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Note the parameters of `groups` that have no states."""
        self._idle = [param for group in groups for param in group["params"] if param not in self.members]

    def unfrozen(self) -> list[torch.Tensor]:
        """Return the parameters without states that have a gradient now."""
        return [param for param in self._idle if param.grad is not None]

    def trainable(self) -> list[torch.Tensor]:
        """Return the parameters without states that would get a gradient in a backward."""
        return [param for param in self._idle if param.requires_grad]

    def check_replaced(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise RuntimeError when others stand in a group than the parameters that have states.

        Sharding a model after its optimizer was made gives groups other lists. A step would change no weight.
        """
        lists = [group["params"] for group in groups]
        if len(lists) == len(self._checked) and all(map(operator.is_, lists, self._checked)):
            return
        for param in (param for listed in lists for param in listed):
            if param.grad is not None and param not in self.members:
                raise checks.replaced(param)
        self._checked = lists

    def facts(self, groups: Sequence[Mapping[str, Any]], *, has_shares: bool) -> dict[str, str]:
        """Return in words the places of states and the rates of their updates; without shares all others stream."""
        params = [param for group in groups for param in group["params"]]
        here, streamed, on_cpu = (
            sum(getattr(member, share) for member in self.members.values())
            for share in ("resident", "streamed", "on_cpu")
        )
        if not has_shares:
            streamed, on_cpu = streamed + on_cpu, 0
        states = here + streamed + on_cpu or 1
        return {
            "parameters": f"{sum(param.numel() for param in params):,}",
            "states on the device": f"{here / states:.0%}",
            "streamed from the host": f"{streamed / states:.0%}",
            "updated on the CPU": f"{on_cpu / states:.0%}",
            "lr": ", ".join(dict.fromkeys(f"{group['lr']:g}" for group in groups)),
        }
