# SPDX-License-Identifier: Apache-2.0
"""Takes the steps of an optimizer with states on the host, and makes readers of its weights wait for them.

A step is prepared, then begun. Preparing may raise and changes nothing. `status` tells the fate of the step after an
error. The next call finishes a step begun in backward, or a load cut short by an error. `Shares` holds the states, and
carries the step out. `StepGradients` has the step's gradients.

Explained in docs/optimizer-offloading.md and docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.optimizers import checks
from reference_impl.optimizers.forward_waits import Wait
from reference_impl.optimizers.gradients.clip_decision import decide
from reference_impl.optimizers.gradients.of_step import StepGradients
from reference_impl.optimizers.gradients.scale import take_scale
from reference_impl.optimizers.gradients.used import UsedGradients, noted_of, standing_on, written_while_read
from reference_impl.optimizers.layout import Member, check_kept
from reference_impl.optimizers.model_hooks import forgetful
from reference_impl.optimizers.parameter_state import OptimizerState
from reference_impl.optimizers.readers import AttachedModel, StepSite
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.state_dict import StateWrites
from reference_impl.optimizers.step import Failures, Status, StepPlan, as_one, in_turn, snapshot
from reference_impl.optimizers.writes.aliased import AliasedWeights
from reference_impl.optimizers.writes.awaited import let_wait
from reference_impl.optimizers.writes.module_load import CheckLoad, count_own, written, written_on_its_way


class Owner(Protocol):
    """The optimizer whose steps an engine takes."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    @property
    def state(self) -> OptimizerState:
        """Each parameter's state."""


