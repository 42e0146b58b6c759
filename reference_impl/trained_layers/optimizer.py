# SPDX-License-Identifier: Apache-2.0
"""The optimizer of streamed trained layers: gradients are offloaded in backward, states stream beside the weights.

A gradient is offloaded as soon as it is final, and copied back in one chunk with its states; a block's chunks are
updated while its weights are on the device for the next forward. With `in_backward` the update does not wait for that.

Of shards it uses gradients that FSDP2 has reduced. FSDP2 adds a reduction to the gradient on the parameter. This is a
DTensor with the stand-in as its local tensor, so `clip_grad_norm_` finds the norm of all ranks.

Explained in docs/larger-than-gpu.md and docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from reference_impl.device import Device
from reference_impl.optimizers.gradients.backward_hooks import GradientHooks
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.model_hooks import forgetful
from reference_impl.optimizers.options import CpuUpdate, Streaming
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.state_offload_wrapped import Wrapped, wrapped_in
from reference_impl.optimizers.step import in_turn
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.storage import StateFormat
from reference_impl.trained_layers.gradients import BlockGradients
from reference_impl.trained_layers.placement import VisitingPlacement, VisitingWeights
from reference_impl.trained_layers.shares import NOTHING_STAYS, StateShares


def streamed_share(
    wrapped: Wrapped, device: Device, streaming: Streaming, *, host_gradients: bool
) -> StreamedShare:
    """Return an empty share for the states of the `wrapped` optimizers."""
    return StreamedShare(
        device,
        wrapped.algorithm,
        chunk_bytes=streaming.chunk_bytes,
        state_format=StateFormat.of(streaming.states, wrapped.algorithm, device),
        host_gradients=host_gradients,
        weights_visit=True,
    )


def pending(members: Mapping[torch.Tensor, Member], params: Iterable[torch.Tensor]) -> list[Member]:
    """Return the members of `params` whose update nobody has waited for."""
    found = (members.get(param) for param in params)
    return [member for member in found if member is not None and member.pending]


class TrainedLayersOptimizer(HostedOptimizer):
    """The optimizer of `TrainableLayerStreamer` or `ShardStreamer`: use it in the wrapped one's place.

    Its groups stay the wrapped optimizer's. `step()` returns when the update is prepared; the next forward carries it
    out, block by block, with the global norm of all gradients. Of shards the step is a collective wherever gradients
    are clipped or checked for overflow: no rank may leave it out. Gradients are on the host from backward on: a
    stand-in on `param.grad` answers `clip_grad_norm_` and GradScaler, is dropped by `zero_grad`, and a second backward
    adds to its gradient. docs/reliability.md has the promise for a step that raises.

    Args:
        optimizer: see `OptimizerStateOffloader`.
        weights: the weights that visit.
        device: where they do.
        streaming: how states cross the link.
        max_grad_norm: clip the global norm exactly.
        in_flight_bytes: gradients on their way to the host before compute waits for them.
        shares: the states that stay on the device, and the CPU's parameters.
        cpu: how it does.
        undo: gets the call that closes this, before anybody else has it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        weights: VisitingWeights,
        device: Device,
        *,
        streaming: Streaming,
        max_grad_norm: float | None,
        in_flight_bytes: int,
        undo: list[Callable[[], None]],
        shares: StateShares = NOTHING_STAYS,
        cpu: CpuUpdate | None = None,
    ) -> None:
        wrapped, mover = wrapped_in(optimizer), GradientMover(device, in_flight_bytes=in_flight_bytes)
        share = streamed_share(wrapped, device, streaming, host_gradients=True)
        self._weights = weights
        self._leaving = BlockGradients(mover)
        super().__init__(
            wrapped.groups,
            wrapped.defaults,
            wrapped.algorithm,
            max_grad_norm=max_grad_norm,
            shows_steps=streaming.states != "exact",
        )
        self._finals = GradientHooks(forgetful(self._on_final))
        self._hooks.append(self._finals.close)
        self._start(
            Shares(device, wrapped.algorithm, streamed=share, cpu=cpu, gradients=mover),
            VisitingPlacement(weights, shares),
            self._leaving,
            wrapped=wrapped,
            closers=undo,
        )

    def noting_status_on_error(self) -> AbstractContextManager[None]:
        """Return a context that notes the fate of the step on an error, and remembers a lost device."""
        return self._failures.noting_status_on_error()

    def finish_update(self, params: Iterable[torch.Tensor], ahead: Iterable[torch.Tensor]) -> None:
        """Make the live current stream see new weights of `params`; queue the updates of those `ahead`."""
        members = pending(self._members, params)
        if members or self.streamed.unqueued:
            self._finish_update(members, ahead)

    @in_turn
    def _finish_update(self, members: Sequence[Member], ahead: Iterable[torch.Tensor]) -> None:
        self._engine.ready()
        self._leaving.drain()
        self.streamed.queue(members)
        self.streamed.queue(self._members[param] for param in ahead)
        self._engine.wait_for(members)

    def _admitted(self, members: Sequence[Member]) -> None:
        self._leaving.add(members, self.streamed.gradient_places(members))
        self._finals.hear(member.param for member in members)

    @in_turn
    def _on_final(self, param: torch.Tensor) -> None:
        """Send a final gradient to the host: a block's gradients together."""
        member = self._members.get(param)
        if member is None:
            # See `_admit`.
            return
        if self._leaving.leaves_with_block(member):
            self._leaving.note_final(member, self._send_final)
            return
        self._engine.ready()
        self._engine.used.forget()
        self._leaving.send(member)

    @in_turn
    def _send_final(self) -> None:
        if not self._leaving.are_final or self._engine.is_closed:
            return
        self._engine.ready()
        self._engine.used.forget()
        self._leaving.send_final()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let gradients of shards add up, on the host: run all backwards of a step but the last inside.

        Gradients that FSDP2 does not reduce add up without it on the device, among them gradients under
        `model.set_requires_gradient_sync(False)`.
        """
        self._leaving.adds_shards = True
        yield

    @in_turn
    def free_slots(self) -> None:
        """Free the slots of an update that the forward has carried out; `step()` takes them again before it begins."""
        self._engine.check()
        self.streamed.free_slots()

    def _step(self) -> None:
        self._weights.end_failed_loads()
        super()._step()
        # Blocks that the window holds for the next forward can begin at once.
        self.streamed.queue(self._members[param] for param in self._weights.ahead if param in self._members)
