"""The share of the state that stays on the device, updated by the fused GPU kernel.

Masters and moments are fp32; an fp32 parameter is its own master unless the CPU updates another part of it. The
update runs in chunks, and within a member that is longer in parts of it, so that the fp32 copy of the gradients never
takes more than `WIDENED_ELEMENTS`. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch

from offload_arithmetic.sizes import WIDENED_ELEMENTS
from reference_impl.device import REACHED
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.clip_decision import ClipDecision
from reference_impl.optimizers.layout import MASTER, Member, NewWeights
from reference_impl.optimizers.step import Operation


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
            weight = self.member.flat(self.member.weight)[: self.member.resident]
            self.master = weight if self.master is self.weight else self.master
            self.weight = weight


class ResidentShare:
    """The states of all members with resident elements."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._states: dict[Member, ResidentState] = {}

    def add(self, member: Member) -> None:
        """Make the state of a member's resident elements, the master from the parameter."""
        weight = member.flat(member.weight)[: member.resident]
        # An fp32 weight is its own master, unless the CPU updates another part: then both appear together.
        own = weight.dtype == torch.float32 and not member.on_cpu
        master = weight if own else weight.to(torch.float32, copy=True)
        moments = tuple(torch.zeros_like(master) for _ in self._algorithm.moments)
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        self._states[member] = ResidentState(member, weight, master, moments, step)

    def forget(self, members: Iterable[Member]) -> None:
        """Drop the states of `members`, if there are any."""
        for member in members:
            self._states.pop(member, None)

    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of `members` from the parameters as they are."""
        for state in [self._states[member] for member in members if member in self._states]:
            state.follow()
            if state.master is not state.weight:
                state.master.copy_(state.weight)

    def operations(
        self,
        gradients: Mapping[Member, torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        decision: ClipDecision | None,
    ) -> Iterator[Operation]:
        """Yield what updates the members that have one of `gradients`, on the live current stream.

        Each gradient is laid out like its parameter. A member that the CPU updates in part keeps its old weight until
        its other part is published.
        """
        chosen = [self._states[member] for member in gradients if member in self._states]
        for group, states in _chunks(chosen):
            yield from _ChunkUpdate(
                self._algorithm, states, [gradients[s.member] for s in states], groups[group], decision
            ).operations()

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


class _ChunkUpdate:
    """The update of some states of one group in one step."""

    def __init__(
        self,
        algorithm: Algorithm,
        states: Sequence[ResidentState],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        decision: ClipDecision | None,
    ) -> None:
        self._algorithm = algorithm
        self._states = states
        self._gradients = gradients
        self._group = group
        self._grad_scale = None if decision is None else decision.grad_scale
        self._found_inf = None if decision is None else decision.found_inf
        self._steps = [state.step for state in states]
        self._fp32: list[torch.Tensor] = []

    def operations(self) -> Iterator[Operation]:
        """Yield what it consists of; all memory is allocated by the first, and again by each part of a long member."""
        # A member without elements is counted, too.
        longest = max(1, *(state.member.resident for state in self._states))
        for start in range(0, longest, WIDENED_ELEMENTS):
            part = slice(start, start + WIDENED_ELEMENTS)
            yield partial(self._widen, part)
            if start == 0:
                yield self._count
            yield partial(self._run_kernel, part)
        if self._found_inf is not None:
            yield self._uncount_skipped
        yield self._write_weights

    def _widen(self, part: slice) -> None:
        # The kernel writes the scaled gradient back, so it gets a copy also where none is needed to widen.
        copies = self._grad_scale is not None
        for state in self._states:
            state.follow()
        pairs = zip(self._states, self._gradients, strict=True)
        given = [
            _cut(state.member.flat(gradient)[: state.member.resident], part) for state, gradient in pairs
        ]
        self._fp32 = [
            torch.empty_like(each, dtype=torch.float32) if copies or each.dtype is not torch.float32 else each
            for each in given
        ]
        widened = [(to, each) for to, each in zip(self._fp32, given, strict=True) if to is not each]
        if widened:
            # One launch for many of them.
            torch._foreach_copy_([to for to, _ in widened], [each for _, each in widened])

    def _count(self) -> None:
        torch._foreach_add_(self._steps, 1)

    def _run_kernel(self, part: slice) -> None:
        states = self._states
        self._algorithm.update(
            [_cut(state.master, part) for state in states],
            self._fp32,
            [
                [_cut(state.moments[index], part) for state in states]
                for index in range(len(self._algorithm.moments))
            ],
            self._steps,
            self._group,
            grad_scale=self._grad_scale,
            found_inf=self._found_inf,
        )
        self._fp32 = []

    def _uncount_skipped(self) -> None:
        assert self._found_inf is not None
        torch._foreach_sub_(self._steps, [self._found_inf] * len(self._steps))

    def _write_weights(self) -> None:
        apart = [
            state for state in self._states if state.master is not state.weight and not state.member.pieces
        ]
        if apart:
            torch._foreach_copy_([state.weight for state in apart], [state.master for state in apart])


def _cut(flat: torch.Tensor, part: slice) -> torch.Tensor:
    """Return `flat[part]`, without a view where that is all of it."""
    return flat[part] if part.start or flat.numel() > part.stop else flat


def _chunks(states: Sequence[ResidentState]) -> Iterator[tuple[int, list[ResidentState]]]:
    """Yield lists of one group and at most `WIDENED_ELEMENTS` (or one member)."""
    by_group = sorted(states, key=lambda state: state.member.group)
    for group, members in groupby(by_group, key=lambda state: state.member.group):
        chunk: list[ResidentState] = []
        elements = 0
        for state in members:
            elements += state.member.resident
            if chunk and elements > WIDENED_ELEMENTS:
                yield group, chunk
                chunk, elements = [], state.member.resident
            chunk.append(state)
        yield group, chunk
