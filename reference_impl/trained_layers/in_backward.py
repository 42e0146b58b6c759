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

import torch

from reference_impl.device import Device
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.state_offload_wrapped import wrapped_in
from reference_impl.optimizers.step import Status, StepPlan, as_one, in_turn, snapshot
from reference_impl.optimizers.stepped import SteppedOptimizer
from reference_impl.trained_layers.gradients import PassedGradients
from reference_impl.trained_layers.optimizer import pending, streamed_share
from reference_impl.trained_layers.placement import VisitingPlacement, VisitingWeights
from reference_impl.trained_layers.shares import StateShares

# The number of no backward, as autograd numbers them.
_NO_BACKWARD = -1


class InBackwardOptimizer(SteppedOptimizer):
    """What `TrainableLayerStreamer(backward_overlap="update")` has made of a torch optimizer: use it in its place.

    The update runs in backward, with the hyper-parameters of that moment. `step()` updates what is left: the first
    block and what stands before it, and parameters on which somebody has put a gradient. Between both, `zero_grad()`,
    `state_dict()` and `close()` raise RuntimeError, because some weights are of this batch and others are not; so does
    `step()`, once, where a gradient was dropped or replaced whose update had begun. After a backward that has failed
    with updates begun, the optimizer is broken. A stand-in on `param.grad` has no values.

    Args:
        optimizer: see `OptimizerStateOffloader`.
        weights: the weights that visit.
        device: where they do.
        streaming: how states cross the link.
        shares: which states stay on the device.
        undo: gets the call that closes this, before anybody else has it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        weights: VisitingWeights,
        device: Device,
        *,
        streaming: Streaming,
        shares: StateShares,
        undo: list[Callable[[], None]],
    ) -> None:
        # The backward that has begun to update, until it has ended well.
        self._backward = _NO_BACKWARD
        self._has_failed = False
        wrapped, mover = wrapped_in(optimizer), GradientMover(device)
        share = streamed_share(wrapped, device, streaming, host_gradients=False)
        self._passed = PassedGradients(mover)
        super().__init__(
            wrapped.groups,
            wrapped.defaults,
            wrapped.algorithm,
            max_grad_norm=None,
            updates_in_backward=True,
            shows_steps=streaming.states != "exact",
        )
        self._start(
            Shares(device, wrapped.algorithm, streamed=share, gradients=mover),
            VisitingPlacement(weights, shares),
            self._passed,
            wrapped=wrapped,
            closers=undo,
        )

    def settle(self, params: Iterable[torch.Tensor], ahead: Iterable[torch.Tensor]) -> None:
        """Make the live current stream see new weights of `params`; all updates have been queued."""
        self._check_backward()
        members = pending(self._members, params)
        if members or self._passed.rest is not None:
            self._settle(members)

    @in_turn
    def _settle(self, members: Sequence[Member]) -> None:
        self._ready()
        self._wait_for(members)

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
        self._passed.keep(member)

    def passed(self) -> None:
        """Update the members whose gradients are final: backward is about to begin another block."""
        if self._passed.are_final:
            with self.noting_status_on_error():
                self._update_passed()

    @in_turn
    def _update_passed(self) -> None:
        self._ready()
        if self._passed.begun is not None:
            self._update()
            return
        # In step() it would be too late.
        unfrozen = (param for param in self._idle if param.requires_grad)
        self._placement.check_unfrozen(unfrozen, None if self._waits is None else self._waits.model)
        # Autograd calls back at the end of a backward that has not failed.
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        try:
            self._update()
        finally:
            if self._passed.begun is not None:
                self._backward = torch._C._current_graph_task_id()

    def _update(self) -> None:
        """Queue the update of the gradients that backward has done with, behind the live current stream."""
        gradients = self._passed.passed()
        if not gradients:
            return
        # So gradients of two blocks are there at most, one's while they are made and another's while they are used.
        self._wait_in_step([member for member in self._members.values() if member.pending])
        begun = self._passed.begun
        if begun is None:
            self._follow_writes()
            begun = CpuStep(StepPlan(snapshot(self.param_groups), None))
        self._open.prepare(begun.plan, gradients, arrived={}, factors={}, begun=begun)
        with as_one():
            self._passed.begin_passed(begun, gradients)
            self._open.begin()
        self.streamed.queue(gradients)

    def _step(self) -> None:
        super()._step()
        self.streamed.queue(self._members.values())

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

    def _check_usable(self) -> None:
        self._check_backward()
        super()._check_usable()

    @contextmanager
    def noting_status_on_error(self) -> Iterator[None]:
        """Note the fate of the step on an error, and remember a lost device; an error in a backward ends it."""
        with self._failures.noting_status_on_error():
            try:
                yield
            except BaseException:
                has_begun = self._passed.begun is not None
                if has_begun and self._backward == torch._C._current_graph_task_id() != _NO_BACKWARD:
                    self._has_failed = True
                raise

    def _status(self) -> Status:
        found = super()._status()
        return "broken" if found in ("untouched", "begun") and self._is_cut_short else found

    @property
    def _is_between(self) -> bool:
        return super()._is_between and not self._is_cut_short

    def _finish_queued(self) -> None:
        # Every update that backward has begun is queued.
        self.synchronize()
