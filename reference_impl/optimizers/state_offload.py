"""Optimizer states that live on the host and visit the GPU for their update.

`OptimizerStateOffloader` wraps `torch.optim.AdamW(fused=True)`, Adam or SGD with momentum. Between steps moments
and fp32 masters are in pinned host memory; `step()` streams them through a few device buffers, where the same fused
kernel updates them. With a model attached all of this runs behind the next forward, whose modules wait on the device
for their own weights.

It does not compute on the CPU (`hybrid` does) and it does not shard: each rank offloads what it is given.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reference_impl.optimizers import checks
from reference_impl.optimizers.clip_decision import decide
from reference_impl.optimizers.hosted import forgetful
from reference_impl.optimizers.layout import Member, gradient_of, members_of
from reference_impl.optimizers.options import CHUNK_BYTES
from reference_impl.optimizers.state_dict import SavedOptimizer
from reference_impl.optimizers.state_offload_wrapped import (
    StreamedParts,
    algorithm_of,
    check_group,
)
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.storage import StateFormat


class OptimizerStateOffloader(SavedOptimizer):
    """The wrapped optimizer with `fraction` of its states on the host; use it in its place.

    >>> optimizer = OptimizerStateOffloader(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
    >>> optimizer.attach(model)
    >>> for batch in batches:
    ...     model(batch).backward()
    ...     optimizer.step()

    Parameters that are not fp32 get fp32 masters. The parameter groups stay those of the wrapped optimizer, so that a
    learning-rate scheduler of either works; its states are taken over.

    Args:
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD` with `fused=True`, with or without states.
        fraction: share of the elements whose states are offloaded, exact to 64; those that the forward uses last are
            offloaded first.
        chunk_bytes: most bytes of states that one copy moves.
        device_budget_bytes: device memory for slots of a chunk each, and for what one chunk needs beside them (fp32
            gradients, unpacked states); by default three slots. With a model attached, extra slots take memory that
            backward frees, so that states come in behind it; they are freed once these have been copied out.
        offload_masters: False keeps the masters on the device, so that only moments are offloaded.
        hi_lo_masters: only the lower half of a bf16 parameter's master is offloaded; the weight is the upper half.
            Exact. After writing a weight call `refresh_masters`. Loading states sets weights to their masters rounded.
        moments_dtype: `torch.bfloat16` stores moments in half the bytes. Not bitwise: they are rounded stochastically,
            the same way in every run.
        max_grad_norm: clip the global norm exactly; gradients are divided by `max(1, (norm + 1e-6) / max)`.
        reduce_norm_squared: given this rank's squared norm (0-dim fp32), returns that over all ranks.

    Bitwise contract: states and fp32 weights equal those of the wrapped optimizer over fp32 (master) parameters,
    and other weights are their masters rounded to nearest even. A step whose gradients are not finite changes
    nothing.

    Raises TypeError or ValueError for optimizers, options and parameters it cannot serve, and HostMemoryError when
    the host has too little memory: all before anything is changed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        fraction: float = 1.0,
        chunk_bytes: int = CHUNK_BYTES,
        device_budget_bytes: int | None = None,
        offload_masters: bool = True,
        hi_lo_masters: bool = False,
        moments_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        algorithm = algorithm_of(optimizer)
        if not 0 <= fraction <= 1:
            raise ValueError(
                f"fraction is {fraction}; expected a share of bytes in [0, 1]; try {min(max(fraction, 0.0), 1.0)}"
            )
        for group in optimizer.param_groups:
            check_group(algorithm, group)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        checks.check_clipping(
            params,
            max_grad_norm=max_grad_norm,
            reduces=reduce_norm_squared is not None,
            updates_in_backward=False,
        )
        self._device = checks.one_device(params)
        self._fraction = fraction
        self._max_grad_norm = max_grad_norm
        self._reduce_norm_squared = reduce_norm_squared
        self._hooks: list[RemovableHandle] = []
        share = StreamedShare(
            self._device,
            algorithm,
            chunk_bytes=chunk_bytes,
            device_budget_bytes=device_budget_bytes,
            state_format=StateFormat(
                offload_masters=offload_masters, hi_lo_masters=hi_lo_masters, moments_dtype=moments_dtype
            ),
        )
        self._open_share: StreamedShare | None = share
        self.grad_norm: torch.Tensor | None = None
        super().__init__(
            optimizer.param_groups, optimizer.defaults, algorithm, shows_steps=algorithm.counts_steps
        )
        self._wrapped = optimizer
        self.param_groups = optimizer.param_groups
        try:
            self._admit(range(len(self.param_groups)))
            self.state = {
                param: states for param, states in optimizer.state.items() if param in self._members
            }
        except BaseException:
            share.close()
            self._open_share = None
            raise
        optimizer.state.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this and to the wrapped optimizer; the fraction applies to it by itself."""
        super().add_param_group(param_group)
        if hasattr(self, "_wrapped"):
            try:
                check_group(self._algorithm, self.param_groups[-1])
                self.synchronize()
                self._admit([len(self.param_groups) - 1])
            except BaseException:
                self.param_groups.pop()
                raise
            self._attach_again()

    @torch.no_grad()
    def _admit(self, groups: Sequence[int]) -> None:
        """Make the chunks of the trainable parameters of `groups`, and masters from the parameters."""
        params = [
            (param, index)
            for index in groups
            for param in self.param_groups[index]["params"]
            if param.requires_grad
        ]
        self._check_unshared(param for param, _ in params)
        members = members_of(params, first_order=len(self._members), fraction=self._fraction, offload=None)
        self.streamed.add(
            {
                member: Part(
                    streamed=range(member.resident, member.param_local.numel()),
                    resident=range(member.resident),
                )
                for member in members
            }
        )
        self._members.update({member.param: member for member in members})

    @property
    def streamed(self) -> StreamedShare:
        """The share that holds all states: what is loaded, what is not queued yet, and what extra slots take.

        Raises RuntimeError when the optimizer is closed.
        """
        if self._open_share is None:
            raise RuntimeError("the optimizer is closed; expected an open one; try constructing a new one")
        return self._open_share

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue the update with the gradients that the parameters have; the host waits for nothing.

        With a model attached the gradients are taken off the parameters, and forward waits for each weight. Without
        one the live current stream waits for the whole update.
        """
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {
            member: gradient_of(member) for member in self._members.values() if member.param.grad is not None
        }
        if self._waits is not None:
            checks.check_used_in_time(gradients)
        self.synchronize()
        decision = decide(
            [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients.values()],
            self._device,
            reduce_norm_squared=self._reduce_norm_squared,
            max_norm=self._max_grad_norm,
            loss_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        self.grad_norm = None if decision is None else decision.norm
        if decision is None:
            return loss
        self.streamed.update(gradients, decision, self.param_groups)
        for member in gradients:
            member.pending = True
            if self._waits is not None:
                # Whoever writes into it later does not know that the update still reads it.
                member.param.grad = None
        if self._waits is None:
            self.synchronize()
        return loss

    def attach(self, model: nn.Module) -> None:
        """Let the update run behind the next forward: the model's modules wait for their own weights, on the device.

        Saving or loading the state_dict of any of them waits too. Raises ValueError under FSDP.
        """
        super().attach(model)
        if self.streamed.prefetches_in_backward:
            self._unhook()
            hook = forgetful(self._on_gradient)
            self._hooks = [param.register_post_accumulate_grad_hook(hook) for param in self._members]

    def _on_gradient(self, param: torch.Tensor) -> None:
        self.streamed.on_gradient(self._members[param])

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def _closed(self) -> bool:
        return self._open_share is None

    @property
    def _moves_in_backward(self) -> bool:
        return False

    def _wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for the updates of `members`, and drop their gradients."""
        listed = list(members)
        self.streamed.wait_for(listed)
        for member in listed:
            member.pending = False

    def synchronize(self) -> None:
        """Make the live current stream see finished weights: call it before reading them in your own code."""
        self._check_usable()
        self._wait_for([member for member in self._members.values() if member.pending])

    def _refresh(self, members: Sequence[Member]) -> None:
        self.synchronize()
        self.streamed.refresh_masters(members)

    def _finished(self, members: Iterable[Member]) -> StreamedParts:
        self._check_usable()
        self._wait_for([member for member in members if member.pending])
        return StreamedParts(self.streamed)

    def __setstate__(self, loaded: dict[str, Any]) -> None:
        """Take over loaded groups, the wrapped optimizer too."""
        super().__setstate__(loaded)
        self._wrapped.param_groups = self.param_groups

    def close(self) -> None:
        """Finish, take all hooks off and free the host memory. Calling it again does nothing."""
        if self._open_share is None:
            return
        self.synchronize()
        self._unhook()
        if self._waits is not None:
            self._waits.close()
        self._open_share.close()
        self._open_share = None

    def _check_usable(self) -> None:
        super()._check_usable()
        self._device.refuse_capture("optimizer state offload")