class Engine:
    """The steps of one optimizer, from `start` to `close`; before and after these it is closed.

    Args:
        owner: a weak proxy of the optimizer; a step uses its groups and GradScaler's scale.
        members: the optimizer's trained parameters; it adds new ones.
        max_grad_norm: see `HostedOptimizer`.
        follows_writes: masters follow weights written by other code.
        overlaps_forward: the update runs on behind `step()`, if a model is attached and waits for its weights.
    """

    shares: Shares | None = None
    # Given by `start`.
    device: Device
    gradients: StepGradients
    site: StepSite
    _reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None

    def __init__(
        self,
        owner: Owner,
        members: Mapping[torch.Tensor, Member],
        *,
        max_grad_norm: float | None,
        follows_writes: bool,
        overlaps_forward: bool,
    ) -> None:
        self._owner, self.members = owner, members
        self._failures = Failures(self.status)
        self._max_grad_norm = max_grad_norm
        self._follows_writes, self._overlaps_forward = follows_writes, overlaps_forward
        self._refused_in_between = False
        self.made_by = os.getpid()
        self.attached = AttachedModel()
        self.used = UsedGradients()
        self.aliased = AliasedWeights()
        self.writes = StateWrites()
        self.stepped_by: threading.Thread | None = None
        self.grad_norm: torch.Tensor | None = None

    def start(
        self,
        site: StepSite,
        shares: Shares,
        gradients: StepGradients,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """Work with these parts from now on, until `close`."""
        self.site, self.device, self.gradients = site, site.device, gradients
        self._reduce_norm_squared = reduce_norm_squared
        self.shares = shares

    @property
    def is_closed(self) -> bool:
        """Whether it has no states: before `start`, or after `close`."""
        return self.shares is None

    @property
    def open(self) -> Shares:
        """The states and their updates. Raises RuntimeError when closed."""
        if self.shares is None:
            raise RuntimeError("the optimizer is closed; expected an open one; try constructing a new one")
        return self.shares

    def status(self) -> Status:
        """Return the fate of the last gradients, see `HostedOptimizer.status`."""
        if self.shares is None:
            return "closed"
        if self._failures.first is not None or self.gradients.cut_short() is not None:
            return "broken"
        if self.gradients.backward_part is not None or self.writes:
            return "begun"
        # A program that has gone on from the last step asks about the next one.
        if self.attached.has_run_since_step:
            return "untouched"
        used = self.shares.has_unqueued or self.used.are_all(self.members.values())
        return "begun" if used else "untouched"

    def tell_status(self) -> Status:
        """Return the status for a caller that may go on with a begun step by `step()`."""
        with self._failures.turn:
            status = self.status()
            self._failures.reported_begun |= status == "begun"
            return status

    def check_broken(self) -> None:
        """Raise the error that has broken the optimizer, if one has."""
        error = self.gradients.cut_short()
        if error is not None and self._failures.first is None:
            self._failures.first = error
        self._failures.check()

    def check(self) -> None:
        """Raise RuntimeError where the optimizer is closed, was made by another process, or is broken."""
        checks.check_alive(closed=self.is_closed, made_by=self.made_by)
        self.check_broken()
        self.device.refuse_capture("optimizer offload")
        self.open.check()

    @property
    def is_between(self) -> bool:
        """Whether backward has begun to update, and no `step()` was called since."""
        is_between = self.gradients.backward_part is not None and self.gradients.rest is None
        return is_between and self.gradients.cut_short() is None

    def check_between_steps(self, refusal: Callable[[], Exception]) -> None:
        """Raise `refusal` between a backward that has begun to update and its step."""
        if self.is_between and self._failures.first is None:
            self._refused_in_between = True
            raise refusal()

    # A step finishes an earlier one, is prepared, and begins.

    def ready(self) -> None:
        """Finish a load, or the rest of a step. Raises as `check`."""
        self.check()
        self.writes.go_on()
        rest = self.gradients.rest
        if rest is not None:
            rest.use(self.take, has_begun=lambda: self.gradients.rest is None)
            self._failures.reported_begun = True

    @in_turn
    def finish_earlier(self, *, has_closure: bool) -> None:
        """Finish the step or the load before; if the next step `has_closure`, the closure runs first."""
        # From here on no call refuses to finish an update that backward has begun, whatever is raised below.
        had_rest = self.gradients.rest is not None
        if not has_closure:
            self.gradients.note_rest(self.members.values())
        self.check()
        if had_rest or self.writes:
            self.ready()

    @property
    def has_reported_begun(self) -> bool:
        """Whether an error has told of a step that has used these gradients."""
        return self._failures.reported_begun and self.used.are_all(self.members.values())

    def take_noted(self) -> None:
        """Take a step; from here on each call finishes the rest of one that backward has begun."""
        self.gradients.note_rest(self.members.values())
        self.take()

    def take(self) -> None:
        """Prepare a step with the present gradients, and begin it."""
        gradients = self.gradients.to_use(self.members.values(), self.wait_in_step)
        plan = self._plan(gradients)
        members = [*self.gradients.used_in_backward, *gradients]
        if plan.decision is None and not members:
            self.grad_norm = None
            return
        prepared = self.gradients.prepare(gradients, returns_early=self.returns_early)
        self.open.prepare(
            plan,
            gradients,
            arrived=prepared.arrived,
            factors=prepared.factors,
            backward_part=self.gradients.backward_part,
        )
        standing = {**standing_on(self.members.values()), **prepared.stand_ins}
        if self.returns_early and self._follows_writes:
            self.aliased.note(gradients)
        self.attached.on_step(members)
        with self._beginning(standing):
            self.gradients.begin(forgetful(self.wait_for) if self.attached.waits else None)
            self.open.begin()
            self._refused_in_between = False
            norm = None if plan.decision is None else plan.decision.norm
            self.grad_norm = norm if self.gradients.measures else None
            count_own(members, self.members.values())
        self.wait_in_step(self.aliased.take_noted()) if self.returns_early else self.wait_for_all()

    def _plan(self, gradients: Mapping[Member, torch.Tensor]) -> StepPlan:
        """Decide over all gradients, on the device; where backward has begun to use them, it was decided before."""
        if self.gradients.backward_part is not None:
            plan = self.gradients.backward_part.plan
            plan.check_unchanged(self._owner.param_groups, self._owner.defaults)
            return plan
        decision = decide(
            self.gradients.norms(gradients),
            self.device,
            reduce_norm_squared=self._reduce_norm_squared,
            max_norm=self._max_grad_norm,
            **take_scale(self._owner),
        )
        return StepPlan(snapshot(self._owner.param_groups), decision)

    @contextmanager
    def _beginning(self, standing: Mapping[Member, torch.Tensor]) -> Iterator[None]:
        """Begin a step inside, whole or not at all; `standing` are its gradients, none if all were offloaded."""
        stream, noted = self.device.current_stream(), noted_of(standing)
        with as_one(behind=self._let_early_users_wait):
            # Noted inside only: if the region does not begin, no step has begun.
            self.used.note(noted, all_offloaded=not standing)
            self._failures.reported_begun = False
            self.site.stream = stream
            yield

    def _let_early_users_wait(self) -> None:
        if self.returns_early:
            self.let_users_wait(self.members.values())

    def has_raised(self, closure: Callable[[], object] | None = None) -> None:
        """Hear that `step(closure)` raises, or a hook in front of it.

        Finishes the update begun in backward; waits for weights if no forward does, and lets users wait.
        """
        if closure is None:
            self.gradients.note_rest(self.members.values(), checks_used=False)
        rest = self.gradients.rest
        if rest is not None:
            rest.be_awaited()
        # First: without an attached model no module waits for weights, and `synchronize` may fail as the step did. With
        # one, the begun step may have failed while it let users wait.
        self.let_users_wait(self.members.values())
        if rest is not None or not self.returns_early:
            with suppress(Exception):
                self.synchronize()

    def drop_gradients(self, *, to_zero: bool) -> None:
        """Forget unused gradients; if they are set `to_zero`, wait for updates that read them.

        Raises RuntimeError between a backward that has begun to use them and its step.
        """
        self.check_between_steps(checks.dropped_in_between)
        self.ready()
        self.used.forget()
        self.gradients.drop(self.members.values())
        if to_zero:
            self.wait_in_step(self.gradients.being_read(self.members.values()))

    # Readers of weights wait for updates.

    def attach(self, model: nn.Module, *, refresh_masters: Wait, check_load: CheckLoad) -> None:
        """Let `model` wait for the weights of the members, see `AttachedModel.attach`."""
        self.attached.attach(
            model,
            self.members,
            device=self.device,
            wait_for=self.wait_for_forward,
            refresh_masters=refresh_masters,
            check_load=check_load,
            noting_status=self._failures.noting_status_on_error,
        )

    @property
    def returns_early(self) -> bool:
        """Whether `step()` returns before weights are new, because a model waits for them."""
        return self.attached.waits and self._overlaps_forward

    @in_turn
    def synchronize(self) -> None:
        """Make the live current stream see finished weights."""
        self.ready()
        self.wait_for_all()

    @in_turn
    def wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for the updates of `members`."""
        if self.shares is None:
            # Closed while this call waited for its turn: all updates are finished.
            return
        part = self.gradients.backward_part
        if self.site.is_elsewhere and part is not None and part.queued and self.gradients.rest is None:
            # Before step() a weight of the CPU share stays old, or is new already: there is nothing to wait for.
            return
        # Only these checks: every module of a model comes here in its forward.
        self._failures.check()
        self.shares.check()
        if self.writes or self.gradients.rest is not None:
            self.ready()
        self._wait(members)

    def wait_for_use(self, members: Iterable[Member]) -> None:
        """Wait as `wait_for`. Raises RuntimeError before `step()` for weights that backward has begun to update."""
        listed = list(members)
        if not self.site.is_elsewhere:
            self.check_unused(member for member in listed if member.pending)
        self.wait_for(listed)

    def check_unused(self, members: Iterable[Member]) -> None:
        """Raise RuntimeError before `step()` where backward has begun to update one of `members`, new or not."""
        used = self.gradients.used_in_backward
        found = next((member for member in members if member in used), None) if used else None
        if found is not None:
            self.check_between_steps(lambda: checks.used_in_between(found))

    def wait_for_forward(self, members: Iterable[Member]) -> None:
        """Wait as `wait_for_use`, for a forward of the model, also for its recomputation in backward."""
        # Gathers ahead in backward may read weights with a begun update.
        is_in_backward = torch._C._current_graph_task_id() != -1
        (self.wait_for if is_in_backward else self.wait_for_use)(members)

    def _wait(self, members: Iterable[Member]) -> None:
        listed = list(members)
        self._refuse_written(listed)
        self.site.see(lambda: self.open.wait_for(listed))
        self._end_reading(listed)

    def wait_in_step(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for some updates of the step before."""
        listed = list(members)
        if listed:
            self._wait(listed)
            self.attached.order_gathers(
                all_are_new=not any(member.pending for member in self.members.values())
            )

    def wait_for_all(self) -> None:
        """Make the live current stream wait for all updates; the host waits for the CPU's updates."""
        self._wait([member for member in self.members.values() if member.pending])
        self.attached.order_gathers(all_are_new=True)
        self.open.drain()

    def _end_reading(self, members: Collection[Member]) -> None:
        """Note that the updates of `members` are waited for. Raises RuntimeError when a gradient was written before."""
        gradient = self.gradients.end(members)
        if gradient is not None:
            self._failures.first = written_while_read(gradient)
            raise self._failures.first
        for member in members:
            member.has_arrived()

    def let_users_wait(self, members: Iterable[Member]) -> None:
        """Let users of a weight in flight wait for it, except compiled code: it checks classes."""
        params = (member.param for member in members if member.pending)
        let_wait(params, self, hears_uses=not self.attached.has_compiled)

    # Masters follow weights written by other code; they are read and written while no update runs.

    def follow_writes(self) -> None:
        """Let masters follow the weights written by other code.

        Raises RuntimeError for a weight whose new value is on its way.
        """
        if not self._follows_writes:
            return
        found = written(self.members.values())
        self._refuse_written(found)
        for member in found:
            check_kept(member)
            self._owner.state.follow(member)

    def _refuse_written(self, members: Iterable[Member]) -> None:
        """Raise RuntimeError, from now on, for a written weight with its new value in flight."""
        if not self._follows_writes:
            return
        for member in written(member for member in members if member.pending):
            if self.open.is_on_its_way(member):
                self._failures.first = written_on_its_way(member)
                raise self._failures.first

    @in_turn
    def remake_masters(self, members: Collection[Member]) -> None:
        """Make new masters of `members` from their weights."""
        self.ready()
        self.finish(for_writing=True)
        self.writes.make(lambda: self.open.refresh_masters(members))

    def written_uncounted(self, members: Sequence[Member]) -> Iterable[Member]:
        """Return the `members` with masters on the CPU and weights written past every counter."""
        return self.finished(members).written_uncounted(members) if self._follows_writes else ()

    def parts_of(self, members: Iterable[Member]) -> Shares:
        """Return the shares for reading states, as `finished` does: in the stepping thread, or in turn."""
        if not self._failures.has_turn:
            checks.check_thread(self.stepped_by)
        return self.finished(members)

    @in_turn
    def finished(self, members: Iterable[Member]) -> Shares:
        """Return the shares, once no update of `members` runs. Raises RuntimeError when closed."""
        self.check()
        self.wait_for([member for member in members if member.pending])
        self.attached.order_gathers(all_are_new=False)
        return self.open

    def finish(self, *, for_writing: bool) -> None:
        """Finish the step, and block until the states are whole and, `for_writing`, nobody reads them either."""
        self.open.finish(for_writing=for_writing)
        self._end_reading(self.members.values())

    def finish_for_saving(self) -> None:
        """Finish the updates that run, and let masters follow all writes, or raise why states cannot be saved now."""
        self._finish_between_steps(for_writing=False)
        self.follow_writes()
        if self._follows_writes:
            members = list(self.members.values())
            for member in self.finished(members).written(members):
                self._owner.state.follow(member)

    def finish_for_loading(self) -> None:
        """Finish the updates that run, or raise why states cannot be loaded now."""
        self._finish_between_steps(for_writing=True)

    def _finish_between_steps(self, *, for_writing: bool) -> None:
        self.check_between_steps(checks.saved_in_between)
        self.synchronize()
        self.finish(for_writing=for_writing)

    def finish_for_close(self) -> None:
        """Finish the step that runs; of a broken optimizer nothing, and nothing is raised."""
        if self._failures.first is not None:
            return
        is_between = self.is_between
        # The rest of an update that backward has begun is dropped.
        is_dropped = is_between and not self.gradients.begins_whole
        self.open.drain() if is_dropped else self.synchronize()
        if is_between and not self._refused_in_between:
            raise checks.closed_in_between()

    def close(self, closers: list[Callable[[], None]]) -> None:
        """Be closed, and add to `closers` the call that frees the memory; again, it changes nothing."""
        if self.shares is not None:
            closers.append(self.shares.close)
            self.gradients.forget()
        self.shares = None
        self.writes.clear()
