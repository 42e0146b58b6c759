# SPDX-License-Identifier: Apache-2.0
"""Optimizer states that are kept on the host and copied to the GPU for their update.

`OptimizerStateOffloader` wraps `torch.optim.AdamW(fused=True)`, Adam, SGD with momentum or Muon. Between steps moments
and fp32 masters are in pinned host memory; `step()` streams them through a few device buffers, where the same fused
kernel updates them. With a model attached all of this runs behind the next forward, whose modules wait on the device
for their own weights.

It does not compute on the CPU (`hybrid` does) and it does not shard: each rank offloads its own parameters.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from offload_arithmetic.sizes import STATE_CHUNK_BYTES
from offload_arithmetic.update_time import Split
from reference_impl.optimizers import checks
from reference_impl.optimizers.gradients.backward_hooks import GradientHooks
from reference_impl.optimizers.gradients.standing import StandingGradients
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.optimizers.model_hooks import forgetful
from reference_impl.optimizers.options import States, Streaming
from reference_impl.optimizers.placement import SplitPlacement
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.state_offload_wrapped import wrapped_in
from reference_impl.optimizers.step import in_turn
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.storage import StateFormat


class OptimizerStateOffloader(HostedOptimizer):
    """The wrapped optimizer with `fraction` of its states on the host; use it in its place.

    >>> optimizer = OptimizerStateOffloader(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
    >>> optimizer.attach(model)
    >>> for batch in batches:
    ...     model(batch).backward()
    ...     optimizer.step()

    Parameters that are not fp32 get fp32 masters. The parameter groups stay the wrapped optimizer's, so that a
    learning-rate scheduler of either works; its states are taken over.

    Args:
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD` with `fused=True`, `torch.optim.Muon`, or a list of Muon and one
            of the others, to be stepped together; with or without states.
        fraction: share of the elements whose states are offloaded, exact to 64; the forward's last ones are offloaded
            first.
        chunk_bytes: most bytes of states that one copy moves.
        device_budget_bytes: device memory for slots of a chunk each, and for the scratch of one chunk (fp32
            gradients, unpacked states); by default three slots. With a model attached, extra slots take memory that
            backward frees, so that states come in behind it; they are freed once these have been copied out.
        offload_masters: False keeps the masters on the device, so that only moments are offloaded.
        states: their form, see `Streaming`. States that stay on the device have the compact forms, too. Where only
            the low bits of a master are stored, loading states sets weights to their masters rounded.
        max_grad_norm: clip the global norm exactly; gradients are divided by `max(1, (norm + 1e-6) / max)`.
        reduce_norm_squared: given this rank's squared norm (0-dim fp32), returns that over all ranks. Not needed for
            DTensors of one mesh, whose norm is summed over it.

    Bitwise contract: states and fp32 weights equal the wrapped optimizer's over fp32 (master) parameters, and other
    weights are their masters rounded to nearest even. A step whose gradients are not finite changes nothing.

    After `step()` gradients stay on the parameters until `zero_grad()`, as torch leaves them. With a model attached the
    update still reads them until the forward has waited for it: an earlier write into `param.grad` waits too. Who wrote
    through a tensor kept from before `step()`, or into a shard, gets a RuntimeError.

    Threads may call it at the same time, for instance `state_dict()` beside training: one waits for the other.

    Raises TypeError or ValueError for optimizers, options and parameters it cannot serve, and HostMemoryError when
    the host has too little memory: all before anything is changed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        fraction: float = 1.0,
        chunk_bytes: int = STATE_CHUNK_BYTES,
        device_budget_bytes: int | None = None,
        offload_masters: bool = True,
        states: States = "exact",
        max_grad_norm: float | None = None,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        streaming = Streaming(states=states, chunk_bytes=chunk_bytes)
        wrapped = wrapped_in(optimizer)
        checks.check_fraction("fraction", fraction)
        device = checks.one_device(param for group in wrapped.groups for param in group["params"])
        share = StreamedShare(
            device,
            wrapped.algorithm,
            chunk_bytes=streaming.chunk_bytes,
            device_budget_bytes=device_budget_bytes,
            state_format=StateFormat.of(
                streaming.states, wrapped.algorithm, device, offload_masters=offload_masters
            ),
        )
        super().__init__(
            wrapped.groups,
            wrapped.defaults,
            wrapped.algorithm,
            max_grad_norm=max_grad_norm,
            reduce_norm_squared=reduce_norm_squared,
            shows_steps=streaming.states != "exact",
        )
        self._accumulated = GradientHooks(forgetful(self._on_gradient))
        self._hooks.append(self._accumulated.close)
        self._start(
            Shares(device, wrapped.algorithm, streamed=share),
            SplitPlacement(Split(1 - fraction, fraction, 0.0), stays_in_chunks=True, option="fraction"),
            StandingGradients(),
            wrapped=wrapped,
        )

    @in_turn
    def attach(self, model: nn.Module) -> None:
        """Let the update run behind the next forward: the model's modules wait for their own weights, on the device.

        Under FSDP2 gathers wait for their own shards; call it after `fully_shard`. Saving or loading the state_dict of
        any module waits too. Raises ValueError under FSDP1 and for parameters that the model does not have.
        """
        super().attach(model)
        if self.streamed.prefetches_in_backward:
            self._accumulated.hear(self._members)

    @in_turn
    def _on_gradient(self, param: torch.Tensor) -> None:
        if not self._engine.is_closed and self._failures.first is None:
            self.streamed.on_gradient(self._members[param])
