"""The optimizer of streamed shards: that of streamed trained layers, for gradients that FSDP2 has reduced.

FSDP2 adds a reduction to what stands on the parameter. That is a DTensor whose local tensor is the stand-in, so
`clip_grad_norm_` finds the norm of all ranks. Only inside `accumulate()` a second gradient is added to the first.

Explained in docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from reference_impl.device import Device
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.step import in_turn
from reference_impl.trained_layers.optimizer import TrainedLayersOptimizer
from reference_impl.trained_layers.shards import StreamedShards


class ShardOptimizer(TrainedLayersOptimizer):
    """What `ShardStreamer` has made of a torch optimizer: use it in its place.

    `step()` returns when the update is prepared; gathers of the next forward carry it out, with the norm of all
    gradients over the mesh. It is a collective wherever gradients are clipped or checked for overflow: no rank may
    leave it out. Gradients are on the host from backward on; stand-ins on `param.grad` answer `clip_grad_norm_`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        shards: StreamedShards,
        device: Device,
        *,
        streaming: Streaming,
        max_grad_norm: float | None,
        undo: list[Callable[[], None]],
    ) -> None:
        super().__init__(
            optimizer,
            shards,
            device,
            streaming=streaming,
            max_grad_norm=max_grad_norm,
            # The stream of reductions waits for each copy, as it does under torch's offload policy. That takes no
            # longer, and keeps the gradients of one gather off the peak.
            in_flight_bytes=0,
            undo=undo,
        )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let gradients add up, on the host: run all backwards of a step but the last inside.

        Not needed with `model.set_requires_gradient_sync(False)`, where they add up on the device before they are
        reduced.
        """
        self._leaving.adds_shards = True
        yield

    @in_turn
    def end_forward(self) -> None:
        """Free the slots of an update that the forward has carried out."""
        self._check_usable()
        self.streamed.free_slots()
