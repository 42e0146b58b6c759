"""The optimizer of streamed trained layers that updates in backward: each block while it is still on the device.

Nothing is clipped and nothing is skipped, because both need all gradients. So a gradient never leaves the device:
once backward has passed a block, the block's states stream through and its new weights are copied home, while
backward goes on with the block below. Each such update is a step of the streamed share, of the parameters whose
gradients are final by then.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from reference_impl.optimizers import checks
from reference_impl.optimizers.gradients.leaving import LeavingGradients
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.optimizers.gradients.standing import StandingGradients
from reference_impl.optimizers.gradients.used import standing_on
from reference_impl.optimizers.layout import Member, gradient_of
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.state_offload_wrapped import SavesEach, wrapped_in
from reference_impl.optimizers.step import Status, StepPlan, as_one, in_turn, snapshot
from reference_impl.optimizers.stepped import SteppedOptimizer
from reference_impl.trained_layers.gradients import READ_IN_A_HOOK
from reference_impl.trained_layers.optimizer import pending, streamed_share
from reference_impl.trained_layers.placement import VisitingPlacement, VisitingWeights
from reference_impl.trained_layers.shares import StateShares

# As autograd numbers what runs.
_NO_BACKWARD = -1


class InBackwardOptimizer(SavesEach, SteppedOptimizer):
    """What `TrainableLayerStreamer(backward_overlap="update")` has made of a torch optimizer: use it in its place.

    The update runs in backward, with the hyper-parameters of that moment. `step()` updates what is left: the first
    block and what stands before it, and parameters on which somebody has put a gradient. Between both, `zero_grad()`,
    `state_dict()` and `close()` raise RuntimeError, because some weights are of this batch and others are not; so does
    `step()`, once, where a gradient was dropped or replaced whose update had begun. After a backward that has failed
    with updates begun, the optimizer is broken. A stand-in on `param.grad` has no values.

    Args:
        optimizer: see `OptimizerStateOffloader`.
        weights: the weights that visit.
        streaming: how states cross the link.
        shares: which states stay on the device.
        undo: gets what closes this, before anybody else has it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        weights: VisitingWeights,
        *,
        streaming: Streaming,
        shares: StateShares,
        undo: list[Callable[[], None]],
    ) -> None:
        # Gradients that are final and wait for their update; whose update has begun since the last step().
        self._final: dict[Member, torch.Tensor] = {}
        self._updating: set[Member] = set()
        self._plan_of_backward: StepPlan | None = None
        # Whether step() was called and has failed before it was done.
        self._is_asked = False
        # The backward that has begun to update, until it has ended well.
        self._backward = _NO_BACKWARD
        self._has_failed = False
        wrapped = wrapped_in(optimizer)
        self._group_counts = wrapped.group_counts
        super().__init__(
            wrapped.groups,
            wrapped.defaults,
            wrapped.algorithm,
            max_grad_norm=None,
            updates_in_backward=True,
            shows_steps=streaming.states != "exact",
        )
        share = streamed_share(wrapped, self._device, streaming, host_gradients=False)
        self._start(
            Shares(self._device, wrapped.algorithm, streamed=share),
            VisitingPlacement(weights, shares),
            StandingGradients(),
            wrapped=wrapped,
            closers=undo,
        )

    def settle(self, params: Iterable[torch.Tensor], ahead: Iterable[torch.Tensor]) -> None:
        """Make the live current stream see new weights of `params`; all updates have been queued."""
        self._check_backward()
        members = pending(self._members, params)
        if members or self._is_asked:
            self._settle(members)

    @in_turn
    def _settle(self, members: Sequence[Member]) -> None:
        self._ready()
        self._wait_for(members)

    def passed(self) -> None:
        """Update what has its final gradients: backward is about to begin another block, and has done with these."""
        if self._final:
            with self.noting_status_on_error():
                self._update_passed()

    @in_turn
    def _update_passed(self) -> None:
        self._ready()
        if self._updating:
            self._update()
        else:
            self._begin_in_backward()

    def _begin_in_backward(self) -> None:
        """Update for the first time in a backward, and note in which, until it has ended well."""
        # In step() it would be too late.
        unfrozen = (param for param in self._idle if param.requires_grad)
        self._placement.check_unfrozen(unfrozen, None if self._waits is None else self._waits.model)
        # Autograd calls back at the end of one that has not failed.
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        try:
            self._update()
        finally:
            if self._updating:
                self._backward = torch._C._current_graph_task_id()

    def _on_backward_end(self) -> None:
        self._backward = _NO_BACKWARD

    @property
    def _is_cut_short(self) -> bool:
        """Whether the backward that has begun to update has failed: nothing runs in it any more."""
        is_outside = torch._C._current_graph_task_id() == _NO_BACKWARD
        return self._has_failed or (is_outside and self._backward != _NO_BACKWARD)

    def _check_backward(self) -> None:
        """Raise RuntimeError after a backward that has failed with updates begun, and be broken from then on."""
        if self._is_cut_short and self._failures.first is None:
            self._failures.first = RuntimeError(
                "backward has failed after it had begun to update, so some weights are of its batch and others are "
                "not; expected a backward that ends; try backward_overlap='gradients', where such a batch can be left "
                "out"
            )
        self._failures.check()

    @contextmanager
    def noting_status_on_error(self) -> Iterator[None]:
        """Note on an error what became of the step, and remember a lost device; what raises in a backward ends it."""
        with self._failures.noting_status_on_error():
            try:
                yield
            except BaseException:
                if self._updating and self._backward == torch._C._current_graph_task_id() != _NO_BACKWARD:
                    self._has_failed = True
                raise

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Raises RuntimeError where backward has begun to use them, and no step() came since."""
        if not self._closed:
            self._ready()
            self._check_between_steps(checks.update_begun)
            self._final.clear()
        super().zero_grad(set_to_none)

    @property
    def _is_between(self) -> bool:
        return bool(self._updating) and not (self._is_asked or self._is_cut_short)

    def _finish_queued(self) -> None:
        # All of what backward has begun is queued.
        self.synchronize()

    def _let_go(self) -> None:
        super()._let_go()
        self._final.clear()
        self._updating.clear()

    def _status(self) -> Status:
        told = super()._status()
        if told in ("untouched", "begun") and self._is_cut_short:
            return "broken"
        return "begun" if told == "untouched" and self._updating else told

    def _admitted(self, members: Sequence[Member]) -> None:
        self._hook_gradients([member.param for member in members], self._on_final)

    def _on_final(self, param: torch.Tensor) -> None:
        """Keep a gradient that is final until backward has passed its block."""
        with self.noting_status_on_error():
            self._keep_final(self._members[param])

    @in_turn
    def _keep_final(self, member: Member) -> None:
        self._ready()
        self._used.forget()
        if member in self._updating:
            raise _second_gradient(member)
        stands = member.param.grad
        if not (isinstance(stands, GradientStandIn) and stands.is_stale):
            self._keep(member)

    def _keep(self, member: Member) -> None:
        """Keep a gradient until its update, and put a stand-in in its place; changes nothing when it raises."""
        checks.check_used_in_time([member])
        param, found = member.param, member.gradient
        if isinstance(found, GradientStandIn) and found.dropped:
            param.grad = found.in_its_place(param)
        gradient = gradient_of(member)
        # A sum in fp32 is rounded once, as where it leaves.
        self._final[member] = gradient.to(param.dtype)
        param.grad = member.placeholder = _stand_in(member, gradient)

    def _update(self) -> None:
        """Queue the update of all gradients that wait and still stand, behind the live current stream."""
        # Whoever has dropped a gradient before any was used has left out the batch.
        gradients = {m: g for m, g in self._final.items() if _stands(m) or self._updating}
        if not gradients:
            self._final.clear()
            return
        # So gradients of two blocks are there at most, one's while they are made and another's while they are used.
        self._wait_in_step([member for member in self._members.values() if member.pending])
        if self._plan_of_backward is None:
            self._follow_writes()
            self._plan_of_backward = StepPlan(snapshot(self.param_groups), None)
        self.streamed.prepare(gradients, None, self._plan_of_backward.groups)
        with as_one():
            self.streamed.begin()
            self._updating.update(gradients)
            self._final.clear()
            for member in gradients:
                member.pending = True
        self.streamed.advance()
        self.streamed.queue(gradients)

    def _step_has_raised(self, closure: Callable[[], Any] | None = None, *, is_left: bool = False) -> None:
        """Ask for what backward has begun, where `step()` has not come so far."""
        if closure is None:
            self._is_asked = self._is_asked or bool(self._updating)
        super()._step_has_raised(closure, is_left=self._is_asked)

    @in_turn
    def _finish_earlier(self, *, asks: bool) -> None:
        self._ready()

    def _step(self) -> None:
        """Update what is left of the batch."""
        self._check_plan()
        self._follow_groups()
        self._check_used_stand()
        self._take_what_stands()
        self._note_step()
        self._is_asked = True
        try:
            self._update()
        except BaseException:
            self._is_asked = bool(self._updating)
            raise
        self._end_step()

    def _note_step(self) -> None:
        if self._waits is not None:
            self._waits.on_step([*self._updating, *self._final])

    def _check_plan(self) -> None:
        if self._plan_of_backward is not None:
            self._plan_of_backward.check_unchanged(self.param_groups, self.defaults)

    def _check_used_stand(self) -> None:
        """Raise RuntimeError where a gradient was dropped or replaced after its update had begun.

        Stand-ins are put back, so that the next step goes on with the gradients of backward.
        """
        changed = [member for member in self._updating if not _stands(member)]
        if not changed:
            return
        for member in (*self._updating, *self._final):
            assert member.placeholder is not None
            member.param.grad = member.placeholder = _stand_in(member, member.placeholder)
        raise checks.used_is_replaced(changed[0].param)

    def _take_what_stands(self) -> None:
        """Take gradients that somebody has put on parameters, and leave out those of backward that were dropped.

        Raises RuntimeError for one that an earlier step has used.
        """
        self._wait_for(LeavingGradients.used_by_nobody(self._members.values()))
        for member in self._members.values():
            if member in self._final and not _stands(member):
                del self._final[member]
            found = member.gradient
            if isinstance(found, GradientStandIn) and not found.dropped:
                if found.is_over:
                    raise checks.used_twice(member)
            elif found is not None:
                self._keep(member)

    def _ready(self) -> None:
        self._check_backward()
        super()._ready()
        if self._is_asked:
            self._finish_asked()

    def _finish_asked(self) -> None:
        """Update what is left of a step that has failed; where that fails too, whoever reads a weight of it waits."""
        try:
            self._check_plan()
            self._note_step()
            self._update()
        except BaseException:
            for member in self._final:
                member.pending = True
            raise
        self._end_step()
        self._failures.told_begun = True

    @in_turn
    def _wait_for(self, members: Iterable[Member]) -> None:
        if self._is_asked and not self._closed:
            self._ready()
        super()._wait_for(members)

    def _end_step(self) -> None:
        """Let the next backward begin anew."""
        for member in self._updating:
            if isinstance(member.placeholder, GradientStandIn):
                member.placeholder.use()
        self._step_begins(standing_on(self._updating), left_unseen=False)
        self._updating.clear()
        self._plan_of_backward, self._is_asked, self._refused_in_between = None, False, False


def _stand_in(member: Member, gradient: torch.Tensor) -> GradientStandIn:
    """Return what stands on the parameter for a gradient that waits for its update, or that it uses."""
    return GradientStandIn(gradient, None, used=True, recall=_refuse_second(member), remedy=READ_IN_A_HOOK)


def _stands(member: Member) -> bool:
    """Return whether the stand-in for a member's gradient is on its parameter and stands for it."""
    stands = member.placeholder
    return member.param.grad is stands and not (isinstance(stands, GradientStandIn) and stands.dropped)


def _second_gradient(member: Member) -> RuntimeError:
    return RuntimeError(
        f"a second gradient of a parameter of shape {tuple(member.param.shape)} came before step(), and backward had "
        "started the update with the first; expected one backward a step; try a larger batch with slices=, or "
        "backward_overlap='gradients'"
    )


def _refuse_second(member: Member) -> Any:
    """Return what raises where another backward adds to the gradient of `member`."""

    def refuse(by_backward: bool) -> NoReturn:
        raise _second_gradient(member)

    return refuse
