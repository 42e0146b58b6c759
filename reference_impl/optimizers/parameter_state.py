# SPDX-License-Identifier: Apache-2.0
"""`optimizer.state`: each parameter's state by name, read and written where it lives.

A parameter's state may stand in several buckets and partly on the device. Here it looks like the entries of any
`torch.optim.Optimizer.state`: code without knowledge of offloading (distributed checkpoints, trainers, Megatron's
distributed optimizer) finds its expected mapping. Nothing is stored here. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from reference_impl.distributed.mesh import local_of, shard_like
from reference_impl.optimizers.algorithms import Algorithm, AnyAlgorithm
from reference_impl.optimizers.guarded import GuardedTensor
from reference_impl.optimizers.layout import MASTER, STEP, Member
from reference_impl.optimizers.saved_checks import check_state
from reference_impl.optimizers.step import Failures, in_turn
from reference_impl.optimizers.writes.module_load import note_loaded, set_weight


class StateParts(Protocol):
    """Where the states of members are. `name` is a moment or `master_param`."""

    def steps(self, member: Member) -> Sequence[torch.Tensor]:
        """Return a member's step counters (fp32, 0-dim), all equal, the CPU's first."""

    def views(self, member: Member, name: str) -> Iterable[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 view) of each part that can be written in place."""

    def copies(self, member: Member, name: str) -> Iterable[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part that streams."""

    def write_streamed(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace the streamed parts by parts of `value` (fp32, of the member's shape)."""

    def follow_weight(self, member: Member) -> None:
        """Set the streamed part of an fp32 parameter's master to the parameter: they are the same."""

    def rounded(self, member: Member, master: torch.Tensor) -> torch.Tensor:
        """Return `master` as the weight is rounded from it."""

    def note_weight(self, member: Member) -> None:
        """Note that the master equals the weight now: a later write is seen."""

    def written_uncounted(self, members: Sequence[Member]) -> Iterable[Member]:
        """Return the `members` with masters on the CPU and weights written past every counter."""

    def written(self, members: Sequence[Member]) -> Iterable[Member]:
        """Return the `members` with weights written past every counter; waits for the device.

        Masters that stay on the device follow at once.
        """


# Waits until no update of the given members runs, and returns where their states are; RuntimeError when closed.
FinishedParts = Callable[[Iterable[Member]], StateParts]


class WrittenBack(GuardedTensor):
    """A copy of a state that stands in several places or streams: values written into it are written to all of them.

    Reading shows the state as it was when it was asked for; a write begins with the present state.
    """

    whole: torch.Tensor
    stored: StoredState
    state: str

    @classmethod
    def of(
        cls, whole: torch.Tensor, stored: StoredState, name: str, view: torch.Tensor | None = None
    ) -> WrittenBack:
        """Guard `whole`, a copy of the state `name`, or a `view` of it."""
        made = cls.over(whole if view is None else view)
        made.whole, made.stored, made.state = whole, stored, name
        return made

    def before_write(self) -> None:
        """Fetch the state: a step may have been taken since."""
        self.whole.copy_(local_of(self.stored.copied(self.state)))

    def after_write(self) -> None:
        """Write the state to all its places."""
        self.stored[self.state] = self.whole

    def guarding(self, view: torch.Tensor) -> WrittenBack:
        """Guard a view in the same way."""
        return WrittenBack.of(self.whole, self.stored, self.state, view)


class StoredState(MutableMapping[str, torch.Tensor]):
    """The state of one parameter where it lives: `ParameterState` says how it is read and written.

    Args:
        member: the parameter.
        names: the states that it shows, in order; `master_param` may be written even if it is not among them.
        failures: has the turn for copying and writing states: a streamed state may be on its way.
        passed_over: whether writing an unknown name does nothing, instead of raising KeyError. finished: see
            `FinishedParts`.
    """

    def __init__(
        self,
        member: Member,
        names: tuple[str, ...],
        finished: FinishedParts,
        failures: Failures,
        *,
        passed_over: bool,
    ) -> None:
        self._member = member
        self._names = names
        self._finished = finished
        self._failures = failures
        self._passed_over = passed_over

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that a state_dict has."""
        return iter(self._names)

    def __len__(self) -> int:
        """Count the names."""
        return len(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a state once running updates of the parameter are done."""
        if name not in self._names:
            raise KeyError(name)
        parts = self._finished([self._member])
        if name == STEP:
            steps = parts.steps(self._member)
            return steps[0] if len(steps) == 1 else WrittenBack.of(steps[0].clone(), self, name)
        views, local = list(parts.views(self._member, name)), self._member.param_local
        if len(views) == 1 and views[0][1].numel() == local.numel():
            return shard_like(self._member.param, views[0][1].as_strided(local.shape, self._member.stride))
        return shard_like(self._member.param, WrittenBack.of(local_of(self.copied(name)), self, name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a state, converted to fp32, to wherever it stands; KeyError for a name that is not known."""
        # Before it is this thread's turn: others than the one that steps are refused.
        self._finished([self._member])
        self._write(name, value)

    @in_turn
    def _write(self, name: str, value: Any) -> None:
        if name not in (*self._names, STEP, MASTER):
            if self._passed_over:
                return
            raise KeyError(
                f"{name!r} is not a state of this optimizer; expected one of {self._names}; try keeping it elsewhere"
            )
        parts = self._finished([self._member])
        if name == STEP:
            for step in parts.steps(self._member):
                step.fill_(float(value))
            return
        value = value.to_local() if isinstance(value, DTensor) else value
        whole = self._like(device=value.device)
        whole.copy_(value.expand(whole.shape))
        if self.write_in_place(name, whole) < whole.numel():
            parts.write_streamed(self._member, name, whole)

    def write_in_place(self, name: str, whole: torch.Tensor) -> int:
        """Write the parts of a state that do not stream; returns how many elements they have."""
        written = 0
        for start, part in self._finished([self._member]).views(self._member, name):
            part.copy_(self._member.flat(whole)[start : start + part.numel()])
            written += part.numel()
        return written

    def __delitem__(self, name: str) -> None:
        """Refuse: every parameter has all of its states."""
        raise TypeError(f"{name!r} cannot be removed from a parameter's state; try writing zeros to it")

    def copied(self, name: str) -> torch.Tensor:
        """Return a state as a tensor of its own, on the CPU where any of it is there."""
        self._finished([self._member])
        return self._copied(name)

    @in_turn
    def _copied(self, name: str) -> torch.Tensor:
        parts = self._finished([self._member])
        if name == STEP:
            return parts.steps(self._member)[0].clone()
        views, param = list(parts.views(self._member, name)), self._member.param
        streams = sum(part.numel() for _, part in views) < self._member.param_local.numel()
        on_host = streams or any(part.device != param.device for _, part in views)
        whole = self._like(device=torch.device("cpu") if on_host else param.device)
        for start, part in (*views, *parts.copies(self._member, name)):
            self._member.flat(whole)[start : start + part.numel()].copy_(part)
        return shard_like(self._member.param, whole)

    def _like(self, *, device: torch.device) -> torch.Tensor:
        return torch.empty_like(self._member.param_local, dtype=torch.float32, device=device)


class ParameterState(MutableMapping[str, Any]):
    """One parameter's `step`, moments and, where it has one of its own, `master_param`.

    A state in one place is returned as a view of it, in the parameter's shape. A state in several places (a parameter
    split between buckets or tiers), or a streamed one, is returned as a copy, see `WrittenBack`. Assigning, or writing
    into either, writes to all places; a name that is not known raises KeyError, and nothing can be removed.

    Made of any other mapping it only holds those values, as trainers expect who rebuild an entry with its type;
    `optimizer.state[param] = entry` then writes them.
    """

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._values: MutableMapping[str, Any] = values if isinstance(values, StoredState) else dict(values)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that a state_dict has."""
        return iter(self._values)

    def __len__(self) -> int:
        """Count the names."""
        return len(self._values)

    def __getitem__(self, name: str) -> Any:
        """Return a state once running updates of the parameter are done."""
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a state to wherever it stands."""
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        """Remove a value that is only held here; TypeError for a state of the optimizer."""
        del self._values[name]

    def __repr__(self) -> str:
        """Show the names only: values may have to be fetched."""
        return f"{type(self).__name__}({', '.join(self)})"


class OptimizerState(Mapping[torch.Tensor, ParameterState]):
    """Parameter → `ParameterState`, for every parameter that has taken a step.

    With `lists_everyone` every trained parameter is in it, with or without a step.

    Args:
        members: the trained parameters; more may be added later.
        algorithm: names the states of members that no formula of matrices updates.
        finished: see `FinishedParts`.
        failures: see `StoredState`.
        shows_steps: also where torch's class keeps no `step`: the noise of rounded moments depends on it.
        masters_of_all: fp32 parameters, their own masters, show a `master_param` too.
        passes_over_unknown: whether writing a name that is not known does nothing, instead of raising KeyError.
        sets_weights: whether weights become loaded masters at once. Megatron loads empty memory, and writes later.
    """

    def __init__(
        self,
        members: Mapping[torch.Tensor, Member],
        algorithm: Algorithm,
        finished: FinishedParts,
        failures: Failures,
        *,
        shows_steps: bool,
        masters_of_all: bool,
        passes_over_unknown: bool,
        sets_weights: bool,
    ) -> None:
        self.members = members
        self.algorithm = algorithm
        self.lists_everyone = False
        # Loaded states of parameters that are no members yet.
        self.waiting: dict[torch.Tensor, Mapping[str, Any]] = {}
        self._finished = finished
        self._failures = failures
        self._shows_steps = shows_steps
        self._masters_of_all = masters_of_all
        self._passed_over = passes_over_unknown
        self._sets_weights = sets_weights

    def __getitem__(self, param: torch.Tensor) -> ParameterState:
        """Return a parameter's state, also before its first step."""
        return ParameterState(self._stored(param))

    def _algorithm_of(self, member: Member) -> AnyAlgorithm:
        return member.matrices or self.algorithm

    def _stored(self, param: torch.Tensor, finished: FinishedParts | None = None) -> StoredState:
        member = self.members[param]
        shows_master = param.dtype != torch.float32 or self._masters_of_all
        algorithm = self._algorithm_of(member)
        names = (
            *([STEP] if self._shows_steps or algorithm.counts_steps else []),
            *algorithm.moments,
            *([MASTER] if shows_master else []),
        )
        finished = finished or self._finished
        return StoredState(member, names, finished, self._failures, passed_over=self._passed_over)

    def __setitem__(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Replace a parameter's state; ValueError, before anything changes, for one that cannot be held exactly."""
        self.write(
            param, self.checked(f"the state of a parameter of shape {tuple(param.shape)}", param, values)
        )

    def __delitem__(self, param: torch.Tensor) -> None:
        """Let a parameter start anew: no step, moments zero, and its master is the parameter."""
        self.write(param, {})

    def clear(self) -> None:
        """Let all parameters start anew."""
        self.replace({})

    def replace(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Replace all states; states of parameters missing in `states` start anew. Raises as `__setitem__`."""
        checked = {
            param: self.checked(f"the state of a parameter of shape {tuple(param.shape)}", param, values)
            for param, values in states.items()
        }
        self.waiting = {}
        for param in self.members:
            self.write(param, checked.get(param, {}))

    def take_waiting(self, members: Iterable[Member]) -> None:
        """Give new `members` their waiting states; masters follow the weights."""
        for member in [each for each in members if each.param in self.waiting]:
            values = self.waiting[member.param]
            if MASTER in values and member.dtype != torch.float32:
                values = {**values, MASTER: self._following(member, values[MASTER])}
            self[member.param] = values
            del self.waiting[member.param]

    def checked(self, label: str, param: torch.Tensor, values: Any) -> dict[str, Any]:
        """Return `values` as `write` takes them, see `check_state`; KeyError for a parameter that is not trained."""
        member = self.members[param]
        algorithm = self._algorithm_of(member)
        if self._passed_over and isinstance(values, Mapping):
            known = (STEP, *algorithm.moments, MASTER)
            values = {name: value for name, value in values.items() if name in known}
        return check_state(label, values, param, algorithm)

    def write(
        self, param: torch.Tensor, values: Mapping[str, Any], *, finished: FinishedParts | None = None
    ) -> None:
        """Replace a parameter's state by `checked` values; states that they lack start anew.

        Whoever knows that no update runs says where states are (`finished`).
        """
        finished = finished or self._finished
        finished([self.members[param]])
        self._write(param, values, finished)

    @in_turn
    def _write(self, param: torch.Tensor, values: Mapping[str, Any], finished: FinishedParts) -> None:
        target, member = self._stored(param, finished), self.members[param]
        target[STEP] = values.get(STEP, 0)
        for name in self._algorithm_of(member).moments:
            target[name] = values.get(name, torch.zeros(()))
        is_set = False
        if MASTER in values:
            # In front: a packed master then writes its weight as it rounds.
            is_set = self._sets_weights and set_weight(member, values[MASTER])
            target[MASTER] = values[MASTER]
        elif param.dtype == torch.float32:
            # It is its own master, and only copies have to follow it: the CPU's, and the streamed part of a split one.
            target.write_in_place(MASTER, member.weight)
            finished([member]).follow_weight(member)
        else:
            target[MASTER] = member.weight
        note_loaded(member, values.get(MASTER), is_set=is_set)
        finished([member]).note_weight(member)

    @torch.no_grad()
    def follow(self, member: Member) -> None:
        """Set a master to the weight, except elements where the weight is the master rounded."""
        target = self._stored(member.param)
        if member.dtype == torch.float32:
            target.write_in_place(MASTER, member.weight)
            self._finished([member]).follow_weight(member)
        else:
            target[MASTER] = self._following(member, target.copied(MASTER))
        member.note_weight()
        self._finished([member]).note_weight(member)

    def _following(self, member: Member, master: torch.Tensor) -> torch.Tensor:
        """Return `master`, or the weight where this is not the master rounded."""
        weight = member.weight.to(master.device)
        whole = torch.empty_like(weight, dtype=torch.float32).copy_(local_of(master))
        is_same = self._finished([member]).rounded(member, whole) == weight
        return torch.where(is_same, whole, weight.to(whole.dtype))

    def packed(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies of a parameter's states."""
        stored = self._stored(param)
        return {name: stored.copied(name) for name in stored}

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over parameters with a step; the device's counters are read at once, with one wait."""
        listed = list(self.members.values())
        stepped = set(listed) if self.lists_everyone else self._stepped(listed)
        return (member.param for member in listed if member in stepped)

    def __len__(self) -> int:
        """Count them."""
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        """Return whether iterating would yield `param`; waits for no other parameter."""
        member = self.members.get(param) if isinstance(param, torch.Tensor) else None
        return member is not None and (self.lists_everyone or bool(self._stepped([member])))

    def _stepped(self, members: Sequence[Member]) -> set[Member]:
        """Return the `members` that have taken a step."""
        parts = self._finished(members)
        counters: defaultdict[torch.device, list[tuple[Member, torch.Tensor]]] = defaultdict(list)
        for member in members:
            step = parts.steps(member)[0]
            counters[step.device].append((member, step))
        found: set[Member] = set()
        for listed in counters.values():
            counts = torch.stack([step for _, step in listed]).tolist()
            found.update(member for (member, _), count in zip(listed, counts, strict=True) if count > 0)
        return found
