"""The optimizer under `OptimizerStateOffloader` and the optimizers of streamed layers and shards.

It takes a step. A `StepGradients` says which gradients the step uses, a `Placement` where states and weights are, and
a `StateUpdates` carries the step out. A step that an error interrupts is untouched or has begun, see `status`; a begun
one is carried out with its own gradients and clip decision. The next call finishes an interrupted load or refresh of
masters.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from reference_impl.distributed.mesh import norm_reduction
from reference_impl.memory.closing import undo_all
from reference_impl.optimizers import checks
from reference_impl.optimizers.algorithms import MatrixAlgorithm
from reference_impl.optimizers.clip_decision import decide
from reference_impl.optimizers.formulas import matrices_of
from reference_impl.optimizers.forward_waits import forgetful
from reference_impl.optimizers.gradients import standing_on
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.module_load import count_own
from reference_impl.optimizers.parameter_state import StateParts
from reference_impl.optimizers.state_dict import SavedOptimizer
from reference_impl.optimizers.state_offload_wrapped import Wrapped, check_group
from reference_impl.optimizers.step import Failures, Status, hooked, in_turn, without_gradients
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.gradients import StepGradients
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.updates import StateUpdates


class Placement(Protocol):
    """Which elements of parameters have their states where, and where the weights live."""

    def lay_out(
        self,
        params: Sequence[tuple[torch.Tensor, int]],
        *,
        first_order: int,
        matrices: Sequence[MatrixAlgorithm | None],
    ) -> list[Member]:
        """Return members of `params`, each with its group; the first takes `first_order` in the forward."""

    def parts(self, members: Iterable[Member]) -> dict[Member, Part]:
        """Return which elements the streamed share has, of those of `members` that the CPU does not update."""

    def check_room(self, streamed: StreamedShare, parts: Mapping[Member, Part]) -> None:
        """Raise HostMemoryError unless the host has the memory for `parts`, on all ranks alike."""

    def check_unfrozen(self, params: Iterable[torch.Tensor], model: nn.Module | None) -> None:
        """Raise RuntimeError where `params`, frozen so far, cannot get states any more."""

    def has_loaded(self) -> None:
        """Hear that masters, and weights with them, were written."""


class StreamedOptimizer(SavedOptimizer):
    """One or more optimizers of torch whose states are on the host and stream through the device for their update.

    Args:
        wrapped: their groups and formula, see `wrapped_in`; this takes their place and their states.
        updates: the states and their updates.
        placement, gradients: see there.
        max_grad_norm, reduce_norm_squared: see `OptimizerStateOffloader`.
        shows_steps: see `OptimizerState`.
        closers: gets `close`, before anybody else has the optimizer.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        updates: StateUpdates,
        *,
        placement: Placement,
        gradients: StepGradients,
        max_grad_norm: float | None,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        shows_steps: bool,
        closers: list[Callable[[], None]] | None = None,
    ) -> None:
        params = [param for group in wrapped.groups for param in group["params"]]
        checks.check_clipping(max_grad_norm=max_grad_norm, updates_in_backward=False)
        self._device = checks.one_device(params)
        self._max_grad_norm = max_grad_norm
        self._reduce_norm_squared = norm_reduction(
            params, reduce_norm_squared, clips=max_grad_norm is not None
        )
        self._placement, self._gradients = placement, gradients
        self._updates: StateUpdates | None = updates
        self.grad_norm: torch.Tensor | None = None
        self._failures = Failures(self._status)
        given = [dict(each.state) for each in wrapped.optimizers]
        try:
            super().__init__(wrapped.groups, wrapped.defaults, wrapped.algorithm, shows_steps=shows_steps)
            self.param_groups, self._matrices = wrapped.groups, wrapped.matrices
            self._default_matrices = wrapped.matrices[0] if all(wrapped.matrices) else None
            self._states_of_frozen = {param: state for each in given for param, state in each.items()}
            self._admit()
            for each in wrapped.optimizers:
                self.take_place_of(each, each.param_groups)
            if closers is not None:
                closers.append(self.close)
            for each in wrapped.optimizers:
                each.state.clear()
        except BaseException as error:
            self._abandon(error)
            for each, taken in zip(wrapped.optimizers, given, strict=True):
                each.state.update(taken)
            raise

    @property
    def _open(self) -> StateUpdates:
        """The states and their updates. Raises RuntimeError when the optimizer is closed."""
        if self._updates is None:
            raise RuntimeError("the optimizer is closed; expected an open one; try constructing a new one")
        return self._updates

    @property
    def streamed(self) -> StreamedShare:
        """The share that holds all states but the CPU's.

        Raises RuntimeError when the optimizer is closed.
        """
        return self._open.streamed

    @property
    def _closed(self) -> bool:
        return self._updates is None

    def _status(self) -> Status:
        if self._updates is None:
            return "closed"
        if self._failures.first is not None:
            return "broken"
        begun = self._unwritten or self._step_is_last(is_unqueued=self._updates.streamed.is_begun)
        return "begun" if begun else "untouched"

    def _ready(self) -> None:
        """Finish a load or a refresh that an error has cut short. Raises RuntimeError where this cannot be used."""
        self._check_usable()
        self._write_rest()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this and to the wrapped optimizer, if it is one; the fraction applies to it by itself."""
        if self._states is None:
            super().add_param_group(param_group)
            return
        self._add_group(param_group)

    @in_turn
    def _add_group(self, param_group: dict[str, Any]) -> None:
        self._ready()
        is_default = matrices_of(param_group, self._default_matrices) == self._default_matrices
        self._add_with_formula(param_group, self.defaults if is_default else {})
        try:
            check_group(self._algorithms[-1], self.param_groups[-1])
            self._admit_new()
        except BaseException:
            self._take_back_group()
            raise

    @without_gradients
    def _admit(self) -> None:
        """Make the states of the trainable parameters that are new here, masters from their weights."""
        listed = [(param, i) for i, group in enumerate(self.param_groups) for param in group["params"]]
        params = [each for each in listed if each[0].requires_grad and each[0] not in self._members]
        self._check_new(param for param, _ in params)
        members = self._placement.lay_out(params, first_order=len(self._members), matrices=self._matrices)
        parts = self._placement.parts(members)
        self._placement.check_room(self.streamed, parts)
        self._open.add(members, parts)
        self._members.update({member.param: member for member in members})
        self._note_idle()
        self._admitted(members)
        for param in [member.param for member in members if member.param in self._states_of_frozen]:
            self.state[param] = self._states_of_frozen.pop(param)

    def _admit_new(self) -> None:
        self._finish(for_writing=True)
        self._admit()
        self._attach_again()

    def _admitted(self, members: Sequence[Member]) -> None:
        """Hear of new members, which have their states."""

    def _follow_groups(self) -> None:
        unfrozen = (param for param in self._idle if param.grad is not None)
        self._placement.check_unfrozen(unfrozen, None if self._waits is None else self._waits.model)
        super()._follow_groups()

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue the update with the gradients that the parameters have; the host waits for nothing.

        With a model attached its forward waits for each weight. Without one the live current stream waits for the whole
        update. Gradients stay until `zero_grad()`. After an error `status` says what became of the step; the next call
        finishes one that has begun, and takes a new one if any gradient is new.
        """
        with self._scaled_once():
            self._finish_earlier()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._take_step()
            return loss

    @in_turn
    def _finish_earlier(self) -> None:
        """Finish a load or a refresh that an error has cut short."""
        self._ready()

    @in_turn
    def _take_step(self) -> None:
        """Take a step, unless an error has told of one that has used these gradients."""
        self._check_usable()
        if self._failures.told_begun and self._used.are_all(self._members.values()):
            return
        self._step()

    def _step(self) -> None:
        """Prepare a step, begin it, and carry it out as far as nobody else waits for it."""
        self._follow_groups()
        gradients = self._gradients.to_use(self._members.values(), self._wait_for)
        if self._waits is not None:
            checks.check_used_in_time(gradients)
        self._wait_for_all()
        self._follow_writes()
        if self._waits is not None:
            self._waits.on_step(gradients)
        decision = decide(
            self._gradients.norms(gradients),
            self._device,
            reduce_norm_squared=self._reduce_norm_squared,
            max_norm=self._max_grad_norm,
            **self._take_scale(),
        )
        if decision is None:
            self.grad_norm = None
            return
        taken = self._gradients.prepare(gradients)
        self._open.prepare(
            gradients, decision, self.param_groups, arrived=taken.arrived, factors=taken.factors
        )
        standing = {**standing_on(self._members.values()), **taken.stand_ins}
        with self._beginning(standing, left_unseen=not standing):
            self._open.begin()
            self.grad_norm = decision.norm
            for member in gradients:
                member.pending = True
            self._gradients.begin(forgetful(self._wait_for) if self._model_waits else None)
            count_own(gradients)
        self.streamed.advance()
        if not self._returns_early:
            self._wait_for_all()

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Finish a step that has begun and failed, then drop the gradients or set them to zero."""
        if self._updates is not None:
            self._ready()
            if not set_to_none and self._gradients.are_read:
                self._wait_for_all()
            self._used.forget()
        super().zero_grad(set_to_none)

    @in_turn
    def _wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for the updates of `members`, and drop their gradients."""
        if self._updates is None:
            # While this waited for its turn somebody has closed it, and finished all.
            return
        # Of the checks only this one: every module of a model comes here in its forward.
        self._failures.check()
        listed, updates = list(members), self._updates
        self._refuse_written(listed, updates.is_on_its_way)
        self._seen_by_steps(lambda: updates.wait_for(listed))
        self._end_reading(listed)

    def _wait_for_all(self) -> None:
        self._wait_for([member for member in self._members.values() if member.pending])
        self._order_gathers(all_are_new=True)

    def _end_reading(self, members: Collection[Member]) -> None:
        """Note that the updates of `members` are waited for. Raises RuntimeError when a gradient was written before."""
        written = self._gradients.end(members)
        if written is not None:
            self._failures.first = RuntimeError(
                f"a gradient of shape {tuple(written.shape)} was written after step(), while the update still "
                "read it; expected it to stay until the next forward; try optimizer.synchronize() before "
                "writing, or optimizer.zero_grad()"
            )
            raise self._failures.first
        for member in members:
            member.pending = False

    @in_turn
    def synchronize(self) -> None:
        """Make the live current stream see finished weights: call it before reading them in your own code."""
        self._ready()
        self._wait_for_all()

    def refresh_written(self, params: Iterable[torch.Tensor]) -> None:
        """Make new masters of weights that the user has written where they live."""
        self._remake_masters([self._members[param] for param in params])

    def _refresh(self, members: Sequence[Member]) -> None:
        # A weight with a home changes where it is lent, and `refresh_written` is told.
        self._remake_masters([member for member in members if member.home is None])

    @in_turn
    def _remake_masters(self, members: Sequence[Member]) -> None:
        self._ready()
        self._finish(for_writing=True)
        self._write(lambda: self._open.refresh_masters(members))

    def _finish(self, *, for_writing: bool) -> None:
        """Finish the step, and block until the states are whole and, `for_writing`, nobody reads them either."""
        self._open.finish(for_writing=for_writing)
        self._end_reading(self._members.values())

    @in_turn
    def _finished(self, members: Iterable[Member]) -> StateParts:
        self._check_usable()
        self._wait_for([member for member in members if member.pending])
        self._order_gathers(all_are_new=False)
        return self._open

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Return a consistent snapshot, on the CPU, in the layout of the wrapped optimizer.

        Parameters that are not fp32 have their `master_param` too.
        """
        self._ready()
        self._finish(for_writing=False)
        return super().state_dict()

    def _load(self, groups: list[dict[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        self._ready()
        self._finish(for_writing=True)
        super()._load(groups, states)
        self._placement.has_loaded()

    def _finish_for_close(self) -> None:
        # Again: memory of a failed call is free by then, and a step cannot be finished once this is closed.
        for is_last in (False, True):
            if self._failures.first is None:
                try:
                    self._ready()
                    self._wait_for_all()
                    return
                except Exception:
                    if is_last or self._failures.first is not None:
                        raise

    def _let_go(self) -> None:
        undo_all(self._hooks)
        if self._updates is not None:
            self._unclosed += self._updates.closes()
        self._updates = None
        self._unwritten.clear()
        self._gradients.forget()

    def _check_usable(self) -> None:
        super()._check_usable()
        self._failures.check()
        self._device.refuse_capture("optimizer state offload")
