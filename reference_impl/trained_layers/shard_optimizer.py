"""The optimizer of streamed shards: that of streamed trained layers, for gradients that FSDP2 has reduced.

FSDP2 makes a new gradient of each reduction, and no stand-in can take its place on the parameter. So one that has been
offloaded leaves nothing there, and only `accumulate()` says that the next one adds to it.

Explained in docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from reference_impl.device import Device
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.options import Streaming
from reference_impl.trained_layers.optimizer import TrainedLayersOptimizer
from reference_impl.trained_layers.shards import StreamedShards


class ShardOptimizer(TrainedLayersOptimizer):
    """What `ShardStreamer` has made of a torch optimizer: use it in its place.

    `step()` returns when the update is prepared; gathers of the next forward carry it out, with the norm of all
    gradients over the mesh. It is a collective wherever gradients are clipped or checked for overflow: no rank may
    leave it out. Gradients are on the host from backward on and `param.grad` is None; `zero_grad()` drops them too.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: StreamedShards,
        device: Device,
        *,
        streaming: Streaming,
        max_grad_norm: float | None,
    ) -> None:
        self._adds_up = False
        super().__init__(
            optimizer,
            shards,
            device,
            streaming=streaming,
            max_grad_norm=max_grad_norm,
            # The stream of reductions waits for each copy, as it does under torch's offload policy. That takes no
            # longer, and keeps the gradients of one gather off the peak.
            in_flight_bytes=0,
        )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let gradients add up, on the host: run all backwards of a step but the last inside.

        Not needed with `model.set_requires_gradient_sync(False)`, where they add up on the device before they are
        reduced.
        """
        self._adds_up = True
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that have been offloaded and not been used included."""
        super().zero_grad(set_to_none)
        self._adds_up = False
        if not self._closed:
            self._store.discard(self._members.values())

    def end_forward(self) -> None:
        """Free the slots of an update that the forward has carried out."""
        with self._working():
            self.streamed.free_slots()

    @torch.no_grad()
    def _on_final(self, param: torch.Tensor) -> None:
        member = self._members[param]
        if self._adds_up and member.arrival is not None:
            with self._working():
                self._add_offloaded(member)
        super()._on_final(param)

    def _add_offloaded(self, member: Member) -> None:
        """Add the gradient that has been offloaded to the new one, which takes its place."""
        gradient = member.param.grad
        assert isinstance(gradient, DTensor)
        local = gradient.to_local()
        # On the stream of FSDP2's reductions, to which both belong.
        before = torch.empty_like(local, dtype=member.dtype)
        self._store.bring_back(member, member.flat(before))
        local.add_(before)
        self._store.discard([member])

    def _step(self) -> None:
        if getattr(self, "grad_scale", None) is not None:
            raise RuntimeError(
                "GradScaler has to see gradients, which have left for the host; expected no scaler; try bf16, which "
                "needs none"
            )
        super()._step()
        self._adds_up = False
