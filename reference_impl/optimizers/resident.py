"""The share of the state that stays on the device, updated by the fused GPU kernel.

Masters and moments are fp32; an fp32 parameter is its own master unless the CPU updates another part of it. The
update runs in chunks, so that the fp32 copy of the gradients never takes more than one chunk. Explained in
docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from reference_impl.device import REACHED
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.layout import MASTER, Member, NewWeights, gradient_of

CHUNK_ELEMENTS = 64 * 2**20


@dataclass(eq=False, slots=True)
class ResidentState:
    """Flat fp32 tensors on the device for the first `member.resident` elements."""

    member: Member
    weight: torch.Tensor
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    step: torch.Tensor

    def follow(self) -> None:
        """Use the parameter's memory of now: `.data` may have been exchanged."""
        local = self.member.param_local
        if local.data_ptr() != self.weight.data_ptr():
            weight = self.member.flat(local.detach())[: self.member.resident]
            self.master = weight if self.master is self.weight else self.master
            self.weight = weight


class ResidentShare:
    """The states of all members with resident elements."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._states: dict[Member, ResidentState] = {}

    def add(self, member: Member) -> None:
        """Make the state of a member's resident elements, the master from the parameter."""
        weight = member.flat(member.param_local.detach())[: member.resident]
        # An fp32 weight is its own master, unless the CPU updates another part: then both appear together.
        own = weight.dtype == torch.float32 and not member.on_cpu
        master = weight if own else weight.to(torch.float32, copy=True)
        moments = tuple(torch.zeros_like(master) for _ in self._algorithm.moments)
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        self._states[member] = ResidentState(member, weight, master, moments, step)

    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of `members` from the parameters as they are."""
        for state in [self._states[member] for member in members if member in self._states]:
            state.follow()
            if state.master is not state.weight:
                state.master.copy_(state.weight)

    def update(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        split: bool,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Update the members that have a gradient, on the live current stream.

        `split` chooses between those that the CPU updates in part and the others. A split member keeps its
        old weight until its other part is published.
        """
        chosen = [state for state in self._ready() if bool(state.member.pieces) == split]
        for state in chosen:
            state.follow()
        for group, states in _chunks(chosen):
            grads = [
                state.member.flat(gradient_of(state.member))[: state.member.resident] for state in states
            ]
            steps = [state.step for state in states]
            torch._foreach_add_(steps, 1)
            self._algorithm.update(
                [state.master for state in states],
                # The kernel writes the scaled gradient back, so it gets a copy also where none is needed to widen.
                [grad.to(torch.float32, copy=grad_scale is not None) for grad in grads],
                [[state.moments[index] for state in states] for index in range(len(self._algorithm.moments))],
                steps,
                groups[group],
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            if found_inf is not None:
                torch._foreach_sub_(steps, [found_inf] * len(steps))
            apart = [state for state in states if state.master is not state.weight]
            if apart and not split:
                torch._foreach_copy_([state.weight for state in apart], [state.master for state in apart])

    def new_weights(self, member: Member) -> Iterator[NewWeights]:
        """Yield what `update` has computed of a split member and its parameter does not hold yet."""
        state = self._states.get(member)
        if state is not None and state.master is not state.weight:
            yield NewWeights(state.weight, state.master, REACHED)

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of the part of a moment or `master_param` that is here."""
        state = self._states.get(member)
        if state is not None:
            yield 0, state.master if name == MASTER else state.moments[self._algorithm.moments.index(name)]

    def steps(self, member: Member) -> Iterator[torch.Tensor]:
        """Yield the step counter of a member that is here, fp32, 0-dim on the device."""
        if member in self._states:
            yield self._states[member].step

    def _ready(self) -> list[ResidentState]:
        return [state for state in self._states.values() if state.member.gradient is not None]


def _chunks(states: Sequence[ResidentState]) -> Iterator[tuple[int, list[ResidentState]]]:
    """Yield lists of one group and at most `CHUNK_ELEMENTS` (or one member)."""
    by_group = sorted(states, key=lambda state: state.member.group)
    for group, members in groupby(by_group, key=lambda state: state.member.group):
        chunk: list[ResidentState] = []
        for state in members:
            if chunk and sum(s.member.resident for s in chunk) + state.member.resident > CHUNK_ELEMENTS:
                yield group, chunk
                chunk = []
            chunk.append(state)
        yield group, chunk
