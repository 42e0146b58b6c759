# SPDX-License-Identifier: Apache-2.0
"""AdamW whose state lives partly on the host, at nearly the speed of the GPU.

`HybridDeviceOptimizer` is a real `torch.optim.Optimizer`. A share of the state (fp32 masters and moments) is kept and
updated on the CPU. Another share may be kept on the host and stream through the GPU. The rest stays on the GPU.
Gradients of the CPU share are offloaded during backward, and all shares are updated in the order of the next forward,
behind its compute.

It shards nothing, and offloads no activations or weights. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from reference_impl.optimizers import checks
from reference_impl.optimizers.algorithms import Algorithm, MatrixAlgorithm, group_defaults
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.formulas import formulas_in
from reference_impl.optimizers.gradients.backward_hooks import BackwardHooks
from reference_impl.optimizers.gradients.leaving import LeavingGradients
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.options import Budgets, CpuUpdate, Options, Streaming
from reference_impl.optimizers.placement import placed
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.step import StepPlan, as_one, in_turn, snapshot


class HybridDeviceOptimizer(HostedOptimizer):
    """AdamW over fp32 masters, `offload_fraction` of whose state lives on the CPU.

    >>> optimizer = HybridDeviceOptimizer(model.parameters(), offload_fraction=0.5, lr=3e-4, max_grad_norm=1.0)
    >>> optimizer.attach(model)
    >>> for batch in batches:
    ...     model(batch).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    Args:
        params: parameters or groups, in the order in which the forward uses them; bf16, fp16 or fp32.
        offload_fraction: share of the state's bytes that the CPU holds and updates, exact to 64 elements.
        offload_filter: instead of the fraction, selects the parameters to offload whole.
        split: instead of both, the shares (resident, streamed, CPU) with the sum 1, or `auto` for the fastest.
        budgets: memory that `auto` may use for states, and this machine's rates.
        streaming: how the streamed share's states cross the link.
        cpu: threads, buckets and pinning of the CPU share, and whether its update overlaps with the next forward.
        algorithm: the formula; `Adam()` is AdamW. Its hyper-parameters (`lr`, `betas`, ...) follow as keywords. Groups
            with `use_muon=True` or an `algorithm` of their own are updated in whole matrices, never on the CPU.
        max_grad_norm: clip the global norm exactly; gradients are divided by `max(1, (norm + 1e-6) / max)`.
        reduce_norm_squared: given this rank's squared norm (0-dim fp32), returns that over all ranks. Not needed for
            DTensors of one mesh, whose norm is summed over it.
        backward_overlap: the work during backward. `gradients` (default): gradients go to the host and their GPU
            memory is freed; a `GradientStandIn` stays on `param.grad`. `update`: the CPU update starts too, with the
            hyper-parameters of that moment, and nothing can be skipped or clipped. `nothing`: gradients stay on
            `param.grad` until `step()`, for code that reads them. Gradients of DTensors leave only if this is given.

    Bitwise contract: the CPU share equals `torch.optim.AdamW(fused=True)` on the CPU over the fp32 master, the
    resident and the streamed share equal it on the device, and the parameter is its master rounded to nearest even.

    Raises TypeError or ValueError for options and parameters it cannot serve, and HostMemoryError when the host
    lacks the memory: all before anything is built.
    """

    # Megatron's form shows masters of fp32, keeps a parameter in one bucket, and passes over unknown states.
    _masters_of_all = _whole_members = _passes_over_unknown = False

    def __init__(
        self,
        params: Any,
        *,
        offload_fraction: float = 1.0,
        offload_filter: Callable[[torch.Tensor], bool] | None = None,
        split: tuple[float, float, float] | Literal["auto"] | None = None,
        budgets: Budgets | None = None,
        streaming: Streaming | None = None,
        cpu: CpuUpdate | None = None,
        algorithm: Algorithm | MatrixAlgorithm | None = None,
        max_grad_norm: float | None = None,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        backward_overlap: checks.BackwardOverlap | None = None,
        **hyper_parameters: Any,
    ) -> None:
        options = Options(
            budgets=budgets or Budgets(), streaming=streaming or Streaming(), cpu=cpu or CpuUpdate()
        )
        params, algorithms, matrices = formulas_in(params, algorithm)
        checks.check_options(algorithms, hyper_parameters, offload_fraction, backward_overlap)
        checks.check_split(
            split, offload_fraction, algorithms, filtered=bool(offload_filter), budgets=options.budgets
        )
        checks.check_cpu(options.cpu)
        self._hyper_parameters = hyper_parameters
        self._backward_overlap = backward_overlap or "gradients"
        self._accumulating = False
        self._asks_whether_accumulating: Callable[[], bool] = lambda: False
        super().__init__(
            params,
            {**group_defaults(algorithms[0]), **hyper_parameters},
            algorithms[0],
            matrices=matrices,
            max_grad_norm=max_grad_norm,
            reduce_norm_squared=reduce_norm_squared,
            updates_in_backward=backward_overlap == "update",
            overlaps_forward=options.cpu.overlap_forward,
            shows_steps=True,
            masters_of_all=self._masters_of_all,
            passes_over_unknown=self._passes_over_unknown,
        )
        placement, streamed = placed(
            self._device,
            algorithms[0],
            [param for group in self.param_groups for param in group["params"]],
            split=split or (1 - offload_fraction, 0.0, offload_fraction),
            options=options,
            offload=offload_filter,
            matrices=self._formulas.by_param(self.param_groups),
            follows_writes=self._follows_writes,
        )
        self.split = placement.split
        mover = GradientMover(self._device)
        self._leaving = LeavingGradients(
            mover,
            leave_in_backward=backward_overlap != "nothing",
            sharded_too=backward_overlap is not None,
            measures=backward_overlap != "update",
        )
        shares = Shares(
            self._device,
            algorithms[0],
            streamed=streamed,
            cpu=options.cpu,
            whole_members=self._whole_members,
            gradients=mover,
            follows_writes=self._follows_writes,
            publishes_at_once=True,
        )
        self._backward = BackwardHooks(self._device, self._members, self._leaving, self._on_gradient)
        self._hooks.append(self._backward.close)
        self._start(shares, placement, self._leaving)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the fraction applies to it by itself."""
        if not self._engine.is_closed:
            self.synchronize()
        self._add_group(param_group, self._hyper_parameters)

    def _check_group(self, group: dict[str, Any]) -> None:
        checks.check_group(self._formulas.last, group)

    def _admitted(self, members: Sequence[Member]) -> None:
        self._backward.hear(members, where_they_leave=not self._engine.open.prefetches)

    def attach(self, model: torch.nn.Module) -> None:
        """Let `step()` return early, see `HostedOptimizer.attach`; under DistributedDataParallel a collective."""
        self._backward.check(model, self.split)
        super().attach(model)
        self._backward.attach(model)

    @in_turn
    def _on_gradient(self, param: torch.Tensor, reduced: torch.Tensor | None = None) -> None:
        """A gradient is accumulated, or `reduced`: send it if it is final; in mode `update` update buckets."""
        engine, member = self._engine, self._members.get(param)
        if member is None:
            # See `_admit`.
            return
        if self._leaving.rest is not None and not engine.attached.waits:
            raise checks.forward_before_step()
        if reduced is None and engine.attached and engine.open.prefetches:
            self.streamed.on_gradient(member)
        leaves = member.pieces and self._leaving.leave_in_backward(member, reduced)
        if self._is_accumulating or not leaves:
            self._leaving.keep(member)
            return
        engine.ready()
        engine.used.forget()
        self._send(member, reduced)

    def _send(self, member: Member, reduced: torch.Tensor | None) -> None:
        """Offload a gradient and put a stand-in in its place; changes nothing when it raises."""
        engine, part = self._engine, self._leaving.backward_part
        if member in self._leaving.used_in_backward:
            raise checks.second_gradient(member)
        if self._leaving.send(member, reduced) and self._backward_overlap == "update":
            for bucket in engine.open.completed_by(member, sent=self._leaving.used_in_backward):
                # A split member's other part is updated in step(), and both are published together.
                if part is None:
                    engine.follow_writes()
                    part = CpuStep(StepPlan(snapshot(self.param_groups), None))
                written = engine.open.compare(bucket)
                if engine.returns_early and self._follows_writes:
                    engine.aliased.note(piece.member for piece in bucket.pieces)
                with as_one():
                    self._leaving.backward_part = part
                    engine.open.submit(bucket, part, written)
                # A use of such a weight before step() would find it old or new.
                engine.let_users_wait(piece.member for piece in bucket.pieces)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let gradients add up on the device: put all micro-batches but the last inside."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def accumulate_while(self, asks: Callable[[], bool]) -> None:
        """Let gradients add up on the device if `asks()` says so: for a loop that cannot enter `accumulate()`."""
        self._asks_whether_accumulating = asks

    @property
    def _is_accumulating(self) -> bool:
        return self._accumulating or self._asks_whether_accumulating()

    def _check_load(self, inside: Sequence[Member], remade: Sequence[Member]) -> None:
        super()._check_load(inside, remade)
        checks.check_refresh(remade)

    def _refresh(self, members: Sequence[Member]) -> None:
        checks.check_refresh(members)
        self._engine.writes.make(lambda: self._engine.open.refresh_masters(members))
