"""The one way in which a step is taken: all optimizers here are this one, put together of different parts.

A `Placement` says which states are where, and where weights live. `StepGradients` says which gradients a step uses.
`Shares` holds the states, and carries the step out. A step is prepared, which may raise and changes nothing, and begun;
what an error has done to it, `status` says. One that backward has begun, or a load that an error has cut short, is
finished by the next call.

Explained in docs/optimizer-offloading.md and docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from reference_impl.distributed.mesh import norm_reduction
from reference_impl.memory.closing import undo_all
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.optimizers import checks
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.formulas import matrices_of
from reference_impl.optimizers.forward_waits import forgetful
from reference_impl.optimizers.gradients.clip_decision import decide
from reference_impl.optimizers.gradients.of_step import StepGradients
from reference_impl.optimizers.gradients.used import standing_on
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.module_load import count_own
from reference_impl.optimizers.parameter_state import StateParts
from reference_impl.optimizers.placement import Placement
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.state_dict import SavedOptimizer
from reference_impl.optimizers.state_offload_wrapped import Wrapped, check_group
from reference_impl.optimizers.step import (
    Failures,
    Status,
    StepPlan,
    as_one,
    hooked,
    in_turn,
    snapshot,
    without_gradients,
)
from reference_impl.optimizers.writes.awaited import let_wait
from reference_impl.optimizers.writes.held import HeldWeights

if TYPE_CHECKING:
    from reference_impl.optimizers.streamed.share import StreamedShare


class SteppedOptimizer(SavedOptimizer):
    """An optimizer over `Shares`. A subclass makes the parts, and calls `_start` with them.

    Args:
        params, defaults, algorithm: see `SavedOptimizer`.
        max_grad_norm: clip the global norm exactly.
        reduce_norm_squared: given this rank's squared norm (0-dim fp32), returns that over all ranks.
        updates_in_backward: some gradients are used before all are known, so that none can be clipped.
        shows_steps, masters_of_all, passes_over_unknown: see `OptimizerState`.
    """

    # Megatron's form trains parameters without a gradient.
    _trains_frozen = False

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        algorithm: Algorithm,
        *,
        max_grad_norm: float | None,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        updates_in_backward: bool = False,
        shows_steps: bool,
        masters_of_all: bool = False,
        passes_over_unknown: bool = False,
    ) -> None:
        checks.check_clipping(max_grad_norm=max_grad_norm, updates_in_backward=updates_in_backward)
        self._max_grad_norm = max_grad_norm
        self._failures = Failures(self._status)
        self._shares: Shares | None = None
        self._refused_in_between = False
        self._held = HeldWeights()
        # Of wrapped optimizers, the states of parameters that have none here yet.
        self._states_of_frozen: dict[torch.Tensor, Any] = {}
        self.grad_norm: torch.Tensor | None = None
        super().__init__(
            params,
            defaults,
            algorithm,
            shows_steps=shows_steps,
            masters_of_all=masters_of_all,
            passes_over_unknown=passes_over_unknown,
        )
        everything = [param for group in self.param_groups for param in group["params"]]
        self._device = checks.one_device(everything)
        self._reduce_norm_squared = norm_reduction(
            everything, reduce_norm_squared, clips=max_grad_norm is not None
        )

    def _start(
        self,
        shares: Shares,
        placement: Placement,
        gradients: StepGradients,
        *,
        wrapped: Wrapped | None = None,
        closers: list[Callable[[], None]] | None = None,
    ) -> None:
        """Work with these parts from now on, and make the states of all parameters; give all back where that raises.

        Of optimizers that are `wrapped` this takes the place, the groups and the states. `closers` gets `close`, before
        anybody else has the optimizer.
        """
        self._shares, self._placement, self._gradients = shares, placement, gradients
        optimizers = () if wrapped is None else wrapped.optimizers
        if wrapped is not None:
            self._group_counts = wrapped.group_counts
        given = [dict(each.state) for each in optimizers]
        try:
            if wrapped is not None:
                self.param_groups, self._matrices = wrapped.groups, wrapped.matrices
                self._default_matrices = wrapped.matrices[0] if all(wrapped.matrices) else None
            self._states_of_frozen = {param: state for each in given for param, state in each.items()}
            self._admit()
            for each in optimizers:
                self.take_place_of(each, each.param_groups)
            if closers is not None:
                closers.append(self.close)
            for each in optimizers:
                each.state.clear()
        except BaseException as error:
            self._abandon(error)
            for each, states in zip(optimizers, given, strict=True):
                each.state.update(states)
            raise

    @property
    def _open(self) -> Shares:
        """The states and their updates. Raises RuntimeError when the optimizer is closed."""
        if self._shares is None:
            raise RuntimeError("the optimizer is closed; expected an open one; try constructing a new one")
        return self._shares

    @property
    def streamed(self) -> StreamedShare:
        """The share whose states stream, where there is one. Raises RuntimeError when the optimizer is closed."""
        return self._open.streamed

    @property
    def gradients_leave(self) -> bool:
        """Whether gradients lose their values in backward, so that nobody can read or change them before `step()`."""
        return self._gradients.may_leave

    @property
    def _closed(self) -> bool:
        return self._shares is None

    def _status(self) -> Status:
        if self._shares is None:
            return "closed"
        if self._failures.first is not None:
            return "broken"
        begun = self._gradients.begun is not None or bool(self._unwritten)
        if begun or self._step_is_last(is_unqueued=self._shares.is_unqueued):
            return "begun"
        return "untouched"

    @without_gradients
    def _admit(self) -> None:
        """Make the states of the trainable parameters that are new here, masters from their weights."""
        listed = [(param, i) for i, group in enumerate(self.param_groups) for param in group["params"]]
        checks.one_device(param for param, _ in listed)
        trained = [each for each in listed if each[0].requires_grad or self._trains_frozen]
        params = [each for each in trained if each[0] not in self._members]
        self._check_new(param for param, _ in params)
        members = self._placement.lay_out(params, before=self._members.values(), matrices=self._matrices)
        parts = self._placement.parts(members)
        self._placement.check_room(self._open, members, parts)
        with self._held.learning(members):
            self._open.add(members, parts)
        with deferred_interrupts():
            self._members.update((member.param, member) for member in members)
            self._admitted(members)
        self._note_idle()
        for param in [member.param for member in members if member.param in self._states_of_frozen]:
            self.state[param] = self._states_of_frozen.pop(param)

    def _admit_new(self) -> None:
        self._admit()
        self._attach_again()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this and to the wrapped optimizer, if it is one; the fraction applies to it by itself."""
        if self._shares is None:
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

    def _admitted(self, members: Sequence[Member]) -> None:
        """Hear of new members, which have their states."""

    def _follow_groups(self) -> None:
        unfrozen = (param for param in self._idle if param.grad is not None)
        self._placement.check_unfrozen(unfrozen, None if self._waits is None else self._waits.model)
        super()._follow_groups()

    def _ready(self) -> None:
        """Finish a load, or the rest of a step. Raises RuntimeError where this cannot be used."""
        self._check_usable()
        self._write_rest()
        rest = self._gradients.rest
        if rest is not None:
            rest.use(self._take, has_begun=lambda: self._gradients.rest is None)
            self._failures.told_begun = True

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients of the last backward.

        With a model attached, returns when the work is queued; its forward waits for each weight. After an error
        `status` says whether the step has begun; one that has is finished by the next call, which takes another
        step only where there are new gradients.
        """
        with self._scaled_once():
            self._finish_earlier(has_closure=closure is not None)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._take_step()
            return loss

    def _step_has_raised(self, closure: Callable[[], Any] | None = None, *, has_rest: bool = False) -> None:
        """Note the rest of a step that backward has begun, where a hook in front of `step()` has kept it from that."""
        if closure is None:
            self._gradients.note_rest(self._members.values(), checks_used=False)
        rest = self._gradients.rest
        if rest is not None:
            # First, because what follows may fail as the step has.
            rest.be_awaited()
        super()._step_has_raised(closure, has_rest=has_rest or rest is not None)

    @in_turn
    def _finish_earlier(self, *, has_closure: bool) -> None:
        """Finish the step or the load before; where the next one `has_closure`, that runs first."""
        # From here on no call refuses to finish an update that backward has begun, whatever is raised below.
        had_rest = self._gradients.rest is not None
        if not has_closure:
            self._gradients.note_rest(self._members.values())
        self._check_usable()
        if had_rest or self._unwritten:
            self._ready()

    @in_turn
    def _take_step(self) -> None:
        """Take a step, unless an error has told of one that has used these gradients."""
        self._check_usable()
        if self._failures.told_begun and self._used.are_all(self._members.values()):
            return
        self._step()

    def _step(self) -> None:
        self._follow_groups()
        # Before the rest is noted: this waits for updates, which would carry that out.
        self._follow_writes()
        self._gradients.note_rest(self._members.values())
        self._take()

    def _take(self) -> None:
        """Prepare a step with the gradients that there are, and begin it."""
        begun = self._gradients.begun
        gradients = self._gradients.to_use(self._members.values(), self._wait_in_step)
        plan = self._plan(gradients)
        members = [*(() if begun is None else begun.arrivals), *gradients]
        if plan.decision is None and not members:
            self.grad_norm = None
            return
        prepared = self._gradients.prepare(gradients, returns_early=self._returns_early)
        self._open.prepare(plan, gradients, arrived=prepared.arrived, factors=prepared.factors, begun=begun)
        standing = {**standing_on(self._members.values()), **prepared.stand_ins}
        if self._returns_early and self._follows_writes:
            self._held.note(gradients)
        if self._waits is not None:
            self._waits.on_step(members)
        with self._beginning(standing, left_unseen=not standing):
            self._gradients.begin(forgetful(self._wait_for) if self._model_waits else None)
            self._open.begin()
            self._refused_in_between = False
            norm = None if plan.decision is None else plan.decision.norm
            self.grad_norm = norm if self._gradients.measures else None
            count_own(members)
        self._wait_in_step(self._held.take_noted()) if self._returns_early else self._wait_for_all()

    @contextmanager
    def _beginning(self, standing: Mapping[Member, torch.Tensor], *, left_unseen: bool) -> Iterator[None]:
        """Begin a step inside, as one or not at all, with gradients that are `standing`, and those that left unseen."""
        with deferred_interrupts():
            self._step_begins(standing, left_unseen=left_unseen)
            with as_one():
                yield
            if self._returns_early:
                self._let_users_wait(self._members.values())

    def _let_users_wait(self, members: Iterable[Member]) -> None:
        """Let whoever uses a weight that is on its way wait for it, but for compiled code, which knows the classes."""
        if self._waits is None or not self._waits.has_compiled:
            let_wait((member.param for member in members if member.pending), self)

    def _plan(self, gradients: Mapping[Member, torch.Tensor]) -> StepPlan:
        """Decide over all gradients, on the device; where backward has begun to use them, it was decided before."""
        if self._gradients.begun is not None:
            plan = self._gradients.begun.plan
            plan.check_unchanged(self.param_groups, self.defaults)
            return plan
        decision = decide(
            self._gradients.norms(gradients),
            self._device,
            reduce_norm_squared=self._reduce_norm_squared,
            max_norm=self._max_grad_norm,
            **self._take_scale(),
        )
        return StepPlan(snapshot(self.param_groups), decision)

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, those that have left and were not used included, or set them to zero.

        A step that has begun is finished first. Raises RuntimeError where backward has begun to use gradients and no
        step() came since.
        """
        if self._shares is not None:
            self._check_between_steps(checks.update_begun)
            self._ready()
            self._used.forget()
            self._gradients.drop(self._members.values())
            if not set_to_none:
                self._wait_in_step(self._gradients.being_read(self._members.values()))
        super().zero_grad(set_to_none)

    @in_turn
    def _wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for the updates of `members`."""
        if self._shares is None:
            # While this waited for its turn somebody has closed it, and finished all.
            return
        begun = self._gradients.begun
        if self._is_reader and begun is not None and begun.queued and self._gradients.rest is None:
            # Of the CPU's share weights stay old until step(), or are new: nothing can be waited for meanwhile.
            return
        # Of the checks only these: every module of a model comes here in its forward.
        self._failures.check()
        self._shares.check()
        if self._unwritten or self._gradients.rest is not None:
            self._ready()
        self._wait(members)

    def _wait_for_use(self, member: Member) -> None:
        """Wait as `_wait_for`, for a use outside a forward. Raises RuntimeError between backward and `step()`."""
        if not self._is_reader:
            self._check_between_steps(lambda: checks.used_in_between(member))
        self._wait_for([member])

    def _is_on_its_way(self, member: Member) -> bool:
        return self._open.is_on_its_way(member)

    def _wait(self, members: Iterable[Member]) -> None:
        listed = list(members)
        self._refuse_written(listed)
        self._seen_by_steps(lambda: self._open.wait_for(listed))
        self._end_reading(listed)

    def _wait_in_step(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for some updates of the step before."""
        listed = list(members)
        if listed:
            self._wait(listed)
            self._order_gathers(all_are_new=not any(member.pending for member in self._members.values()))

    def _wait_for_all(self) -> None:
        self._wait([member for member in self._members.values() if member.pending])
        self._order_gathers(all_are_new=True)
        self._open.drain()

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
            member.has_arrived()

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

    def _finish_for_saving(self, *, for_writing: bool) -> None:
        self._check_between_steps(checks.saved_in_between)
        self.synchronize()
        self._finish(for_writing=for_writing)

    def _load(self, groups: list[dict[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        super()._load(groups, states)
        self._placement.has_loaded()

    @property
    def _is_between(self) -> bool:
        """Whether backward has begun to update, and no `step()` was called since."""
        return self._gradients.begun is not None and self._gradients.rest is None

    def _check_between_steps(self, refusal: Callable[[], Exception]) -> None:
        """Raise `refusal` between a backward that has begun to update and its step."""
        if self._is_between and self._failures.first is None:
            self._refused_in_between = True
            raise refusal()

    def _finish_for_close(self) -> None:
        if self._failures.first is not None:
            return
        is_between = self._is_between
        # Again: memory of a failed call is free by then, and a step cannot be finished once this is closed.
        for is_last in (False, True):
            try:
                self._finish_queued() if is_between else self.synchronize()
                break
            except Exception:
                if is_last or self._failures.first is not None:
                    raise
        if is_between and not self._refused_in_between:
            raise checks.closed_in_between()

    def _finish_queued(self) -> None:
        """Finish all of an update that backward has begun which is queued: the rest is dropped."""
        self._open.drain()

    def _let_go(self) -> None:
        undo_all(self._hooks)
        if self._shares is not None:
            self._unclosed.append(self._shares.close)
            self._gradients.forget()
        self._shares = None
        self._unwritten.clear()

    def _check_usable(self) -> None:
        super()._check_usable()
        self._failures.check()
        self._device.refuse_capture("optimizer offload")
        self._open.check()
