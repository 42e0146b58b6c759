# SPDX-License-Identifier: Apache-2.0
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
from reference_impl.optimizers.gradients.backward_hooks import GradientHooks
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.model_hooks import forgetful
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.state_offload_wrapped import wrapped_in
from reference_impl.optimizers.step import StepPlan, as_one, in_turn, snapshot
from reference_impl.trained_layers.gradients import PassedGradients
from reference_impl.trained_layers.optimizer import pending, streamed_share
from reference_impl.trained_layers.placement import VisitingPlacement, VisitingWeights
from reference_impl.trained_layers.shares import StateShares


class InBackwardOptimizer(HostedOptimizer):
    """The optimizer of `TrainableLayerStreamer(backward_overlap="update")`: use it in the wrapped one's place.

    The update runs in backward, with the hyper-parameters of that moment. `step()` updates the rest: the first block,
    weights before it, and parameters with a gradient put there by other code. Between both, `zero_grad()`,
    `state_dict()` and `close()` raise RuntimeError, because some weights are of this batch and others are not; so does
    `step()`, once, if a gradient with a begun update was dropped or replaced. After a backward that has failed with
    updates begun, the optimizer is broken. A stand-in on `param.grad` has no values.

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
        self._finals = GradientHooks(forgetful(self._on_final))
        self._hooks.append(self._finals.close)
        self._start(
            Shares(device, wrapped.algorithm, streamed=share, gradients=mover),
            VisitingPlacement(weights, shares),
            self._passed,
            wrapped=wrapped,
            closers=undo,
        )

    def finish_update(self, params: Iterable[torch.Tensor], ahead: Iterable[torch.Tensor]) -> None:
        """Make the live current stream see new weights of `params`; all updates have been queued."""
        self._engine.check_broken()
        members = pending(self._members, params)
        if members or self._passed.rest is not None:
            self._finish_update(members)

    @in_turn
    def _finish_update(self, members: Sequence[Member]) -> None:
        self._engine.ready()
        self._engine.wait_for(members)

    def _admitted(self, members: Sequence[Member]) -> None:
        self._finals.hear(member.param for member in members)

    def _on_final(self, param: torch.Tensor) -> None:
        """Keep a gradient that is final until backward has passed its block."""
        with self.noting_status_on_error():
            # See `_admit`.
            if param in self._members:
                self._keep_final(self._members[param])

    @in_turn
    def _keep_final(self, member: Member) -> None:
        self._engine.ready()
        self._engine.used.forget()
        self._passed.keep(member)

    def passed(self) -> None:
        """Update the members whose gradients are final: backward is about to begin another block."""
        if self._passed.are_final:
            with self.noting_status_on_error():
                self._update_passed()

    @in_turn
    def _update_passed(self) -> None:
        self._engine.ready()
        if self._passed.backward_part is not None:
            self._update()
            return
        # In step() it would be too late.
        self._placement.check_unfrozen(self._trained.trainable(), self._engine.attached.model)
        # Autograd calls back at the end of a backward that has not failed.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        try:
            self._update()
        finally:
            self._passed.note_backward()

    def _end_backward(self) -> None:
        """Note that this backward has ended well.

        A use before `step()` of a weight updated in place is an error: the weight is new too early.
        """
        self._passed.end_backward()
        in_place = [member for member in self._passed.used_in_backward if member.home is None]
        for member in in_place:
            member.pending = True
        self._engine.let_users_wait(in_place)

    def _update(self) -> None:
        """Queue the update of the gradients that backward has done with, behind the live current stream."""
        gradients = self._passed.passed()
        if not gradients:
            return
        # So gradients of two blocks are there at most, one's while they are made and another's while they are used.
        self._engine.wait_in_step([member for member in self._members.values() if member.pending])
        part = self._passed.backward_part
        if part is None:
            self._engine.follow_writes()
            part = CpuStep(StepPlan(snapshot(self.param_groups), None))
        self._engine.open.prepare(part.plan, gradients, arrived={}, factors={}, backward_part=part)
        with as_one():
            self._passed.begin_passed(part, gradients)
            self._engine.open.begin()
        self.streamed.queue(gradients)

    def _step(self) -> None:
        super()._step()
        self.streamed.queue(self._members.values())

    @contextmanager
    def noting_status_on_error(self) -> Iterator[None]:
        """Note the fate of the step on an error, and remember a lost device; an error in a backward ends it."""
        with self._failures.noting_status_on_error():
            try:
                yield
            except BaseException:
                self._passed.fail_backward()
                raise
