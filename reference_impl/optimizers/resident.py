# SPDX-License-Identifier: Apache-2.0
"""The share of the state that stays on the device, updated by the fused GPU kernel.

Masters and moments are fp32; an fp32 parameter is its own master unless the CPU updates another part of it. The
update runs in chunks, and within a member that is longer in parts of it, so that the fp32 copy of the gradients never
takes more than `WIDENED_ELEMENTS`. The copy is allocated when the step is prepared: one buffer for all chunks, one
after the other. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch

from offload_arithmetic.division import aligned
from offload_arithmetic.sizes import WIDENED_ELEMENTS
from reference_impl.device import REACHED, Device
from reference_impl.memory.absent import is_away
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.gradients.clip_decision import ClipDecision
from reference_impl.optimizers.layout import MASTER, Member, NewWeights
from reference_impl.optimizers.writes.masters import DeviceMasters


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
    """The states of all members with resident elements; masters follow weights that others write, or not."""

    def __init__(self, device: Device, algorithm: Algorithm, *, follows_writes: bool = True) -> None:
        self._device = device
        self._written = DeviceMasters(device) if follows_writes else None
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
        if self._written is not None:
            self._written.expect(weight.dtype)

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

    def prepare(
        self,
        each_gradients: Iterable[Mapping[Member, torch.Tensor]],
        groups: Sequence[Mapping[str, Any]],
        decision: ClipDecision | None,
    ) -> list[ResidentUpdate]:
        """Prepare one update for each mapping, of the members in it that are here; they run one after the other.

        Gradients are laid out like their parameters. A member that the CPU updates in part keeps its old weight until
        its other part is published.
        """
        updates = []
        for gradients in each_gradients:
            states = [self._states[member] for member in gradients if member in self._states]
            for state in states:
                state.follow()
            self._take_over(states)
            given = {s: s.member.flat(gradients[s.member])[: s.member.resident] for s in states}
            updates.append(ResidentUpdate(self._device, self._algorithm, given, groups, decision))
        self._share_scratch(updates)
        return updates

    @torch.no_grad()
    def take_over(self, members: Iterable[Member]) -> None:
        """Let masters of `members` take over writes of other code; no update may be running on them."""
        states = [self._states[member] for member in members if member in self._states]
        for state in states:
            state.follow()
        # Parked: kernels would read address 0, and weights on the host are compared there. No step comes here.
        away = {state for state in states if is_away(state.weight) or is_away(state.master)}
        self._take_over(state for state in states if state not in away)
        for state in _with_masters(away) if self._written is not None else ():
            _take_over_on_host(state)

    def _take_over(self, states: Iterable[ResidentState]) -> None:
        """Let masters take over other code's writes to their weights, also uncounted ones."""
        apart = _with_masters(states)
        if self._written is None or not apart:
            return
        whole = [state for state in apart if state.weight.dtype == torch.float32]
        if whole:
            # Equal where nobody has written.
            torch._foreach_copy_([state.master for state in whole], [state.weight for state in whole])
        rounded = [state for state in apart if state.weight.dtype != torch.float32]
        self._written.take_over_all([s.weight for s in rounded], [s.master for s in rounded])

    def _share_scratch(self, updates: Sequence[ResidentUpdate]) -> None:
        # Of empty shards, too: their views are of a tensor on the device.
        longest = max((update.scratch_numel for update in updates), default=0)
        scratch = torch.empty(longest, dtype=torch.float32, device=self._device.torch_device)
        for update in updates:
            update.share(scratch)

    def new_weights(self, member: Member) -> Iterator[NewWeights]:
        """Yield the new weights of a split member that its parameter does not hold yet."""
        state = self._states.get(member)
        if state is not None and state.master is not state.weight:
            yield NewWeights(state.weight, state.master, REACHED)

    def parts(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of the part of a moment or `master_param` that is here."""
        state = self._states.get(member)
        if state is not None:
            # A write to it must not reach memory that another model may have by now.
            state.follow()
            yield 0, state.master if name == MASTER else state.moments[self._algorithm.moments.index(name)]

    def steps(self, member: Member) -> Iterator[torch.Tensor]:
        """Yield the step counter of a member that is here, fp32, 0-dim on the device."""
        if member in self._states:
            yield self._states[member].step


class ResidentUpdate:
    """The update of some states in one step, which `run` queues; copies of gradients take `scratch_numel` elements.

    Args:
        device: where they are.
        algorithm: the formula.
        gradients: the gradient of each state's elements, flat.
        groups: the hyper-parameters, by group.
        decision: see `StepPlan`.
    """

    def __init__(
        self,
        device: Device,
        algorithm: Algorithm,
        gradients: Mapping[ResidentState, torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        decision: ClipDecision | None,
    ) -> None:
        self._launch = device.launch
        self._algorithm = algorithm
        self._groups = groups
        self._grad_scale = None if decision is None else decision.grad_scale
        self._found_inf = None if decision is None else decision.found_inf
        self._chunks = [
            (group, states, [self._part(states, gradients, part) for part in _parts(states)])
            for group, states in _chunks(list(gradients))
        ]
        self.scratch_numel = max(
            (sum(part.sizes) for _, _, parts in self._chunks for part in parts), default=0
        )

    def _part(
        self,
        states: Sequence[ResidentState],
        gradients: Mapping[ResidentState, torch.Tensor],
        where: slice | None,
    ) -> _Part:
        found = _cut([gradients[state] for state in states], where)
        # The kernel writes the scaled gradient back, so it gets a copy also where none is needed to widen.
        is_scaled = self._grad_scale is not None
        copied = [i for i, each in enumerate(found) if is_scaled or each.dtype is not torch.float32]
        numels = [found[i].numel() for i in copied]
        return _Part(where, found, copied, [size for n in numels for size in (n, aligned(n) - n)], [])

    def share(self, scratch: torch.Tensor) -> None:
        """Let gradients be copied to `scratch`."""
        for part in (part for _, _, parts in self._chunks for part in parts):
            sizes = [*part.sizes, scratch.numel() - sum(part.sizes)]
            part.copies[:] = scratch.split(sizes)[:-1:2]

    def run(self) -> None:
        """Queue the update on the live current stream; allocates nothing."""
        for group, states, parts in self._chunks:
            steps = [state.step for state in states]
            self._launch(torch._foreach_add_, steps, 1)
            for part in parts:
                self._launch(
                    self._algorithm.update,
                    _cut([state.master for state in states], part.where),
                    self._widened(part),
                    [
                        _cut([state.moments[index] for state in states], part.where)
                        for index in range(len(self._algorithm.moments))
                    ],
                    steps,
                    self._groups[group],
                    grad_scale=self._grad_scale,
                    found_inf=self._found_inf,
                )
            if self._found_inf is not None:
                self._launch(torch._foreach_sub_, steps, [self._found_inf] * len(steps))
            apart = [s for s in states if s.master is not s.weight and not s.member.pieces]
            if apart:
                self._launch(
                    torch._foreach_copy_, [state.weight for state in apart], [state.master for state in apart]
                )

    def _widened(self, part: _Part) -> list[torch.Tensor]:
        """Return a part of each gradient in fp32, copied to scratch if necessary."""
        if not part.copied:
            return part.gradients
        widened = list(part.gradients)
        for index, copy in zip(part.copied, part.copies, strict=True):
            widened[index] = copy
        # One launch for many of them.
        self._launch(torch._foreach_copy_, part.copies, [part.gradients[index] for index in part.copied])
        return widened


class _Part(NamedTuple):
    """The elements updated in one launch of the kernel: the range `where` of each state of a chunk, or all of them.

    The `copied` ones of the `gradients`, by index, go to `copies` in scratch: `sizes` elements, each with a gap behind
    it.
    """

    where: slice | None
    gradients: list[torch.Tensor]
    copied: list[int]
    sizes: list[int]
    copies: list[torch.Tensor]


def _with_masters(states: Iterable[ResidentState]) -> list[ResidentState]:
    """Return the `states` with masters beside the weights; these follow the weights."""
    return [s for s in states if s.master is not s.weight and not s.member.is_apart]


def _take_over_on_host(state: ResidentState) -> None:
    """Let a master take over writes of others to its weight where one of them is parked, and read on the host."""
    weight, master = state.weight.cpu(), state.master.cpu()
    is_same = master.to(weight.dtype) == weight
    state.master.copy_(torch.where(is_same, master, weight.to(torch.float32)))


def _parts(states: Iterable[ResidentState]) -> list[slice | None]:
    """Return the parts in which members of a chunk are updated: one, but for a long member."""
    longest = max(state.member.resident for state in states)
    if longest <= WIDENED_ELEMENTS:
        # A member without elements is counted, too.
        return [None]
    return [slice(start, start + WIDENED_ELEMENTS) for start in range(0, longest, WIDENED_ELEMENTS)]


def _cut(flats: list[torch.Tensor], part: slice | None) -> list[torch.Tensor]:
    """Return `flat[part]` of each, without a view if that is all of it."""
    return flats if part is None else [flat[part] for flat in flats]


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
